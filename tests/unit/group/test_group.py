"""A worker group: results, back-pressure, failures, restarts, and that it ends whatever its workers do."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import re
import select
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from importlib.metadata import EntryPoint
from itertools import islice
from multiprocessing import connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NoReturn

import group_workers as workers
import pytest
import torch
import torch.distributed as dist
from fleet import descriptors, opened_since
from group_worlds import PIPES, RANKS, RAY, SHARED, WORLD, Make, World, await_results
from torch import nn

from weightsync import (
    AckTimeoutError,
    ConfigurationError,
    DistributedWeightSyncScheme,
    EventKind,
    LayoutError,
    NonFiniteError,
    OutcomeKind,
    ResultTimeoutError,
    SharedMemWeightSyncScheme,
    StateError,
    SyncEvent,
    TransportError,
    Worker,
    WorkerFailedError,
    WorkerGroup,
    WorkerResult,
    run_worker,
)
from weightsync.clock import Deadline
from weightsync.group import ranks, stack_dump
from weightsync.group.actors import ActorProcess
from weightsync.group.channel import TrainerEnd
from weightsync.protocol import sender as pure
from weightsync.protocol._tables import State
from weightsync.schemes.registry import ENTRY_POINTS
from weightsync.testing import FakeClock
from weightsync.transports.process import ProcessWatch, is_stopped


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def send_until_a_result(group: WorkerGroup) -> WorkerResult:
    while True:
        group.send()
        with contextlib.suppress(ResultTimeoutError):
            return next(group.results(timeout=0.0))


def await_death(pid: int) -> None:
    with contextlib.closing(ProcessWatch(pid, 0)) as watch:
        if not watch.dead:
            poller = select.poll()
            poller.register(watch, select.POLLIN)
            assert poller.poll(60_000)


def is_dead(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def dies_soon(pid: int) -> bool:
    deadline = time.monotonic() + 30.0
    while not is_dead(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_dead(pid)


@pytest.mark.parametrize("make_over", [SHARED, PIPES, RANKS], indirect=True)
def test_every_worker_acts_with_each_version_sent_and_its_results_name_it(make_over: Make, model: nn.Module) -> None:
    seen = defaultdict(set)
    with make_over(workers.act, 2) as group:
        for version in range(1, 4):
            if version > 1:
                fill(model, version)
                assert group.send().ok
            assert group.version == version
            for result in group.results():
                assert result.value in result.versions
                seen[result.worker].add(result.value)
                if all(version in values for values in seen.values()) and len(seen) == 2:
                    break
    assert all({1.0, 2.0, 3.0} <= values for values in seen.values())


@pytest.mark.parametrize("make_over", [SHARED, RANKS, RAY], indirect=True)
def test_updates_pass_a_full_result_channel_and_close_kills_a_hanging_worker(make_over: Make) -> None:
    with make_over(workers.fill_and_hang, capacity=1) as group:
        pid, value = next(group.results()).value
        for _ in range(3):
            group.send_async()
        report = group.wait_async()

        assert (report.ok, report.version, value) == (True, 4, 1.0)
        assert len(list(islice(group.results(), 3))) == 3
        handles = group.processes
        group.close(timeout=0.1)
    if handles != {0: 1}:  # the process of a rank belongs to its launcher
        await_death(pid)


def test_results_end_when_all_workers_have_returned(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "weightsync")
    with make(workers.act_twice, 2) as group:
        results = list(group.results())
        assert sorted((result.worker, result.value) for result in results) == [(0, 1.0), (0, 1.0), (1, 1.0), (1, 1.0)]
        assert len(group.send()) == 0  # no worker is left, which is no failure
    goodbyes = [record for record in caplog.records if "said goodbye" in record.getMessage()]
    assert {record.levelno for record in goodbyes} <= {logging.INFO}  # the end of `results` already tells it


def test_stop_lets_workers_return_without_failures_and_yields_their_last_results(make: Make) -> None:
    with make(workers.put_before_and_after_the_stop, 2) as group:
        first = sorted(result.value for result in islice(group.results(), 2))
        group.stop()
        last = sorted(result.value for result in group.results())

        assert (first, last) == (["0: begun", "1: begun"], ["0: stopped", "1: stopped"])
        assert group.failures == ()


def test_a_result_names_both_versions_if_a_swap_came_in_between(make: Make, model: nn.Module) -> None:
    with make(workers.step_over_swaps, capacity=1) as group:
        for _ in range(2):
            made, again = send_until_a_result(group), next(group.results())
            assert len(made.versions) == 2
            assert made.versions[0] < made.versions[1]
            assert again.versions == made.versions  # put without another step


@pytest.mark.parametrize("model", [workers.biased()])
@pytest.mark.parametrize("make_over", [SHARED, RANKS, RAY], indirect=True)
def test_only_the_named_weights_are_sent_and_the_others_stay_as_they_are(
    make_over: Make, model: nn.Module, request: pytest.FixtureRequest
) -> None:
    """A worker's output is the sum of its weight, which stays 1, and its bias, which is sent."""
    model.load_state_dict(workers.biased().state_dict())
    options = {} if request.node.stash.get(WORLD, None) is None else {"rank_model": workers.biased}
    with make_over(workers.act, names="b*", **options) as group:
        fill(model, 5.0)
        group.send()
        assert next(result for result in group.results() if result.versions == (2,)).value == 6.0


