"""Our updaters have the names and signatures of TorchRL's, and a TorchRL collector can use one of ours."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from skipping import require_modules

import weightsync

pytestmark = pytest.mark.torchrl

NAMES = [
    "WeightUpdaterBase",
    "VanillaWeightUpdater",
    "MultiProcessedWeightUpdater",
    "RemoteModuleWeightUpdater",
    "RayWeightUpdater",
]
MEMBERS = [
    "__call__",
    "_get_server_weights",
    "_maybe_map_weights",
    "_skip_update",
    "_sync_weights_with_worker",
    "all_worker_ids",
    "from_policy",
    "increment_version",
    "init",
    "push_weights",
    "register_collector",
    "register_post_hook",
]
PROPERTIES = ["collector", "collectors", "post_hooks"]


@pytest.fixture(scope="module")
def torchrl() -> Iterator[Any]:
    """The module `torchrl.collectors`, which warns about its own deprecations when it is imported."""
    require_modules("torchrl", what="OUR UPDATERS AGAINST TORCHRL'S", extra="torchrl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield importlib.import_module("torchrl.collectors")


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", NAMES)
def test_constructors_equal_torchrls(name: str, torchrl: Any) -> None:
    """TorchRL's base class has no constructor of its own, so that a subclass need not call any: nor has ours."""
    ours, theirs = getattr(weightsync, name), getattr(torchrl, name)

    assert parameters(ours.__init__) == parameters(theirs.__init__)
    assert (ours.__init__ is object.__init__) is (theirs.__init__ is object.__init__)


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("name", NAMES)
def test_methods_equal_torchrls_except_for_added_keywords(name: str, member: str, torchrl: Any) -> None:
    theirs = parameters(getattr(getattr(torchrl, name), member))
    ours = parameters(getattr(getattr(weightsync, name), member))

    # TorchRL itself has two names for one argument of this hook.
    alias = {"policy_or_weights": "server_weights"} if member == "_maybe_map_weights" else {}
    renamed = [(alias.get(parameter, parameter), kind, default) for parameter, kind, default in theirs]
    assert ours[: len(theirs)] == renamed
    assert {kind for _, kind, _ in ours[len(theirs) :]} <= {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("member", PROPERTIES)
def test_properties_exist_as_in_torchrl(member: str, torchrl: Any) -> None:
    assert isinstance(vars(torchrl.WeightUpdaterBase)[member], property)
    assert isinstance(vars(weightsync.WeightUpdaterBase)[member], property)


@pytest.mark.parametrize("name", NAMES)
def test_abstract_methods_equal_torchrls(name: str, torchrl: Any) -> None:
    assert getattr(weightsync, name).__abstractmethods__ == getattr(torchrl, name).__abstractmethods__


@pytest.mark.filterwarnings("ignore")
def test_a_torchrl_collector_pushes_through_a_weightsync_updater(torchrl: Any) -> None:
    envs, modules = importlib.import_module("torchrl.envs"), importlib.import_module("tensordict.nn")

    def policy() -> Any:
        return modules.TensorDictModule(torch.nn.LazyLinear(2), in_keys=["observation"], out_keys=["action"])

    environment = envs.GymEnv("CartPole-v1", categorical_action_encoding=False)
    acting, trained = policy(), policy()
    for each in (acting, trained):
        each.module(torch.zeros(4))
    updater = weightsync.VanillaWeightUpdater.from_policy(acting)
    collector = torchrl.Collector(environment, acting, frames_per_batch=8, total_frames=8, weight_updater=updater)
    try:
        assert updater.collector is collector

        collector.update_policy_weights_(trained)

        assert torch.equal(acting.module.weight, trained.module.weight)
    finally:
        collector.shutdown()
