"""TorchRL's own collectors with our schemes, on a real environment: the weights reach their workers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from collecting import MARKS, cartpole, choose, chosen, policy, start_workers_by
from duo import Duo
from fleet import filled
from tensordict import TensorDict
from torch import nn
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.trainers import UpdateWeights
from torchrl.weight_update import WeightStrategy as TheirStrategy
from torchrl.weight_update import WeightSyncScheme as TheirScheme

import weightsync.torchrl.collectors
from weightsync import (
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    OutcomeKind,
    SharedMemWeightSyncScheme,
    State,
    WeightStrategy,
    WeightSyncScheme,
)

pytestmark = MARKS

FRAMES = 40


@pytest.fixture
def collected() -> Iterator[None]:
    """Collect garbage after the test, since the queues of a collector hold semaphores until then."""
    yield
    gc.collect()


@pytest.mark.parametrize("kind", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme, NoWeightSyncScheme])
def test_weightsync_schemes_are_instances_of_torchrls_scheme(kind: Any) -> None:
    weightsync.torchrl.collectors.accept()

    assert isinstance(kind(), TheirScheme)
    assert issubclass(WeightSyncScheme, TheirScheme)


def test_torchrls_update_weights_hook_sends_the_registered_model(duo: Duo) -> None:
    filled(duo.source, 3.0)

    UpdateWeights(sender=duo.sending.get_sender())()

    assert duo.model() == {3.0}


class Normalised(nn.Module):
    """A module with extra state, such as TorchRL's `VecNormV2`."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((2,), fill))
        self.seen = {"loc": torch.full((2,), fill), "count": torch.tensor(1)}

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return self.seen

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        self.seen = state


def test_extra_state_in_weights_from_torchrls_strategy_is_applied(scheme_class: Any) -> None:
    """A `RayCollector` itself extracts the weights with TorchRL's strategy."""
    duo = Duo(scheme_class, make=Normalised, strategy="tensordict")
    duo.connect()

    duo.sending.send(TheirStrategy().extract_weights(Normalised(3.0)))

    assert duo.model.scale.tolist() == duo.model.seen["loc"].tolist() == [3.0, 3.0]
    duo.end()


def test_weights_can_be_applied_to_a_tensordict_from_torchrls_strategy() -> None:
    destination: TensorDict = TheirStrategy().extract_weights(Normalised(0.0)).data.clone()
    for fill in (2.0, 3.0):
        WeightStrategy().apply_weights(destination, Normalised(fill))

    assert destination["__extra_state__", "loc"].tolist() == destination["scale"].tolist() == [3.0, 3.0]


@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize(
    ("kind", "collector_class", "under_way", "start"),
    [
        (SharedMemWeightSyncScheme, MultiSyncCollector, 0, "spawn"),
        # Each worker has begun a batch, and a slow worker's may arrive last. Forking is cheaper than spawning.
        (MultiProcessWeightSyncScheme, MultiAsyncCollector, 2, "fork"),
    ],
    ids=["shared, in step", "pipes, out of step"],
)
def test_a_collectors_workers_act_with_the_sent_weights(
    kind: Any, collector_class: Any, under_way: int, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_workers_by(start, monkeypatch)
    made, scheme = policy(0), kind()
    collector = collector_class(
        [cartpole, cartpole],
        made,
        frames_per_batch=FRAMES,
        total_frames=FRAMES * 100,
        weight_sync_schemes={"policy": scheme},
    )
    try:
        batches = iter(collector)
        assert chosen(next(batches)) == {0}
        for action in (1, 0, 1):
            choose(made, action)
            collector.update_policy_weights_(made)
            seen = [chosen(next(batches)) for _ in range(4)]
            assert sum(actions != {action} for actions in seen) <= under_way, seen
        sender = scheme.get_sender()
        assert sender.version == 4
        assert {entry.served for entry in sender.workers.values()} == {4}
        choose(made, 0)
        assert scheme.send(worker_ids=[1]).of(OutcomeKind.APPLIED) == (1,)
        # Fault 2: the reference's send blocked until it was interrupted, and then returned normally.
        collector.procs[0].kill()
        report = scheme.send(made, on_failure="report")
        assert (report[0].kind, report[1].kind) == (OutcomeKind.LOST, OutcomeKind.APPLIED)
    finally:
        scheme.shutdown()
        for process in collector.procs:  # the collector's own shutdown would wait for the dead one
            process.kill()
            process.join()
        collector.closed = True
    assert scheme.get_sender().state is State.CLOSED


@pytest.mark.usefixtures("collected")
def test_a_single_process_collector_accepts_noweightsyncscheme() -> None:
    made, scheme = policy(0), NoWeightSyncScheme()
    collector = Collector(
        cartpole, made, frames_per_batch=FRAMES, total_frames=FRAMES * 3, weight_sync_schemes={"policy": scheme}
    )
    batches = iter(collector)
    assert chosen(next(batches)) == {0}
    choose(made, 1)
    collector.update_policy_weights_()
    assert chosen(next(batches)) == {1}
    collector.shutdown()
    scheme.shutdown()
