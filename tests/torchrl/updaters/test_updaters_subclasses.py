"""Subclasses written for TorchRL's `WeightUpdaterBase`, such as its own updaters for vLLM, work with ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from weightsync import ConfigurationError, Evidence, OutcomeKind, RefusedError, WeightUpdaterBase


class Wrapper(nn.Module):
    """A policy around the model whose weights the workers get."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(1, 1)


class Mapping(WeightUpdaterBase):
    """An updater whose mapping accepts a wrapped policy or the text "a checkpoint"."""

    def __init__(self) -> None:
        self.given: Any = None
        self.synced: Any = None

    def _maybe_map_weights(self, server_weights: Any) -> Any:
        self.given = server_weights
        if isinstance(server_weights, Wrapper):
            return TensorDict(server_weights.model.state_dict(), [])
        return {"loaded": torch.ones(1)} if server_weights == "a checkpoint" else server_weights

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        self.synced = server_weights


class PushesItself(WeightUpdaterBase):
    """An updater that makes all calls of a push itself."""

    def __init__(self) -> None:
        self.pushed: list[tuple[Any, Any]] = []

    def _push_weights(self, *, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        if policy_or_weights == "none":
            raise LookupError("no such weights")
        self.pushed.append((policy_or_weights, worker_ids))

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        raise AssertionError


class OverridesPush(WeightUpdaterBase):
    """An updater that overrides the push with TorchRL's signature."""

    def __init__(self) -> None:
        self.pushed: list[tuple[Any, Any]] = []

    def push_weights(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:  # type: ignore[override]
        self.pushed.append((policy_or_weights, worker_ids))
        self._call_post_hooks()

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        raise AssertionError


def test_the_mapping_gets_the_module_itself() -> None:
    updater, policy = Mapping(), Wrapper()
    updater.push_weights(policy)

    assert updater.given is policy
    assert sorted(updater.synced.keys()) == ["bias", "weight"]


class HalfPrecision(Mapping):
    """An updater that converts the weights that its base extracts, as subclasses of TorchRL's class do."""

    def _maybe_map_weights(self, server_weights: Any) -> Any:
        return WeightUpdaterBase._maybe_map_weights(self, server_weights).half()


def test_a_mapping_that_calls_its_base_gets_the_modules_weights_and_not_the_module() -> None:
    """The mapping used to get the module, and converted the trainer's own policy."""
    updater, policy = HalfPrecision(), nn.Linear(1, 1)
    updater.push_weights(policy)

    assert {tensor.dtype for tensor in updater.synced.values()} == {torch.float16}
    assert policy.weight.dtype is torch.float32


def test_a_module_that_the_mapping_returns_unchanged_is_extracted() -> None:
    updater = Mapping()
    updater.push_weights(nn.Linear(1, 1))

    assert isinstance(updater.synced, TensorDict)


def test_the_mapping_may_take_other_types_than_weights() -> None:
    updater = Mapping()
    updater.push_weights("a checkpoint")  # type: ignore[arg-type]
    assert list(updater.synced) == ["loaded"]

    with pytest.raises(ConfigurationError, match="not a str"):
        updater.push_weights("another")  # type: ignore[arg-type]


def test_a_subclass_may_make_all_calls_of_a_push_itself() -> None:
    updater, hooked = PushesItself(), list[str]()
    updater.register_post_hook(lambda: hooked.append("hook"))

    report = updater({}, worker_ids=[0, 3])

    assert updater.pushed == [({}, [0, 3])]
    assert {worker: outcome.kind for worker, outcome in report.outcomes.items()} == {0: OutcomeKind.APPLIED}
    assert hooked == ["hook"]
    with pytest.raises(RefusedError, match="no such weights"):
        updater("none")  # type: ignore[arg-type]
    assert hooked == ["hook"]


def test_a_subclass_may_override_the_push_and_call_the_hooks() -> None:
    updater, hooked = OverridesPush(), list[str]()
    updater.register_post_hook(lambda: hooked.append("hook"))

    updater(policy_or_weights={}, worker_ids=3)

    assert updater.pushed == [({}, 3)]
    assert hooked == ["hook"]


class Asynchronous(WeightUpdaterBase):
    """An updater whose call for one worker is async."""

    async def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        raise AssertionError


class WhollyAsynchronous(PushesItself):
    """An updater whose whole push is async."""

    async def _push_weights(self, *, policy_or_weights: Any = None, worker_ids: Any = None) -> None:  # type: ignore[override]
        raise AssertionError


@pytest.mark.parametrize("updater", [Asynchronous, WhollyAsynchronous])
def test_g11_an_async_call_that_is_never_awaited_is_refused(updater: type[WeightUpdaterBase]) -> None:
    with pytest.raises(RefusedError, match="its method is async, and nothing here awaits it") as raised:
        updater().push_weights({"weight": torch.ones(1)})

    assert raised.value.report[0].evidence is Evidence.NONE
