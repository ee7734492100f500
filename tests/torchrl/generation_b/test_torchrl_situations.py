"""Uses of TorchRL's multi-process collectors on our schemes: policies, weights, workers, models, options.

The workers are forked, which costs a tenth of the time of spawning. `test_torchrl_collectors` spawns once.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import multiprocessing.resource_sharer
import os
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from collecting import MARKS, WithCritic, cartpole, choose, chosen, policy, random_policy, start_workers_by, tensordict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector, Evaluator, MultiAsyncCollector, MultiSyncCollector

from weightsync import (
    ConfigurationError,
    DistributedWeightSyncScheme,
    ModelPathError,
    MultiProcessedWeightUpdater,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
    SharedMemWeightSyncScheme,
    SyncReport,
    VanillaWeightUpdater,
    WorkerLostError,
)

pytestmark = MARKS

FRAMES = 20
WORKERS = 2
Making = Callable[..., Any]


@pytest.fixture
def multi(monkeypatch: pytest.MonkeyPatch) -> Iterator[Making]:
    """Makes collectors of forked workers, by default synchronous, and shuts them down at the end."""
    start_workers_by("fork", monkeypatch)
    made: list[Any] = []

    def make(scheme: Any, collector_class: Any = MultiSyncCollector, **options: Any) -> Any:
        schemes = scheme if isinstance(scheme, dict) else {"policy": scheme}
        given = {"frames_per_batch": FRAMES, "total_frames": -1, "cat_results": None, **options}
        if collector_class is MultiAsyncCollector:
            del given["cat_results"]
        collector = collector_class([cartpole] * WORKERS, weight_sync_schemes=schemes, **given)
        made.append(collector)
        return collector

    yield make
    while made:
        made.pop().shutdown()
    gc.collect()  # a collector's queues hold semaphores until then


@pytest.fixture(params=[SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme], ids=["shared", "pipes"])
def scheme(request: pytest.FixtureRequest) -> Any:
    return request.param()


def served(scheme: Any) -> list[int]:
    """The version that each worker acked last."""
    return [entry.served for entry in scheme.get_sender().workers.values()]


def halves(batch: Any) -> list[set[int]]:
    """The actions of each worker in a batch of a synchronous collector."""
    return [chosen(part) for part in batch.reshape(-1).split(FRAMES // WORKERS)]


# ------------------------------------------------------------------------------------- policies and forms of weights

FORMS: dict[str, Callable[[Any], Any]] = {
    "module": lambda module: module,
    "tensordict": tensordict,
    "dict": lambda module: {name: tensor.detach() for name, tensor in module.state_dict().items()},
}


@pytest.mark.parametrize("source", ["policy", "factory", "factories", "both"])
def test_workers_start_with_their_policy_and_accept_weights_of_any_form(
    source: str, scheme: Any, multi: Making
) -> None:
    factory = functools.partial(policy, 0)
    given = {
        "policy": {"policy": policy(0)},
        "factory": {"policy_factory": factory},
        "factories": {"policy_factory": [factory, functools.partial(policy, 0)]},
        "both": {"policy": policy(0), "policy_factory": factory},
    }
    collector = multi(scheme, **given[source])
    batches = iter(collector)
    assert chosen(next(batches)) == {0}
    for action, form in [(1, "module"), (0, "tensordict"), (1, "dict")]:
        collector.update_policy_weights_(FORMS[form](policy(action)))
        assert chosen(next(batches)) == {action}, form
    assert len(set(served(scheme))) == 1


@pytest.mark.parametrize("source", ["policy", "both"])
def test_an_update_without_weights_sends_the_trainers_current_policy(source: str, scheme: Any, multi: Making) -> None:
    made = policy(0)
    factory = {"policy_factory": functools.partial(policy, 1)} if source == "both" else {}
    collector = multi(scheme, policy=made, **factory)
    batches = iter(collector)
    assert chosen(next(batches)) == {0}

    choose(made, 1)
    assert chosen(next(batches)) == {0}  # workers do not see the trainer's own parameters
    collector.update_policy_weights_()

    assert chosen(next(batches)) == {1}


def test_an_update_without_weights_or_a_trainers_policy_names_the_missing_model(scheme: Any, multi: Making) -> None:
    collector = multi(scheme, policy_factory=functools.partial(policy, 0))

    with pytest.raises(ConfigurationError, match="no model is registered for 'policy'"):
        collector.update_policy_weights_()
    assert chosen(next(iter(collector))) == {0}


def test_a_policy_without_weights_still_has_versions_and_acks(scheme: Any, multi: Making) -> None:
    """`RandomPolicy` is a callable, not a module, so its layout is empty."""
    collector = multi(scheme, policy_factory=random_policy)

    for version in (1, 2):
        collector.update_policy_weights_({})
        assert served(scheme) == [version] * WORKERS
    assert len(next(iter(collector)).reshape(-1)) == FRAMES


def test_a_module_without_weights_still_has_versions_and_acks(scheme: Any, multi: Making) -> None:
    made = TensorDictModule(lambda seen: torch.eye(2)[seen[..., 0].long() * 0], ["observation"], ["action"])
    collector = multi(scheme, policy=made)
    collector.update_policy_weights_()

    assert served(scheme) == [2] * WORKERS
    assert chosen(next(iter(collector))) == {0}


# -------------------------------------------------------------------------------------------------- single workers


@pytest.mark.parametrize("distinct", [False, True], ids=["one policy", "a factory each"])
@pytest.mark.parametrize("kind", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
def test_weights_for_one_worker_change_only_that_worker(kind: Any, distinct: bool, multi: Making) -> None:
    factories = [functools.partial(policy, 0) for _ in range(WORKERS)]
    given = {"policy_factory": factories} if distinct else {"policy": policy(0)}
    scheme = kind() if distinct else kind(per_worker_weights=True)
    collector = multi(scheme, **given)
    batches = iter(collector)
    assert halves(next(batches)) == [{0}, {0}]

    collector.update_policy_weights_({0: tensordict(policy(1))})
    assert halves(next(batches)) == [{1}, {0}]
    collector.update_policy_weights_({1: tensordict(policy(1)), 0: tensordict(policy(0))})
    assert halves(next(batches)) == [{0}, {1}]
    collector.update_policy_weights_(policy(0), worker_ids=1)

    assert halves(next(batches)) == [{0}, {0}]


def test_weights_for_one_worker_are_refused_unless_per_worker_weights_is_set(scheme: Any, multi: Making) -> None:
    collector = multi(scheme, policy=policy(0))

    with pytest.raises(ConfigurationError, match=r"none for workers \[1\].*per_worker_weights"):
        collector.update_policy_weights_({0: tensordict(policy(1))})
    with pytest.raises(ConfigurationError, match=r"some for \[7\]"):
        collector.update_policy_weights_({0: tensordict(policy(1)), 1: tensordict(policy(1)), 7: tensordict(policy(1))})
    assert halves(next(iter(collector))) == [{0}, {0}]


# -------------------------------------------------------------------------------------------------- several models


def test_several_models_with_a_scheme_each_are_updated_together_or_separately(multi: Making) -> None:
    made = WithCritic()
    schemes = {"policy": SharedMemWeightSyncScheme(), "policy.critic": MultiProcessWeightSyncScheme()}
    collector = multi(schemes, policy=made)
    critic = nn.Linear(4, 1)
    nn.init.constant_(critic.bias, 5.0)

    collector.update_policy_weights_(weights_dict={"policy.critic": critic})
    assert [served(scheme) for scheme in schemes.values()] == [[1, 1], [2, 2]]
    collector.update_policy_weights_(weights_dict={"policy": made, "policy.critic": critic})
    assert [served(scheme) for scheme in schemes.values()] == [[2, 2], [3, 3]]
    collector.update_policy_weights_(critic, model_id="policy.critic")

    assert [served(scheme) for scheme in schemes.values()] == [[2, 2], [4, 4]]
    with pytest.raises(KeyError):
        collector.update_policy_weights_(critic, model_id="nobody")


@pytest.mark.parametrize("path", ["critic", "policy[3]", "policy.critic[7]"])
def test_a_model_path_that_the_collector_lacks_is_refused_at_construction(
    path: str, scheme: Any, multi: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(type(scheme), "connect", lambda *_, **__: started.append("a wait for the handshake"))
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", started.append)
    said = rf"a MultiSyncCollector has no model {path!r} \(.*'policy.critic'".replace("[", r"\[")
    with pytest.raises(ModelPathError, match=said):
        multi({path: scheme}, policy=WithCritic())
    assert started == []


def lacks(path: str) -> Any:
    raise AttributeError(f"no {path}")


def test_init_on_sender_refuses_a_model_path_that_the_collector_lacks(scheme: Any) -> None:
    """Otherwise the workers would wait for the handshake until the collector terminates them."""
    collector = SimpleNamespace(_weight_sync_schemes={}, num_workers=2, get_model=lacks)

    with pytest.raises(ModelPathError, match=r"set scheme\.model = "):
        scheme.init_on_sender("env.transform[0]", collector)
    assert not scheme.initialized_on_sender


@pytest.mark.parametrize("how", ["by init_on_sender", "before"])
def test_a_model_missing_from_the_trainers_collector_can_be_given_to_the_scheme(how: str) -> None:
    """For example a transform of the environment, which the trainer's collector does not have."""
    collector = Collector(cartpole, policy(0), frames_per_batch=8, total_frames=8)
    collector._weight_sync_schemes = {}
    ours, theirs = Pipe()
    made = nn.Linear(1, 1)
    with theirs, SharedMemWeightSyncScheme() as scheme:
        if how == "before":
            scheme.model = made
        scheme.init_on_sender("env.nowhere", collector, model=None if how == "before" else made, pipes=[ours])

        assert scheme.model is made
        assert scheme.get_sender().send_async().version == 1