def test_check_finite_refuses_weights_that_are_not_finite(make: Make, model: nn.Module) -> None:
    with make(workers.act, check_finite=True) as group:
        fill(model, float("nan"))
        for send in (group.send, group.send_async):
            with pytest.raises(NonFiniteError):
                send()
        assert (group.version, next(group.results()).value) == (1, 1.0)

    with pytest.raises(NonFiniteError):
        make(workers.act, check_finite=True).start()


def test_worker_and_trainer_each_observe_events_of_their_own_scheme(make: Make) -> None:
    group, events = make(workers.report_replies), queue.SimpleQueue[SyncEvent]()
    group.scheme.on_event(events.put)
    with group:
        results = group.results()
        assert next(results).value == "listening"
        group.send()
        assert next(results).value == (0, 2)
    assert events.get(timeout=60).kind is EventKind.DISPATCH


def test_a_failed_send_announces_no_version_to_workers(make: Make) -> None:
    with make(workers.act, max_staleness=0) as group:
        with pytest.raises(LayoutError):
            group.send({"another": torch.ones(1)})
        assert group.version == 1
        assert next(group.results()).versions == (1,)


# ------------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize("make_over", [SHARED, RANKS], indirect=True)
def test_an_exception_in_a_worker_is_raised_in_the_trainer_with_its_traceback(make_over: Make) -> None:
    with make_over(workers.fail_in_first_life) as group:
        results = group.results()
        assert next(results).value == (0, 1.0)
        with pytest.raises(WorkerFailedError, match=r"while it served version 1.*a pole fell") as caught:
            next(results)
        assert "in fail_in_first_life" in caught.value.remote_traceback
        assert (caught.value.worker, caught.value.version, caught.value.restarts) == (0, 1, 0)
        assert list(group.results()) == []  # the failure is reported once
        assert len(group.send(on_failure="report")) == len(group.send_async()) == 0
        for waits in (group.wait_async, group.send):  # no worker is left to get the version
            with pytest.raises(WorkerFailedError, match="a pole fell"):
                waits()


def test_results_of_other_workers_can_be_iterated_after_a_failure(make: Make) -> None:
    """The other worker's results also show that each process uses one torch thread."""
    with make(workers.fail_or_count_threads, 2) as group:
        results = group.results()
        with pytest.raises(WorkerFailedError, match="worker 0 failed"):
            list(results)
        assert [(each.worker, each.value) for each in islice(results, 4)] == [(1, 1)] * 4
        assert len(group.send()) == 1


