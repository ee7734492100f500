"""`RayWeightUpdater` on a real Ray cluster: it checks its calls, and reports the collectors that failed."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ray_collectors import RemoteCollector
from torch import nn
from updaters_support import Collector, constant, weights

import weightsync
from weightsync import (
    AckTimeoutError,
    ConfigurationError,
    Evidence,
    MissingExtraError,
    OutcomeKind,
    RayWeightUpdater,
    RefusedError,
    StateError,
    WorkerLostError,
)
from weightsync.transports.ray import session

#: Seconds after which a test gives up. Only a failing test waits so long.
PATIENCE = 60.0
APPLIED, SKIPPED = OutcomeKind.APPLIED, OutcomeKind.SKIPPED
REFUSED, LOST = OutcomeKind.REFUSED, OutcomeKind.LOST
pytestmark = [
    pytest.mark.ray,
    # The first test starts the cluster and the collectors.
    pytest.mark.timeout(600),
    # Ray's C++ code and background threads leave some resources to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def get(reference: Any) -> Any:
    import ray  # noqa: PLC0415

    return ray.get(reference, timeout=PATIENCE)


def start(**options: Any) -> Any:
    """Start an actor, by default on the head node, since tests kill other nodes."""
    import ray  # noqa: PLC0415

    options.setdefault("resources", {"node:__internal_head__": 0.001})
    return ray.remote(num_cpus=0, max_concurrency=2)(RemoteCollector).options(**options).remote()


def kinds(report: Any) -> list[OutcomeKind]:
    return [outcome.kind for outcome in report.outcomes.values()]


def behave(collector: Any, how: str) -> None:
    get(collector.behave.remote(how))


@pytest.fixture(scope="module")
def all_collectors(cluster: Any) -> list[Any]:
    """Three collectors, started together since each takes seconds. A test may kill the last one.

    They have started and imported tensordict, which on a busy machine takes longer than the timeout of a push.
    """
    import ray  # noqa: PLC0415

    made = [start(), start(), start()]
    ray.get([collector.update_policy_weights_.remote(weights()) for collector in made], timeout=5 * PATIENCE)
    ray.get([collector.last.remote() for collector in made], timeout=PATIENCE)
    return made


@pytest.fixture
def pool(all_collectors: list[Any]) -> Iterator[list[Any]]:
    """Two collectors that no test kills, reset to normal behaviour after each test."""
    yield all_collectors[:2]
    for collector in all_collectors[:2]:
        behave(collector, "take")


def seen(collectors: list[Any]) -> list[float]:
    """The first value of the last weights that each collector got."""
    return [get(collector.seen.remote())[-1] for collector in collectors]


def until(met: Callable[[], bool]) -> None:
    """Wait until an actor or a thread of Ray has made the condition true."""
    patience = time.monotonic() + PATIENCE
    while not met():
        assert time.monotonic() < patience
        time.sleep(0.01)


def test_all_collectors_get_the_weights_through_one_ray_put(pool: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import ray  # noqa: PLC0415

    puts: list[Any] = []
    honest = ray.put
    monkeypatch.setattr(ray, "put", lambda value: (puts.append(value), honest(value))[1])
    updater = RayWeightUpdater(weights(3.0), pool)

    report = updater.push_weights()

    assert updater.all_worker_ids() == [0, 1]
    assert seen(pool) == [3.0, 3.0]
    assert len(puts) == 1
    assert kinds(report) == [APPLIED, APPLIED]
    assert [outcome.evidence for outcome in report.outcomes.values()] == [Evidence.CALL] * 2
    assert report.nbytes == 12


def test_each_push_sends_the_current_values_of_the_registered_weights(pool: list[Any]) -> None:
    registered = weights(1.0)
    updater = RayWeightUpdater(registered, pool)
    updater.push_weights()
    registered["layer", "weight"].fill_(2.0)
    registered["layer", "bias"].fill_(2.0)

    updater.push_weights()

    assert [get(collector.seen.remote())[-2:] for collector in pool] == [[1.0, 2.0]] * 2


def test_modules_dicts_and_tensordicts_can_be_pushed(pool: list[Any]) -> None:
    updater = RayWeightUpdater(weights(), pool)
    module = nn.Linear(2, 1)

    updater.push_weights(module, worker_ids=0)
    given = get(pool[0].last.remote())
    assert torch.equal(given["weight"], module.weight)
    assert not given["weight"].requires_grad

    updater.push_weights({"a": {"b": module.bias}}, worker_ids=[0])
    given = get(pool[0].last.remote())
    assert list(given) == ["a"]
    assert torch.equal(given["a"]["b"], module.bias)

    updater(weights(7.0), worker_ids=0)
    assert constant(get(pool[0].last.remote())) == {7.0}


def test_a_copy_on_another_node_calls_the_actors_from_there(pool: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import ray  # noqa: PLC0415

    copied = get(ray.put(RayWeightUpdater(weights(9.0), pool)))
    job, _ = session._session_key(ray)
    monkeypatch.setattr(session, "_session_key", lambda _: (job, "another node"))

    assert copied.push_weights(timeout=PATIENCE).ok
    assert seen(pool) == [9.0, 9.0]


# ------------------------------------------------------------------------------------------------------ intervals


def test_max_interval_pushes_are_skipped_between_two_calls_and_never_the_first(pool: list[Any]) -> None:
    updater = RayWeightUpdater(weights(), pool, max_interval=2)

    outcomes = [kinds(updater.push_weights())[0] for _ in range(7)]

    assert outcomes == [APPLIED, SKIPPED, SKIPPED, APPLIED, SKIPPED, SKIPPED, APPLIED]


def test_each_worker_has_its_own_interval_even_if_named_in_the_push(pool: list[Any]) -> None:
    updater = RayWeightUpdater(weights(), pool, max_interval=1)

    assert kinds(updater.push_weights(worker_ids=[0])) == [APPLIED]
    assert kinds(updater.push_weights()) == [SKIPPED, APPLIED]
    report = updater.push_weights(worker_ids=1)
    assert kinds(report) == [SKIPPED]
    assert report.version is None
    assert report.failed == ()
    assert kinds(updater.push_weights()) == [APPLIED, APPLIED]


def test_an_actor_that_replaces_another_is_not_skipped(pool: list[Any]) -> None:
    updater = RayWeightUpdater(weights(), pool[:1], max_interval=5)
    updater.push_weights()

    updater.remote_collectors[0] = pool[1]

    assert [kinds(updater.push_weights()) for _ in range(2)] == [[APPLIED], [SKIPPED]]


def test_another_handle_of_the_same_actor_is_skipped_like_the_first(pool: list[Any]) -> None:
    import ray  # noqa: PLC0415

    updater = RayWeightUpdater(weights(), pool[:1], max_interval=1)
    updater.push_weights()

    updater.remote_collectors = get(ray.put(pool[:1]))

    assert updater.remote_collectors[0] is not pool[0]
    assert [kinds(updater.push_weights()) for _ in range(2)] == [[SKIPPED], [APPLIED]]


def test_a_copy_counts_its_own_pushes(pool: list[Any]) -> None:
    updater = RayWeightUpdater(weights(), pool[:1], max_interval=2)
    updater.push_weights()

    copied = copy.copy(updater)

    assert [kinds(copied.push_weights()) for _ in range(2)] == [[APPLIED], [SKIPPED]]
    assert [kinds(updater.push_weights()) for _ in range(3)] == [[SKIPPED], [SKIPPED], [APPLIED]]


@pytest.mark.parametrize("given", [None, "2", 1.5, float("nan")])
def test_an_interval_that_is_no_whole_number_is_refused(given: Any, pool: list[Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"max_interval=.*whole number"):
        RayWeightUpdater(weights(), pool, max_interval=given)


def test_a_negative_interval_counts_as_zero(pool: list[Any]) -> None:
    updater = RayWeightUpdater(weights(), pool, max_interval=-3)

    assert updater.max_interval == 0
    assert [kinds(updater.push_weights())[0] for _ in range(2)] == [APPLIED, APPLIED]


def test_a_worker_that_failed_is_not_skipped_next_time(pool: list[Any]) -> None:
    behave(pool[1], "raise")
    updater = RayWeightUpdater(weights(), pool, max_interval=5)

    outcomes = [kinds(updater.push_weights(on_failure="report", timeout=PATIENCE)) for _ in range(2)]

    assert outcomes == [[APPLIED, REFUSED], [SKIPPED, REFUSED]]


# ------------------------------------------------------------------------------------------------------- failures


def test_a_collector_that_raises_is_reported_with_its_own_traceback_after_the_others(pool: list[Any]) -> None:
    behave(pool[0], "raise")
    updater = RayWeightUpdater(weights(11.0), pool)

    with pytest.raises(RefusedError) as failure:
        updater.push_weights(timeout=PATIENCE)

    assert failure.value.refused.keys() == {0}
    assert "ConnectionResetError: not for me" in failure.value.report[0].reason
    assert "ray_collectors.py" in failure.value.report[0].remote_traceback
    assert seen(pool[1:]) == [11.0]


def test_a_collector_whose_exception_cannot_be_unpickled_is_refused_and_not_lost(pool: list[Any]) -> None:
    behave(pool[0], "raise with parts")

    report = RayWeightUpdater(weights(), pool).push_weights(on_failure="report", timeout=PATIENCE)

    assert kinds(report) == [REFUSED, APPLIED]
    assert report[0].reason.endswith("NotUnpickled: not for me")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "give a list"),
        ("eve", "give a list"),
        (["eve"], r"worker 0 is the str 'eve', .*ray\.get_actor"),
        ([object()], r"worker 0 \(object\) is not an actor .*update_policy_weights_"),
        ([RemoteCollector], r"worker 0 is the class RemoteCollector, .*remote\("),
    ],
)
def test_the_constructor_refuses_objects_that_are_not_collector_actors(given: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        RayWeightUpdater(weights(), given)


def test_an_updater_without_weights_names_the_missing_argument() -> None:
    with pytest.raises(ConfigurationError, match="RayWeightUpdater has none to send: it has no policy_weights="):
        RayWeightUpdater(None, [])._get_server_weights()  # type: ignore[arg-type]


def test_a_wrong_collector_set_later_is_reported_and_the_others_are_served(pool: list[Any]) -> None:
    updater = RayWeightUpdater(weights(12.0), [*pool[:1]])
    updater.remote_collectors = [object(), pool[0]]

    with pytest.raises(RefusedError, match=r"worker 0 \(object\) is not an actor .*update_policy_weights_") as refused:
        updater.push_weights(timeout=PATIENCE)

    assert refused.value.report[0].evidence is Evidence.NONE

    assert seen(pool[:1]) == [12.0]


def test_a_collector_that_hangs_ends_in_a_timeout_and_the_others_are_served(pool: list[Any]) -> None:
    behave(pool[0], "hang")
    updater = RayWeightUpdater(weights(13.0), pool)

    with pytest.raises(AckTimeoutError) as failure:
        updater.push_weights(timeout=1.0)

    assert 0 in failure.value.pending
    assert failure.value.report[0].kind is OutcomeKind.TIMED_OUT
    until(lambda: seen(pool[1:]) == [13.0])  # its call may have begun only just before the deadline
    behave(pool[0], "take")
    assert kinds(updater.push_weights(weights(14.0), timeout=PATIENCE)) == [APPLIED, APPLIED]
    assert seen(pool) == [14.0, 14.0]


def test_an_actor_that_replaces_a_hung_one_is_pushed_to_without_waiting_for_it(pool: list[Any]) -> None:
    behave(pool[0], "hang")
    updater = RayWeightUpdater(weights(20.0), pool[:1])
    with pytest.raises(AckTimeoutError):
        updater.push_weights(timeout=1.0)

    updater.remote_collectors = pool[1:]

    assert updater.push_weights(weights(21.0), timeout=PATIENCE / 2).ok
    assert seen(pool[1:]) == [21.0]


def test_a_collector_that_was_removed_is_not_kept_alive(pool: list[Any]) -> None:
    import ray  # noqa: PLC0415

    handle = get(ray.put(pool[1]))
    held = weakref.ref(handle)
    updater = RayWeightUpdater(weights(), [pool[0], handle])
    updater.push_weights(timeout=PATIENCE)

    updater.remote_collectors = pool[:1]
    updater.push_weights(timeout=PATIENCE)

    def forgotten() -> bool:
        gc.collect()
        return held() is None

    del handle
    until(forgotten)  # a thread of Ray may still be dropping its reference


def test_weights_that_the_object_store_rejects_reach_no_worker(
    pool: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray  # noqa: PLC0415

    updater = RayWeightUpdater(weights(22.0), pool)

    def full(_: Any) -> Any:
        raise ray.exceptions.ObjectStoreFullError("no room for this object")

    with monkeypatch.context() as patched:
        patched.setattr(ray, "put", full)
        with pytest.raises(RefusedError, match=r"worker 1 was not called, .*: no room") as refused:
            updater.push_weights(timeout=PATIENCE)

    assert [outcome.evidence for outcome in refused.value.report.outcomes.values()] == [Evidence.NONE] * 2
    assert updater.push_weights(timeout=PATIENCE).ok
    assert seen(pool) == [22.0, 22.0]


def test_a_collector_whose_queue_is_full_is_not_called(pool: list[Any]) -> None:
    import ray  # noqa: PLC0415

    busy = start(max_pending_calls=1)
    behave(busy, "hang")
    waiting: list[Any] = []
    while not waiting:  # the call above still counts for a moment
        with contextlib.suppress(ray.exceptions.PendingCallsLimitExceeded):
            waiting.append(busy.update_policy_weights_.remote(weights()))
    updater = RayWeightUpdater(weights(23.0), [busy, pool[0]])

    report = updater.push_weights(timeout=PATIENCE, on_failure="report")

    assert kinds(report) == [REFUSED, APPLIED]
    assert report[0].evidence is Evidence.NONE
    assert "Ray accepted no call for worker 0" in report[0].reason
    ray.kill(busy)
    ray.wait(waiting)


def test_a_method_without_a_parameter_is_not_called(cluster: Any) -> None:
    import ray  # noqa: PLC0415

    @ray.remote(num_cpus=0)
    class Strange:
        def update_policy_weights_(self) -> None:
            raise AssertionError

    actor = Strange.remote()
    report = RayWeightUpdater(weights(), [actor]).push_weights(timeout=PATIENCE, on_failure="report")

    assert kinds(report) == [REFUSED]
    assert report[0].evidence is Evidence.NONE
    ray.kill(actor)


def test_the_default_timeout_comes_from_the_environment(pool: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    behave(pool[0], "hang")
    monkeypatch.setenv("WEIGHTSYNC_TIMEOUT", "0.2")

    with pytest.raises(AckTimeoutError):
        RayWeightUpdater(weights(), pool).push_weights()


def test_a_second_thread_may_not_push_while_the_first_waits(pool: list[Any]) -> None:
    behave(pool[0], "hang")
    updater = RayWeightUpdater(weights(), pool)
    thread = threading.Thread(target=updater.push_weights, kwargs={"timeout": PATIENCE})
    thread.start()
    while updater.state is not weightsync.State.AWAITING_ACK:
        threading.Event().wait(0.005)

    with pytest.raises(StateError):
        updater.push_weights()
    behave(pool[0], "take")
    thread.join()


def test_an_actor_killed_in_the_middle_of_a_push_is_lost_until_it_is_replaced(
    pool: list[Any], all_collectors: list[Any]
) -> None:
    victim = all_collectors[2]
    behave(victim, "hang")
    collectors = [victim, pool[0]]
    updater = RayWeightUpdater(weights(15.0), collectors)
    timer = threading.Timer(0.3, os.kill, (get(victim.pid.remote()), signal.SIGKILL))
    timer.start()

    with pytest.raises(WorkerLostError) as failure:
        updater.push_weights(timeout=PATIENCE)
    timer.join()
    assert failure.value.lost.keys() == {0}
    assert kinds(failure.value.report) == [LOST, APPLIED]
    assert failure.value.report.transfer_s < PATIENCE / 2
    assert seen(pool[:1]) == [15.0]

    with pytest.raises(WorkerLostError) as failure:
        updater.push_weights(weights(16.0), timeout=PATIENCE)
    assert failure.value.lost.keys() == {0}
    assert seen(pool[:1]) == [16.0]

    collectors[0] = pool[1]
    assert kinds(updater.push_weights(weights(17.0), timeout=PATIENCE)) == [APPLIED, APPLIED]
    assert seen(pool) == [17.0, 17.0]


def test_collectors_and_post_hooks_work_as_in_the_base_class(pool: list[Any]) -> None:
    updater, collector = RayWeightUpdater(weights(), pool), Collector()
    updater.register_collector(collector)
    updater.register_post_hook(updater.increment_version)

    updater.push_weights()

    assert collector.version == 1


def test_without_collectors_nothing_is_sent() -> None:
    report = RayWeightUpdater(weights(), [])()

    assert (dict(report.outcomes), report.version, report.ok) == ({}, None, True)


def test_without_ray_the_constructor_raises_missing_extra_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)

    with pytest.raises(ImportError, match="RayWeightUpdater") as failure:
        RayWeightUpdater(weights(), [])

    assert isinstance(failure.value, MissingExtraError)
    assert failure.value.extra == "ray"


def test_outside_a_ray_session_all_workers_are_lost(monkeypatch: pytest.MonkeyPatch, pool: list[Any]) -> None:
    updater = RayWeightUpdater(weights(), pool)
    monkeypatch.setattr(session, "_session_key", lambda ray: None)

    with pytest.raises(WorkerLostError, match=r"ray\.init"):
        updater.push_weights()
