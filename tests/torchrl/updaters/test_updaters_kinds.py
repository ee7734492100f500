"""The updaters that make no calls to other machines, and the collectors of any updater."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from updaters_support import Collector, Recorder, constant, weights

from weightsync import (
    ConfigurationError,
    Evidence,
    MultiProcessedWeightUpdater,
    OutcomeKind,
    RefusedError,
    RemoteModuleWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)

CPU = torch.device("cpu")

# ---------------------------------------------------------------------------------------------------- collectors


def test_collector_properties_are_none_without_a_collector() -> None:
    updater = Recorder()

    assert updater.collector is None
    assert updater.collectors is None
    updater.increment_version()


def test_a_collector_is_held_weakly() -> None:
    updater, collector = Recorder(), Collector()
    updater.register_collector(collector)
    assert updater.collector is collector
    assert updater.collectors == [collector]

    del collector
    gc.collect()

    assert updater.collector is None
    assert updater.collectors == []
    updater.increment_version()


def test_a_second_collector_is_refused_while_the_first_is_alive() -> None:
    updater, first, second = Recorder(), Collector(), Collector()
    updater.register_collector(first)
    updater.register_collector(first)

    with pytest.raises(ConfigurationError, match="make another updater"):
        updater.register_collector(second)
    assert (updater.collector, updater.collectors) == (first, [first])

    del first
    gc.collect()
    updater.register_collector(second)
    assert (updater.collector, updater.collectors) == (second, [second])


@pytest.mark.parametrize("value", [None, "collector", 3])
def test_register_collector_refuses_objects_that_cannot_be_referenced_weakly(value: Any) -> None:
    updater = Recorder()
    with pytest.raises(ConfigurationError, match=r"^register_collector\(\) was given"):
        updater.register_collector(value)

    assert updater.collectors is None


def test_a_weight_getter_that_is_not_a_function_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"^weight_getter= is of type TensorDict: give a function"):
        VanillaWeightUpdater(policy_weights=weights(0.0), weight_getter=weights(0.0))
    with pytest.raises(ConfigurationError, match=r"^get_server_weights= is of type TensorDict: give a function"):
        MultiProcessedWeightUpdater(get_server_weights=weights(0.0), policy_weights={})


@pytest.mark.parametrize("value", [None, 3, [weights(0.0)]])
def test_vanilla_refuses_policy_weights_that_are_not_weights(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^policy_weights= is of type \w+: give the TensorDict or the dict"):
        VanillaWeightUpdater(policy_weights=value)


@pytest.mark.parametrize("value", [None, 3, weights(0.0), [weights(0.0)]])
def test_multiprocessed_refuses_policy_weights_that_are_not_a_dict_by_device(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^policy_weights= is of type .*: give a dict that maps each device"):
        MultiProcessedWeightUpdater(get_server_weights=None, policy_weights=value)


def test_increment_version_works_as_a_post_hook() -> None:
    updater, collector = Recorder(), Collector()
    updater.register_collector(collector)
    updater.register_post_hook(updater.increment_version)

    updater.push_weights()

    assert collector.version == 1


def test_init_takes_anything_and_does_nothing() -> None:
    updater = Recorder([0])

    updater.init(1, anything=2)

    assert updater.log == []


@pytest.mark.parametrize("kind", [VanillaWeightUpdater, MultiProcessedWeightUpdater, RemoteModuleWeightUpdater])
def test_all_updaters_are_subclasses_of_weight_updater_base(kind: type) -> None:
    assert issubclass(kind, WeightUpdaterBase)


# ------------------------------------------------------------------------------------------------------- vanilla


def test_vanilla_copies_in_place() -> None:
    live = weights(0.0)
    held = live["layer", "weight"]
    updater = VanillaWeightUpdater(policy_weights=live)

    report = updater.push_weights(weights(2.0))

    assert held.tolist() == [2.0, 2.0]
    assert constant(live) == {2.0}
    assert report[0].kind is OutcomeKind.APPLIED
    assert report[0].evidence is Evidence.CALL
    assert updater.all_worker_ids() is None
    assert updater.policy_weights is live


def test_vanilla_calls_its_getter_if_no_weights_are_given() -> None:
    live = weights(0.0)
    updater = VanillaWeightUpdater(weight_getter=lambda: weights(3.0), policy_weights=live)

    updater.push_weights()

    assert constant(live) == {3.0}


@pytest.mark.parametrize("getter", [None, lambda: None])
def test_vanilla_without_any_weights_raises_and_pushes_nothing(getter: Any) -> None:
    live = weights(0.0)

    with pytest.raises(ConfigurationError, match="Nothing was pushed"):
        VanillaWeightUpdater(weight_getter=getter, policy_weights=live).push_weights()

    assert constant(live) == {0.0}


def test_vanilla_from_policy_writes_parameters_buffers_and_extra_state_in_place() -> None:
    class Counting(nn.BatchNorm1d):
        extra = 0

        def get_extra_state(self) -> int:
            return self.extra

        def set_extra_state(self, state: int) -> None:
            self.extra = state

    def policy(fill: float, extra: int) -> Any:
        made = nn.Sequential(nn.Linear(2, 2), Counting(2))
        made[1].extra = extra
        with torch.no_grad():
            for tensor in [*made.parameters(), *made.buffers()]:
                tensor.fill_(fill)
        return made

    live, trained = policy(0.0, 0), policy(1.0, 7)
    parameter = live[0].weight
    updater = VanillaWeightUpdater.from_policy(live)

    updater.push_weights(trained)

    assert {
        value
        for tensor in live.state_dict().values()
        if isinstance(tensor, torch.Tensor)
        for value in tensor.flatten().tolist()
    } == {1.0}
    assert live[1].extra == 7
    assert live[0].weight is parameter
    assert updater.policy_weights["0", "weight"] is parameter


def test_vanilla_from_policy_accepts_a_tensordict_modules_own_names() -> None:
    live, trained = (TensorDictModule(nn.Linear(2, 1), in_keys=["x"], out_keys=["y"]) for _ in range(2))
    updater = VanillaWeightUpdater.from_policy(live)

    updater.push_weights(trained)
    assert torch.equal(live.module.weight, trained.module.weight)

    updater.push_weights(TensorDict.from_module(trained).data)
    assert torch.equal(live.module.bias, trained.module.bias)


def test_weights_that_do_not_fit_are_refused_and_change_nothing() -> None:
    live = weights(0.0)
    other = weights(1.0)
    other["layer", "bias"] = torch.ones(3)

    with pytest.raises(RefusedError, match=r"layer.bias"):
        VanillaWeightUpdater(policy_weights=live).push_weights(other)

    assert constant(live) == {0.0}


# ----------------------------------------------------------------------------------------------- multi-processed


def test_multiprocessed_copies_into_each_buffer() -> None:
    buffers = {CPU: weights(0.0), torch.device("cpu", 0): weights(0.0)}
    updater = MultiProcessedWeightUpdater(get_server_weights=lambda: weights(5.0), policy_weights=buffers)

    report = updater.push_weights()

    assert updater.all_worker_ids() == list(buffers)
    assert [constant(buffer) for buffer in buffers.values()] == [{5.0}, {5.0}]
    assert [report[device].kind for device in buffers] == [OutcomeKind.APPLIED] * 2


def test_multiprocessed_copies_into_the_buffer_with_the_key_none() -> None:
    """TorchRL's multi-process collectors use the key None if they were given no device."""
    buffers: Any = {None: weights(0.0)}

    report = MultiProcessedWeightUpdater(get_server_weights=None, policy_weights=buffers).push_weights(weights(5.0))

    assert report.ok
    assert constant(buffers[None]) == {5.0}


