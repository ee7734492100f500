"""Every member of the weight updaters, as documented in `torchrl.collectors`."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from fleet import constants, filled, small
from tensordict import TensorDict

from weightsync import (
    MultiProcessedWeightUpdater,
    OutcomeKind,
    RemoteModuleWeightUpdater,
    SyncReport,
    VanillaWeightUpdater,
    WeightStrategy,
    WeightUpdaterBase,
)


def nested(fill: float) -> TensorDict:
    return TensorDict.from_module(small(fill)).data


def values(weights: Any) -> set[float]:
    flat = WeightStrategy("state_dict").extract_weights(weights)
    return {value for tensor in flat.values() for value in tensor.flatten().tolist()}


class Recording(WeightUpdaterBase):
    """A user's updater that records its calls."""

    def __init__(self, ids: Any = None) -> None:
        super().__init__()
        self.ids = ids
        self.synced: list[tuple[Any, set[float]]] = []

    def _get_server_weights(self) -> Any:
        return nested(7.0)

    def _maybe_map_weights(self, server_weights: Any) -> Any:
        return server_weights

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        self.synced.append((worker_id, values(server_weights)))

    def all_worker_ids(self) -> Any:
        return self.ids


class Collector:
    def __init__(self) -> None:
        self.versions = 0

    def increment_version(self) -> None:
        self.versions += 1


# ------------------------------------------------------------------------------------------- WeightUpdaterBase


@pytest.mark.parametrize("kind", ["module", "TensorDict", "dict", "None"])
def test_push_weights_takes_a_module_a_tensordict_a_dict_or_none(kind: str) -> None:
    given = {"module": small(2.0), "TensorDict": nested(2.0), "dict": dict(small(2.0).state_dict()), "None": None}
    updater = Recording([0, 1])

    report = updater.push_weights(given[kind])

    fill = 7.0 if kind == "None" else 2.0
    assert updater.synced == [(0, {fill}), (1, {fill})]
    assert isinstance(report, SyncReport)
    assert {outcome.kind for outcome in report.outcomes.values()} == {OutcomeKind.APPLIED}


def test_calling_an_updater_is_push_weights() -> None:
    updater = Recording([0])
    updater(nested(2.0))
    updater(policy_or_weights=nested(3.0), worker_ids=[0])

    assert updater.synced == [(0, {2.0}), (0, {3.0})]


@pytest.mark.parametrize(
    ("worker_ids", "reached"), [(1, [1]), ([0, 2], [0, 2]), (None, [0, 1, 2]), (torch.device("cpu"), None)]
)
def test_worker_ids_are_ints_or_devices_one_or_a_list(worker_ids: Any, reached: Any) -> None:
    cpu = torch.device("cpu")
    updater = Recording([0, 1, 2]) if reached is not None else Recording([cpu])
    updater.push_weights(nested(2.0), worker_ids=worker_ids)

    assert [worker for worker, _ in updater.synced] == (reached or [cpu])


def test_an_unknown_worker_id_is_a_value_error() -> None:
    updater = Recording([0, 1])
    with pytest.raises(ValueError, match="5"):
        updater.push_weights(nested(2.0), worker_ids=[0, 5])

    assert updater.synced == []


def test_all_worker_ids_is_none_by_default_and_then_there_is_one_nameless_worker() -> None:
    updater = Recording()
    updater.push_weights(nested(2.0))

    assert WeightUpdaterBase.all_worker_ids(updater) is None
    assert updater.synced == [(None, {2.0})]


def test_register_collector_holds_one_collector_weakly() -> None:
    updater, first, second = Recording(), Collector(), Collector()
    assert updater.collector is None
    updater.register_collector(first)
    assert updater.collector is first
    with pytest.raises(ValueError, match="an updater has one collector"):
        updater.register_collector(second)
    assert updater.collectors == [first]

    del first
    gc.collect()
    assert updater.collector is None
    updater.register_collector(second)
    assert updater.collector is second


def test_post_hooks_are_called_in_order_after_the_push() -> None:
    updater, seen = Recording([0]), []
    updater.register_post_hook(lambda: seen.append(("first", len(updater.synced))))
    updater.register_post_hook(lambda: seen.append(("second", len(updater.synced))))
    updater.push_weights(nested(2.0))

    assert seen == [("first", 1), ("second", 1)]
    assert len(updater.post_hooks) == 2


def test_init_does_nothing() -> None:
    assert Recording().init(1, 2, three=3) is None