def test_a_failure_whose_report_is_interrupted_is_raised_by_the_next_call(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(workers.fail_or_count_threads, 2) as group:
        remove = group.sender.remove_worker

        def interrupted(worker_id: int) -> NoReturn:
            remove(worker_id)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(group.sender, "remove_worker", interrupted)
            with pytest.raises(KeyboardInterrupt):
                list(group.results())
        with pytest.raises(WorkerFailedError, match="worker 0 failed"):
            list(group.results())


def test_a_dead_worker_is_restarted_with_the_newest_weights_before_its_first_step(make: Make, model: nn.Module) -> None:
    with make(workers.fail_when_released, 2, capacity=1, max_restarts=1, restart_delay=0.0) as group:
        await_results(group, 2)
        fill(model, 2.0)
        group.send()
        values = [result.value for result in group.results() if result.value != "released"]

        assert values == [(0, 1.0), (0, 1.0), (1, 2.0), (1, 2.0)]
        reasons = {failure.worker: failure.reason for failure in group.failures}
        assert reasons == {0: "ValueError: a pole fell", 1: "its process was ended by SIGKILL"}


@pytest.mark.parametrize("make_over", [RAY], indirect=True)
def test_a_killed_actor_is_lost_in_the_report_and_restarted_with_fresh_weights(
    make_over: Make, model: nn.Module
) -> None:
    with make_over(
        workers.act_once_and_wait, max_restarts=1, restart_delay=0.0, actor_options={"num_cpus": 0.5}
    ) as group:
        results = group.results()
        pid, *first = next(results).value
        fill(model, 2.0)
        os.kill(pid, signal.SIGKILL)
        assert group.send()[0].kind is OutcomeKind.LOST
        assert (first, [result.value[2:] for result in results]) == ([{"CPU": 0.5}, 0, 1.0], [(1, 2.0)])
        assert "actor died" in group.failures[0].reason


def test_a_worker_killed_during_a_send_is_lost_in_the_report_but_not_raised_if_restarted(
    make: Make, model: nn.Module
) -> None:
    with make(workers.act, 2, max_restarts=1, restart_delay=3600.0) as group:
        assert {result.worker for result in islice(group.results(), 20)} <= {0, 1}
        group.send()
        os.kill(group.processes[1].pid, signal.SIGKILL)
        report = group.send()
        assert report[0].kind is OutcomeKind.APPLIED
        assert report[1].kind is OutcomeKind.LOST


@pytest.mark.parametrize("make_over", [SHARED, RANKS], indirect=True)
def test_a_worker_killed_during_a_send_without_restarts_raises_and_leaves_the_group(
    make_over: Make, request: pytest.FixtureRequest
) -> None:
    with make_over(workers.act, 2) as group:
        group.send()
        world = request.node.stash.get(WORLD, None)
        process = group.processes[1] if world is None else world.processes[1]
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(WorkerFailedError, match=r"SIGKILL|the process of rank 2 is dead"):
            group.send()
        assert list(group.send().outcomes) == [0]
        assert group.processes.keys() == {0}
        if world is not None:
            process.join(60)  # the fork server reports the exit code later than the pidfd reports the death
            assert process.exitcode == -signal.SIGKILL


@pytest.mark.gloo
@pytest.mark.parametrize("make_over", ["ranks"], indirect=True)
def test_a_rank_that_waits_with_a_full_channel_returns_when_the_group_ends(
    make_over: Make, request: pytest.FixtureRequest
) -> None:
    with make_over(workers.put_forever, 2, capacity=1) as group:
        next(group.results())
    assert request.node.stash[WORLD].codes() == [0, 0]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the trainer wait for a worker's stack dump for longer, since the machine may be busy."""
    monkeypatch.setattr(stack_dump, "_PATIENCE", 60.0)


@pytest.mark.usefixtures("patient")
def test_a_worker_that_gives_no_result_within_its_deadline_is_killed_and_restarted(make: Make) -> None:
    rules = {"max_restarts": 1, "restart_delay": 0.0, "deadline": 60.0}
    with FakeClock() as clock, make(workers.hang_in_first_life, **rules) as group:
        results = group.results()
        assert next(results).value == 0
        clock.advance(61)
        assert [result.value for result in results] == [1]
        failure = group.failures[0]
        assert re.search(
            r"gave no result for 60.0 s, and was killed; it was at line \d+ of .*workers.py", failure.reason
        )
        assert "in hang_in_first_life" in failure.remote_traceback


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("run", "where"),
    [
        (workers.put_pids_and_hang, "; it was at line .*, in put_pids_and_hang\n"),
        (workers.stop_itself, "; its process is stopped, by SIGSTOP or a debugger"),
    ],
)
def test_close_names_the_workers_that_hang_and_where_they_are(
    make: Make, run: Callable[[Worker], None], where: str, caplog: pytest.LogCaptureFixture
) -> None:
    with make(run) as group:
        pid = next(group.results()).value[0]
        while run is workers.stop_itself and not is_stopped(pid):
            time.sleep(0.01)
        group.close(timeout=0.1)
    (said,) = [record.getMessage() for record in caplog.records if "close()" in record.getMessage()]
    assert said.startswith("worker 0 had not returned 0.1 s after close(), and was killed")
    assert re.search(where, said)