def test_multiprocessed_copies_only_into_the_buffers_of_the_named_workers() -> None:
    buffers: Any = {0: weights(0.0), 1: weights(0.0)}
    updater = MultiProcessedWeightUpdater(get_server_weights=None, policy_weights=buffers)

    updater.push_weights(weights(1.0), worker_ids=[1])

    assert [constant(buffer) for buffer in buffers.values()] == [{0.0}, {1.0}]


def report_update(shared: Any, updated: Any, seen: Any) -> None:
    """Main function of another process: once the buffer is updated, report the values in it."""
    updated.wait(60)
    seen.put(sorted(constant(shared)))


def test_multiprocessed_reaches_another_process_by_shared_memory(forkserver: Any) -> None:
    shared = weights(0.0).share_memory_()
    updated, seen = forkserver.Event(), forkserver.SimpleQueue()
    process = forkserver.Process(target=report_update, args=(shared, updated, seen))
    process.start()

    updater = MultiProcessedWeightUpdater(get_server_weights=None, policy_weights={CPU: shared})
    updater.push_weights(weights(4.0))
    updated.set()
    process.join(60)

    assert process.exitcode == 0
    assert seen.get() == [4.0]
    seen.close()


def test_multiprocessed_reports_a_buffer_that_does_not_fit_and_fills_the_others() -> None:
    buffers: Any = {0: TensorDict({"other": torch.zeros(1)}, batch_size=[]), 1: weights(0.0)}
    updater = MultiProcessedWeightUpdater(get_server_weights=None, policy_weights=buffers)

    with pytest.raises(RefusedError) as failure:
        updater.push_weights(weights(1.0))

    assert failure.value.refused.keys() == {0}
    assert constant(buffers[1]) == {1.0}
    assert buffers[0]["other"].tolist() == [0.0]


def test_multiprocessed_without_a_getter_needs_weights() -> None:
    updater = MultiProcessedWeightUpdater(get_server_weights=None, policy_weights={CPU: weights(0.0)})

    with pytest.raises(ConfigurationError, match="get_server_weights="):
        updater.push_weights()


def test_the_docstring_of_multiprocessed_warns_of_torn_reads() -> None:
    said = MultiProcessedWeightUpdater.__doc__ or ""

    assert "two versions" in said
    assert "SharedMemWeightSyncScheme" in said


# ------------------------------------------------------------------------------------------------- remote module


def test_remote_module_needs_weights() -> None:
    updater = RemoteModuleWeightUpdater()

    with pytest.raises(RuntimeError, match="Pass them"):
        updater.push_weights()


def test_remote_module_pushes_nothing_and_reports_skipped() -> None:
    updater = RemoteModuleWeightUpdater()
    ran: list[int] = []
    updater.register_post_hook(lambda: ran.append(1))

    report = updater.push_weights(weights())

    assert updater.all_worker_ids() is None
    assert [outcome.kind for outcome in report.outcomes.values()] == [OutcomeKind.SKIPPED]
    assert report.version is None
    assert ran == [1]