def test_increment_version_is_handed_to_the_registered_collector() -> None:
    updater, collector = Recording(), Collector()
    updater.register_collector(collector)
    updater.increment_version()

    assert collector.versions == 1


def test_from_policy_is_none_by_default() -> None:
    assert Recording.from_policy(small()) is None
    assert WeightUpdaterBase.from_policy(small()) is None
    assert RemoteModuleWeightUpdater.from_policy(small()) is None


def test_get_server_weights_maybe_map_weights_and_skip_update_are_overridden() -> None:
    class Mine(Recording):
        def _maybe_map_weights(self, server_weights: Any) -> Any:
            return server_weights * 2

        def _skip_update(self, worker_id: Any) -> bool:
            return worker_id == 1

    updater = Mine([0, 1, 2])
    report = updater.push_weights()

    assert updater.synced == [(0, {14.0}), (2, {14.0})]
    assert report[1].kind is OutcomeKind.SKIPPED


def test_all_skipped_is_a_normal_return() -> None:
    class Mine(Recording):
        def _skip_update(self, worker_id: Any) -> bool:
            return True

    updater = Mine([0, 1])
    report = updater.push_weights(nested(1.0))

    assert {outcome.kind for outcome in report.outcomes.values()} == {OutcomeKind.SKIPPED}
    assert updater.synced == []


def test_a_worker_whose_sync_raises_fails_alone_and_is_reported() -> None:
    class Mine(Recording):
        def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
            if worker_id == 0:
                raise OSError("gone")
            super()._sync_weights_with_worker(worker_id=worker_id, server_weights=server_weights)

    updater = Mine([0, 1])
    with pytest.raises(RuntimeError, match="gone") as caught:
        updater.push_weights(nested(1.0))

    assert caught.value.report.failed == (0,)
    assert updater.synced == [(1, {1.0})]


# ---------------------------------------------------------------------------------------------------- the others


def test_vanilla_weight_updater_writes_its_policys_weights() -> None:
    policy = small(0.0)
    updater = VanillaWeightUpdater.from_policy(policy)
    updater.push_weights(small(3.0))

    assert isinstance(updater, VanillaWeightUpdater)
    assert constants(policy) == {3.0}


def test_vanilla_weight_updater_takes_a_getter() -> None:
    destination = nested(0.0)
    updater = VanillaWeightUpdater(weight_getter=lambda: nested(4.0), policy_weights=destination)
    updater.push_weights()

    assert values(destination) == {4.0}
    updater.push_weights(nested(5.0))
    assert values(destination) == {5.0}


def test_vanilla_weight_updater_without_weights_is_an_error_and_no_silence() -> None:
    updater = VanillaWeightUpdater(policy_weights=nested(0.0))

    with pytest.raises((ValueError, RuntimeError)):
        updater.push_weights()


def test_multi_processed_weight_updater_writes_each_workers_weights() -> None:
    source = small(0.0)
    destinations = {0: nested(0.0), 1: nested(0.0)}
    updater = MultiProcessedWeightUpdater(
        get_server_weights=lambda: TensorDict.from_module(source), policy_weights=destinations
    )
    filled(source, 2.0)
    updater.push_weights()
    assert [values(destinations[i]) for i in (0, 1)] == [{2.0}, {2.0}]
    updater.push_weights(nested(3.0), worker_ids=1)

    assert [values(destinations[i]) for i in (0, 1)] == [{2.0}, {3.0}]
    assert list(updater.all_worker_ids()) == [0, 1]


def test_multi_processed_weight_updater_takes_devices_for_ids() -> None:
    cpu, destination = torch.device("cpu"), nested(0.0)
    updater = MultiProcessedWeightUpdater(get_server_weights=None, policy_weights={cpu: destination})
    updater.push_weights(nested(3.0), worker_ids=cpu)

    assert values(destination) == {3.0}
    assert list(updater.all_worker_ids()) == [cpu]


def test_remote_module_weight_updater_must_be_given_weights() -> None:
    updater = RemoteModuleWeightUpdater()

    with pytest.raises(RuntimeError, match="weights"):
        updater.push_weights()
    updater.push_weights(nested(1.0))
    assert updater.all_worker_ids() is None


def test_fault_13_an_updater_does_not_push_from_inside_its_own_hook() -> None:
    updater, found = Recording([0]), []

    def hook() -> None:
        try:
            updater.push_weights(nested(2.0))
        except RuntimeError as error:
            found.append(error)

    updater.register_post_hook(hook)
    updater.push_weights(nested(1.0))

    assert updater.synced == [(0, {1.0})]
    assert len(found) == 1