def test_results_raises_result_timeout_error_at_its_deadline(make: Make) -> None:
    with make(workers.put_pids_and_hang) as group:
        next(group.results())
        with pytest.raises(ResultTimeoutError, match="worker 0 is running"):
            next(group.results(timeout=0.0))
        group.close(timeout=0.0)


def test_a_timeout_says_which_workers_are_still_starting_and_since_when(make: Make) -> None:
    with make(workers.act, make_model=workers.slow_model) as group:
        with pytest.raises(ResultTimeoutError, match=r"0 has been starting for \d+\.\d s\).*longer timeout="):
            next(group.results(timeout=0.0))
        group.close(timeout=0.0)


def test_the_error_of_a_worker_that_dies_before_it_starts_hints_at_the_main_guard(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)  # an xdist worker has none
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # `python -m pytest` has one
    with (
        make(workers.act, make_model=workers.exit_at_once) as group,
        pytest.raises(WorkerFailedError, match=r'exit code 1 before it had started.*no `if __name__ == "__main__"'),
    ):
        list(group.results())


def test_an_exception_in_make_model_is_raised_in_the_trainer(make: Make) -> None:
    with make(workers.act, make_model=workers.broken_model) as group, pytest.raises(WorkerFailedError, match="no such"):
        list(group.results())


# --------------------------------------------------------------------------------------------------- the end


def test_workers_end_when_their_trainer_is_killed(forkserver: ForkServerContext) -> None:
    pids, far = forkserver.Pipe()
    trainer = forkserver.Process(target=workers.train_until_killed, args=(far,))
    trainer.start()
    watches = [ProcessWatch(pid, 0) for pid in pids.recv()]
    trainer.kill()
    trainer.join()
    for watch in watches:
        poller = select.poll()
        poller.register(watch, select.POLLIN)
        assert poller.poll(60_000)
        watch.close()
    for end in (pids, far):
        end.close()
    trainer.close()


def test_a_trainer_process_that_does_not_close_its_group_still_ends(
    forkserver: ForkServerContext,
) -> None:
    pids, far = forkserver.Pipe()
    trainer = forkserver.Process(target=workers.train_and_return, args=(far,))
    trainer.start()
    (worker,) = pids.recv()
    trainer.join(60)
    code = trainer.exitcode
    trainer.kill()
    trainer.join()
    assert code == 0
    await_death(worker)
    for end in (pids, far):
        end.close()
    trainer.close()


def test_a_forked_child_of_the_trainer_does_not_end_the_workers(make: Make) -> None:
    with make(workers.act) as group:
        child = os.fork()
        if child == 0:
            group.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert group.send().ok
        assert group.failures == ()


def test_close_kills_hanging_workers_and_their_child_processes(make: Make) -> None:
    with make(workers.put_pids_and_hang, 2) as group:
        pids = [pid for result in islice(group.results(), 2) for pid in result.value]
        group.close(timeout=0.1)
        # `close` does not wait for processes that a worker has started: they are killed, and end a little later.
        assert all(dies_soon(pid) for pid in pids)
        group.close()
        with pytest.raises(StateError, match="closed"):
            group.send()


def test_close_ends_workers_that_wait_for_room_in_an_unread_channel(make: Make) -> None:
    group = make(workers.put_forever, 2, capacity=1)
    group.start()
    for member in group._members.by_index.values():
        assert connection.wait([member.running.channel], 60.0)
    processes = dict(group.processes)
    codes = []
    for process in processes.values():
        # Read the exit codes before `close` releases the processes.
        process.close = lambda process=process: codes.append(process.exitcode)
    group.close(timeout=60.0)

    assert codes == [0, 0]  # the workers ended by themselves