def test_a_model_given_to_init_on_sender_replaces_one_set_before(scheme: Any) -> None:
    earlier, later = nn.Linear(1, 1), nn.Linear(1, 1)
    ours, theirs = Pipe()
    with theirs, scheme:
        scheme.model = earlier
        assert scheme.model is earlier
        scheme.init_on_sender("policy", model=later, pipes=[ours])

        assert scheme.model is later


# ------------------------------------------------------------------------------------------------- collectors' options

OPTIONS: dict[str, dict[str, Any]] = {
    "devices": {"policy_device": "cpu", "env_device": "cpu", "storing_device": "cpu"},
    "update at each batch": {"update_at_each_batch": True},
    "versions": {"track_policy_version": True},
    "a trusted policy": {"trust_policy": True},
    "buffers": {"use_buffers": True},
    "no buffers": {"use_buffers": False},
    "reset": {"reset_at_each_iter": True, "max_frames_per_traj": 5},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_an_update_arrives_under_each_collector_option(options: dict[str, Any], scheme: Any, multi: Making) -> None:
    made = policy(0)
    collector = multi(scheme, policy=made, **options)
    collector.set_seed(3)
    batches = iter(collector)
    assert chosen(next(batches)) == {0}

    choose(made, 1)
    collector.update_policy_weights_()

    assert chosen(next(batches)) == {1}
    collector.reset()
    assert chosen(next(batches)) == {1}


def test_an_update_during_the_random_frames_is_served_after_them(scheme: Any, multi: Making) -> None:
    collector = multi(scheme, policy=policy(0), init_random_frames=2 * FRAMES)
    batches = iter(collector)
    next(batches)
    collector.update_policy_weights_(policy(1))
    next(batches)

    assert chosen(next(batches)) == {1}


def test_a_collectors_state_dict_contains_the_sent_weights(scheme: Any, multi: Making) -> None:
    collector = multi(scheme, policy=policy(0))
    next(iter(collector))
    collector.update_policy_weights_(policy(1))

    state = collector.state_dict()

    held = state["worker0"]["policy_state_dict"]["module.0.bias"]
    assert torch.equal(held, policy(1).module[0].bias)
    collector.load_state_dict(state)
    multiprocessing.resource_sharer.stop(timeout=10)  # this process has sent tensors to the workers


@pytest.mark.parametrize("kind", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
def test_workers_of_an_async_collector_act_with_an_update_after_at_most_one_batch_each(
    kind: Any, multi: Making
) -> None:
    made, scheme = policy(0), kind()
    collector = multi(scheme, MultiAsyncCollector, policy=made)
    batches = iter(collector)
    assert chosen(next(batches)) == {0}
    choose(made, 1)
    collector.update_policy_weights_()

    # Each worker may have begun a batch before the update.
    assert sum(chosen(next(batches)) != {1} for _ in range(4)) <= WORKERS


def test_scheme_send_returns_a_report_for_a_collectors_workers(scheme: Any, multi: Making) -> None:
    collector = multi(scheme, policy=policy(0))

    report = scheme.send(policy(1))

    assert isinstance(report, SyncReport)
    assert report.ok
    assert chosen(next(iter(collector))) == {1}


# --------------------------------------------------------------------------------------------------------- evaluators


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_an_evaluator_receives_weights_through_a_weightsync_scheme(backend: str, scheme: Any, multi: Making) -> None:
    evaluator = Evaluator(
        env=cartpole,
        policy_factory=lambda _env=None: policy(0),
        num_trajectories=1,
        max_steps=FRAMES,
        backend=backend,
        weight_sync_schemes={"policy": scheme},
    )
    try:
        evaluator.evaluate()
        assert served(scheme) == [0]
        evaluator.evaluate(weights=policy(1))
        assert served(scheme) == [1]
    finally:
        evaluator.shutdown()
        gc.collect()


# ------------------------------------------------------------------------------------- refusals, and updaters


def test_noweightsyncscheme_is_refused_for_a_policy_that_workers_get_without_weights(multi: Making) -> None:
    """A collector passes its policy to the workers without its weights, so they would act with NaN."""
    with pytest.raises(ConfigurationError, match=r"NoWeightSyncScheme sends none.*policy_factory="):
        multi(NoWeightSyncScheme(), policy=policy(0))


@pytest.mark.parametrize("kind", [RayWeightSyncScheme, RPCWeightSyncScheme, DistributedWeightSyncScheme])
def test_a_scheme_that_cannot_reach_a_collectors_workers_names_schemes_that_can(kind: Any, multi: Making) -> None:
    with pytest.raises(ConfigurationError, match=r"a MultiSyncCollector, which are processes .*SharedMemWeightSync"):
        multi(kind(), policy=policy(0))


@pytest.mark.parametrize(
    ("has", "fitting"),
    [
        ({"remote_collectors": [], "num_workers": 2}, "RayWeightSyncScheme"),
        ({"collector_infos": [], "tcp_port": "1", "num_workers": 2}, "RPCWeightSyncScheme"),
        ({"tcp_port": "1", "num_workers": 2}, "DistributedWeightSyncScheme"),
    ],
)
def test_a_collector_whose_workers_have_no_pipes_is_refused_naming_the_fitting_scheme(
    has: Any, fitting: str, scheme: Any
) -> None:
    collector = SimpleNamespace(_weight_sync_schemes={}, **has)

    with pytest.raises(ConfigurationError, match=fitting):
        scheme.init_on_sender("policy", collector, model=nn.Linear(1, 1))


def test_a_scheme_for_a_collector_without_workers_is_refused(scheme: Any) -> None:
    with pytest.raises(ConfigurationError, match="a Collector has no workers"):
        Collector(cartpole, policy(0), frames_per_batch=8, total_frames=8, weight_sync_schemes={"policy": scheme})


def test_noweightsyncscheme_accepts_policies_that_each_worker_makes(multi: Making) -> None:
    collector = multi(NoWeightSyncScheme(), policy_factory=functools.partial(policy, 1))
    collector.update_policy_weights_(policy(0))

    assert chosen(next(iter(collector))) == {1}


def test_a_factory_that_makes_a_policy_on_the_meta_device_is_refused(scheme: Any, multi: Making) -> None:
    """The collector raises the worker's own error, or the scheme does, if not all workers have reported yet."""
    with pytest.raises((ConfigurationError, WorkerLostError), match="came without its weights"):
        multi(scheme, policy_factory=lambda: policy(0).to("meta"))


def fails() -> Any:
    raise ValueError("no policy today")


def ends() -> Any:
    os._exit(3)


@pytest.mark.parametrize(
    ("given", "raised"),
    [
        ({"policy_factory": [fails, fails]}, "ValueError: no policy today"),
        ({"policy_factory": [functools.partial(policy, 0), fails]}, "ValueError: no policy today"),
        ({}, "ConfigurationError: init_on_worker() and init_on_receiver() need model="),
        ({"policy_factory": [ends, ends]}, None),
    ],
    ids=["each factory raises", "one raises", "no policy", "no last words"],
)
def test_workers_that_end_before_connecting_are_lost_at_once_and_their_errors_are_noted(
    given: Any, raised: str | None, scheme: Any, multi: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTSYNC_TIMEOUT", "6")  # a collector waits five times as long for its workers

    with pytest.raises(WorkerLostError) as lost:
        multi(scheme, **given)

    last = WORKERS - 1
    assert last in lost.value.lost
    notes = "".join(getattr(lost.value, "__notes__", ()))
    assert f"worker {last} raised {raised}" in notes if raised else not notes


@pytest.mark.parametrize("how", ["an updater", "a function that makes one"])
def test_a_single_process_collector_accepts_a_weightsync_updater(how: str) -> None:
    made, trained = policy(0), tensordict(policy(1))
    updater = VanillaWeightUpdater.from_policy(made)
    updater.weight_getter = lambda: trained
    given = updater if how == "an updater" else (lambda: updater)
    collector = Collector(cartpole, made, frames_per_batch=FRAMES, total_frames=-1, weight_updater=given)
    batches = iter(collector)
    assert updater.collector is collector
    assert chosen(next(batches)) == {0}  # creating the collector did not call the updater

    collector.update_policy_weights_()

    assert chosen(next(batches)) == {1}
    collector.shutdown()


def test_a_multi_process_collector_accepts_a_weightsync_updater(multi: Making) -> None:
    made = policy(0)
    held = tensordict(made).share_memory_()
    updater = MultiProcessedWeightUpdater(get_server_weights=lambda: tensordict(policy(1)), policy_weights={0: held})
    collector = MultiSyncCollector(
        [cartpole] * WORKERS, made, frames_per_batch=FRAMES, total_frames=-1, weight_updater=updater
    )
    batches = iter(collector)
    assert chosen(next(batches)) == {0}

    collector.update_policy_weights_()

    assert chosen(next(batches)) == {1}
    with pytest.raises(ConfigurationError, match="make another updater"):
        Collector(cartpole, policy(0), frames_per_batch=FRAMES, total_frames=-1, weight_updater=updater)
    collector.shutdown()
    gc.collect()