def test_close_does_not_wait_for_workers_that_are_still_starting(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with make(workers.act, 2, make_model=workers.slow_model) as group:
        pids = [process.pid for process in group.processes.values()]
        group.close(timeout=None)
    assert all(map(is_dead, pids))
    assert [record for record in caplog.records if "close()" in record.getMessage()] == []


@pytest.mark.parametrize("when", ["starting", "release"])
def test_g10_an_interrupt_of_close_leaves_no_worker_and_a_closed_sender(
    make: Make, when: str, request: pytest.FixtureRequest
) -> None:
    """The interrupt comes just before the links are closed, or just before the first worker's process is ended."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with make(workers.act, 2) as group:
        members = list(group._members.by_index.values())
        owner: Any = group._members if when == "starting" else members[0]
        call = getattr(owner, when)

        def interrupted() -> Any:
            setattr(owner, when, call)
            signal.raise_signal(signal.SIGUSR1)
            return call()

        setattr(owner, when, interrupted)
        before = signal.signal(signal.SIGUSR1, interrupt)
        request.addfinalizer(lambda: signal.signal(signal.SIGUSR1, before))
        with pytest.raises(KeyboardInterrupt):
            group.close(timeout=0.1)
        assert [member.running for member in members] == [None, None]
        assert group.sender.state is State.CLOSED


def test_a_signal_handler_may_close_a_group_while_its_close_waits_for_workers(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the outer close raised ValueError for a closed process, and killed by ids that were free again."""
    with make(workers.act) as group:
        (process,) = (member.running.process for member in group._members.by_index.values() if member.running)
        pid, join = process.handle.pid, process.join

        def closed_by_a_handler(deadline: Deadline) -> None:
            process.join = join  # type: ignore[method-assign]
            group.close(timeout=0)
            for kills in ("kill", "killpg"):
                monkeypatch.setattr(os, kills, lambda *_: pytest.fail("its number may be another process's"))
            join(deadline)

        process.join = closed_by_a_handler  # type: ignore[method-assign]
        group.close()
        monkeypatch.undo()

    assert is_dead(pid)
    assert not group.processes


def test_g10_an_interrupt_before_the_cleanup_leaves_no_worker_after_the_with_block(make: Make) -> None:
    with pytest.raises(KeyboardInterrupt), make(workers.act) as group:  # noqa: PT012 - at its end
        (process,) = group.processes.values()
        pid, end_others = process.pid, group._calls.end_others

        def interrupted() -> None:
            group._calls.end_others = end_others  # type: ignore[method-assign]
            raise KeyboardInterrupt

        group._calls.end_others = interrupted  # type: ignore[method-assign]

    assert is_dead(pid)
    assert not group.processes


def test_a_stopped_worker_does_not_delay_close(make: Make) -> None:
    with make(workers.act) as group:
        next(group.results())
        pid = group.processes[0].pid
        os.kill(pid, signal.SIGSTOP)
        group.close(timeout=0.1)
        assert is_dead(pid)


def test_close_waits_for_workers_to_return_even_if_the_clock_stands_still(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeClock(), make(workers.end_slowly) as group:
        next(group.results())
        group.close(timeout=10.0)
    assert not [record for record in caplog.records if "had not returned" in record.getMessage()]


def test_join_of_an_actor_waits_for_its_end_even_if_the_clock_stands_still() -> None:
    actor = object.__new__(ActorProcess)
    actor._life, actor._channel, actor._ends = Future(), TrainerEnd(None), None
    ending = threading.Timer(0.1, actor._life.set_result, [None])
    with FakeClock():
        ending.start()
        actor.join(Deadline(10.0))
    assert actor.dead
    ending.join()


@pytest.mark.untraced("counts descriptors, and a recording has one")
def test_a_group_leaks_no_descriptors(make: Make) -> None:
    with make(workers.act_twice):  # open what is opened only once
        pass
    gc.collect()
    before = descriptors()
    with make(workers.fail_in_first_life, 2, max_restarts=1, restart_delay=0.0) as group:
        list(group.results())
    gc.collect()
    assert opened_since(before) == {}


def test_a_group_whose_start_fails_leaves_no_processes(make: Make) -> None:
    group = make(lambda worker: None)
    with pytest.raises(ConfigurationError, match=r"pickle.*top level of a module"):
        group.start()
    assert group.processes == {}


@pytest.mark.parametrize(
    ("count", "options", "named"),
    [
        (0, {}, "num_workers"),
        (1, {"capacity": 0}, "capacity"),
        (1, {"max_restarts": -1}, "max_restarts"),
        (
            1,
            {"max_restarts": 1.5},
            "max_restarts= is 1.5: give the number of restarts of each worker as an int, 0 or more",
        ),
        (1, {"restart_delay": -1.0}, "restart_delay"),
        (1, {"model_id": ""}, "model_id= is ''"),
        (1, {"restart_delay": None}, "restart_delay= is None: give seconds, 0 or more"),
        (1, {"deadline": 0}, "deadline= is 0: give seconds, more than 0, or None for no limit"),
        (1, {"deadline": "10"}, "deadline= is '10': give seconds"),
        (1, {"max_staleness": -1}, "max_staleness= is -1: give a number of versions as an int, 0 or more"),
        (1, {"on_stale": "panic"}, "on_stale"),
        (1, {"scheme": "rpc"}, "scheme"),
        (1, {"actor_options": {"num_cpus": 1}}, "actor_options"),
        (1, {"scheme": "ray"}, "ctx"),
        (1, {"scheme": "distributed"}, r"pass None here, and call run_worker\(run, model\)"),
        (None, {}, "num_workers= is None: give a whole number, 1 or more"),
        (10**9, {}, "num_workers= is 1000000000: there are at most"),
        (1, {"scheme": "shm"}, "scheme= is 'shm': .*RayWeightSyncScheme or DistributedWeightSyncScheme, which"),
        (1, {"names": []}, "names="),
        (1, {"names": 3}, "names= is 3"),
        (1, {"check_finite": "no"}, "check_finite"),
    ],
)
def test_invalid_group_arguments_are_refused(
    make: Make, count: int | None, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        make(workers.act, count, **options)


@pytest.mark.parametrize(
    ("model", "options", "named"),
    [
        (None, {}, r"model= is None: give the trainer's nn\.Module"),
        (nn.Linear(1, 1, device="meta"), {}, "no weights to send.*make_model="),
        (nn.Linear(1, 1, device="meta"), {"names": "bias"}, r"names= workers keep.*make_model="),
        (nn.LazyLinear(1), {}, r"LazyLinear cannot be copied.*initialize the parameters"),
        (nn.LazyLinear(1), {"names": "bias"}, r"LazyLinear cannot be copied.*initialize the parameters"),
        (nn.Linear(1, 1), {"ctx": "fork"}, r"ctx= is 'fork': give .*, such as multiprocessing\.get_context\('fork'\)"),
    ],
)
def test_models_that_cannot_be_sent_or_copied_and_invalid_contexts_are_refused(
    model: Any, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        WorkerGroup(workers.act, model, 1, **options)


@pytest.mark.gloo
@pytest.mark.parametrize("options", [{}, {"make_model": workers.policy}, {"names": "weight"}])
def test_a_sharded_model_is_refused_with_advice_to_call_send_sharded(
    model: nn.Module, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - it takes long

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    request.addfinalizer(dist.destroy_process_group)
    fully_shard(model)
    with pytest.raises(ConfigurationError, match=r"^model= \(FSDPLinear\).*call weightsync\.send_sharded\(scheme"):
        WorkerGroup(workers.act, model, 1, **options)


def test_a_model_with_adapters_is_refused_and_both_advised_remedies_work(forkserver: ForkServerContext) -> None:
    """A worker's output is the sum of a weight, 1, and an adapter, which is 2 in the trainer."""
    with pytest.raises(ConfigurationError, match=r"model= \(Adapted\) has adapters.*make_model=.*names=\"\*lora"):
        WorkerGroup(workers.act, workers.Adapted(2.0), 1, ctx=forkserver)
    for options in ({"make_model": workers.policy}, {"names": "*lora_?.*"}):
        with WorkerGroup(workers.act, workers.Adapted(2.0), 1, ctx=forkserver, **options) as group:
            assert next(group.results()).value == 3.0


def test_a_model_that_merges_adapters_in_place_is_accepted(forkserver: ForkServerContext) -> None:
    with WorkerGroup(workers.act, workers.MergedInPlace(1, 1, bias=False), 1, ctx=forkserver) as group:
        assert next(group.results()).versions == (1,)


def test_a_scheme_that_is_already_in_use_is_refused(make: Make) -> None:
    with SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", model=nn.Linear(1, 1), num_workers=1)
        with pytest.raises(
            ConfigurationError, match="scheme= is a SharedMemWeightSyncScheme that is in use already: give a new"
        ):
            make(workers.act, 1, scheme=scheme)


@pytest.mark.parametrize("timeout", ["x", -1.0, True])
def test_results_refuses_an_invalid_timeout_before_the_first_result_is_requested(make: Make, timeout: Any) -> None:
    group = make(workers.act, 1)

    with pytest.raises(ConfigurationError, match="timeout="):
        group.results(timeout)


def test_the_error_for_an_installed_scheme_that_cannot_be_imported_gives_the_reason(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = EntryPoint("lacking", "a_module_that_is_not_there:Scheme", ENTRY_POINTS)
    monkeypatch.setattr("weightsync.schemes.registry.entry_points", lambda group: [point])

    with pytest.raises(
        ConfigurationError, match=r"scheme= is 'lacking'\..*No module named 'a_module_that_is"
    ) as caught:
        WorkerGroup(workers.act, model, 1, scheme="lacking")

    assert isinstance(caught.value.__cause__, ConfigurationError)
    assert isinstance(caught.value.__cause__.__cause__, ModuleNotFoundError)


def test_actor_options_that_the_group_sets_itself_are_refused(model: nn.Module) -> None:
    with pytest.raises(ConfigurationError, match="max_restarts, name"):
        WorkerGroup(workers.act, model, 1, scheme="ray", actor_options={"name": "one", "max_restarts": 1})


def test_actor_options_must_be_a_dict(model: nn.Module) -> None:
    with pytest.raises(ConfigurationError, match=r"actor_options= is \['num_cpus'\]: give a dict"):
        WorkerGroup(workers.act, model, 1, scheme="ray", actor_options=["num_cpus"])  # type: ignore[arg-type]


@pytest.mark.ray
def test_starting_a_group_from_a_ray_client_raises_with_advice(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("weightsync.group.actors.is_ray_client", lambda: True)
    group = WorkerGroup(workers.act, model, 1, scheme="ray")
    with pytest.raises(ConfigurationError, match=r"A Ray Client \(ray://\) .*: run the trainer .*Nothing was started"):
        group.start()


@pytest.mark.parametrize("make_over", [RAY], indirect=True)
@pytest.mark.parametrize("options", [{"nonsense": 1}, {"num_gpus": -1}])
def test_actor_options_that_ray_refuses_raise_before_anything_starts(make_over: Make, options: dict[str, Any]) -> None:
    group = make_over(workers.act, actor_options=options)
    with pytest.raises(ConfigurationError, match=r"Ray takes no such actor_options=.*Nothing was started"), group:
        pass


def test_a_live_worker_whose_link_is_lost_is_restarted_while_the_trainer_only_takes_results(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightsync.group.group._LOST_SECONDS", 0.05)
    with make(workers.put_forever, 1, max_restarts=1, restart_delay=0) as group:
        next(group.results())
        driver = group.sender._driver
        with driver.lock:
            driver.take(pure.LinkLost(0, driver.data.workers[0].link, "cut by the test"))
        for _ in group.results():
            if group.failures:
                break

        assert "its link is lost" in str(group.failures[0])


@pytest.mark.gloo
def test_a_rank_that_joins_after_the_group_was_closed_returns(
    model: nn.Module, forkserver: Any, request: pytest.FixtureRequest
) -> None:
    world = World(forkserver)
    request.addfinalizer(world.close)
    store = world.start(workers.must_not_be_called, 1)
    with WorkerGroup(None, model, scheme="distributed"):
        pass
    store.set("the group is closed", b"")

    assert world.codes() == [0]


@pytest.mark.gloo
def test_a_rank_that_joins_while_the_group_closes_returns(
    model: nn.Module, forkserver: ForkServerContext, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(forkserver)
    request.addfinalizer(world.close)
    store = world.start(workers.put_after_late_join, 1)
    with WorkerGroup(None, model, scheme="distributed") as group:
        launcher: Any = group._launcher
        close = launcher.close

        def close_late(lives: Any) -> None:
            """Close after the rank has connected: the sender is closed by now, the listener is not."""
            store.set("the group is closed", b"")
            assert select.select([launcher._reception], [], [], 60)[0]
            time.sleep(1)
            close(lives)

        monkeypatch.setattr(launcher, "close", close_late)

    assert world.codes() == [0]


@pytest.mark.gloo
def test_g10_a_rank_whose_link_was_withdrawn_by_the_closing_group_returns(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: such a rank waited for a link until START had passed (five minutes)."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    monkeypatch.setattr(ranks, "_world", lambda: ranks._World(store, 0, 2))
    group = WorkerGroup(None, model, scheme="distributed")
    group.start()
    monkeypatch.setattr(ranks, "_world", lambda: ranks._World(store, 1, 2))

    class Late(DistributedWeightSyncScheme):
        def init_on_receiver(self, **options: Any) -> None:
            group.close()
            for thread in threading.enumerate():
                if thread.name.startswith("weightsync-link-"):
                    thread.join()  # wait until the link is withdrawn
            monkeypatch.setenv("WEIGHTSYNC_TIMEOUT", "1")
            super().init_on_receiver(**options)

    run_worker(workers.must_not_be_called, workers.policy(), scheme=Late())


@pytest.mark.gloo
def test_errors_of_a_group_over_ranks_say_what_each_rank_must_call(
    model: nn.Module, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in (lambda: WorkerGroup(None, model, scheme="distributed"), lambda: run_worker(workers.act, model)):
        with pytest.raises(ConfigurationError, match="init_process_group"):
            call()
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    request.addfinalizer(dist.destroy_process_group)
    with pytest.raises(ConfigurationError, match="one rank only, and the group needs another"):
        WorkerGroup(None, model, scheme="distributed")
    with pytest.raises(ConfigurationError, match="rank 0, the trainer"):
        run_worker(workers.act, model)
    for _ in range(2):  # an unanswered call does not use up the number
        with pytest.raises(AckTimeoutError, match="WorkerGroup number 1 "):
            ranks._await_note(ranks._World(store, 1, 2), Deadline(0.0))
    monkeypatch.setattr(ranks, "_world", lambda: ranks._World(store, 1, 2))
    with pytest.raises(ConfigurationError, match="rank 1 of 2: rank 0 makes the WorkerGroup"):
        WorkerGroup(None, model, scheme="distributed")


@pytest.mark.gloo
def test_ranks_do_not_wait_for_a_group_that_failed_to_listen(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    monkeypatch.setattr(ranks, "_world", lambda: ranks._World(store, 0, 2))
    with monkeypatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "no such interface")
        with pytest.raises(TransportError, match="has no address"):
            WorkerGroup(None, model, scheme="distributed").start()
    with WorkerGroup(None, model, scheme="distributed"):
        found = ranks._await_note(ranks._World(store, 1, 2), Deadline(0.0))
    assert found is not None
    assert found[1]["capacity"] == 2


@pytest.mark.gloo
def test_ranks_do_not_wait_for_a_group_whose_start_was_interrupted(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    def interrupted(client: ranks.Client, key: str, amount: int) -> int:
        number = add(client, key, amount)
        signal.raise_signal(signal.SIGUSR1)
        return number

    add, before = ranks.Client.add, signal.signal(signal.SIGUSR1, interrupt)
    request.addfinalizer(lambda: signal.signal(signal.SIGUSR1, before))
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    monkeypatch.setattr(ranks, "_world", lambda: ranks._World(store, 0, 2))
    with monkeypatch.context() as patch:
        patch.setattr(ranks.Client, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            WorkerGroup(None, model, scheme="distributed").start()

    assert ranks._await_note(ranks._World(store, 1, 2), Deadline(0.0)) is None


@pytest.mark.gloo
def test_g10_a_rank_without_a_note_returns_when_the_start_of_its_group_has_failed(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    monkeypatch.setattr(ranks, "_world", lambda: ranks._World(store, 0, 3))
    group = WorkerGroup(None, model, scheme="distributed")
    launcher: Any = group._launcher
    launch = launcher.launch

    def launch_one(index: int, restarts: int) -> Any:
        if index:
            raise TransportError("the store cannot be reached")
        return launch(index, restarts)

    monkeypatch.setattr(launcher, "launch", launch_one)
    with pytest.raises(TransportError, match="cannot be reached"):
        group.start()
    monkeypatch.setattr(ranks, "_world", lambda: ranks._World(store, 2, 3))

    run_worker(workers.act, model, timeout=5.0)

    with pytest.raises(AckTimeoutError, match="WorkerGroup number 2 "):
        run_worker(workers.act, model, timeout=0.0)


def test_a_model_that_cannot_be_copied_is_refused_with_advice_to_give_make_model(forkserver: ForkServerContext) -> None:
    model = nn.Linear(1, 1)
    model.act = lambda: None  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match="make_model"):
        WorkerGroup(workers.act, model, 1, ctx=forkserver)
