"""Messages of a group about failures: what happened, to which worker and version, and what to do next."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import socket
from collections.abc import Callable
from typing import Any

import group_workers as workers
import pytest
from group_worlds import PIPES, RANKS, RAY, SHARED, Make, await_results

from weightsync import (
    AckTimeoutError,
    MultiProcessWeightSyncScheme,
    Outcome,
    OutcomeKind,
    SharedMemWeightSyncScheme,
    StateError,
    SyncReport,
    WorkerFailedError,
    WorkerGroup,
)
from weightsync.clock import Deadline
from weightsync.engine.sender import WeightSender
from weightsync.group.advice import reword_report
from weightsync.group.channel import WorkerEnd
from weightsync.group.members import Member, Members, MemberState, Rules
from weightsync.group.steps import Staleness
from weightsync.group.worker import InheritedChannel, Job, Plan, _report, live
from weightsync.options import OnStale
from weightsync.protocol.sender import LinkState

#: Methods that a group does not have.
FOREIGN_METHODS = re.compile(r"(add_worker|remove_worker|abandon|init_on_\w+|register_\w+|connect|poll|receive)\(\)")


def refused_before_the_first_version_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's refusal of the handshake has arrived before `start` sends."""
    pack = WeightSender._pack

    def late(sender: WeightSender, *arguments: Any) -> Any:
        while sender.workers[0].link_state is LinkState.EXPECTED:
            sender.progress()
        return pack(sender, *arguments)

    monkeypatch.setattr(WeightSender, "_pack", late)


def refused_before_the_death_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group does not see the worker's end before all answers are there and it waits for something else."""
    hidden, read, dead, wait = [True], Member.read, Member.dead, Members.wait
    seen: Callable[[Member], bool] = dead.fget  # type: ignore[attr-defined]

    def wait_for_more(members: Members, deadline: Deadline) -> None:
        sender: Any = members._feed()
        if not sender.owing:
            hidden.clear()
        wait(members, deadline)

    monkeypatch.setattr(Member, "read", lambda member: [] if hidden else read(member))
    monkeypatch.setattr(Member, "dead", property(lambda member: not hidden and seen(member)))
    monkeypatch.setattr(Members, "wait", wait_for_more)


def died_before_the_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group has seen the worker's death before the trainer sends."""
    dispatch = WorkerGroup._dispatch

    def late(group: WorkerGroup, asked: str, *arguments: Any) -> Any:
        while asked != "start" and not group.failures:
            group._members.wait(Deadline(60.0))
            group._members.pump()
        return dispatch(group, asked, *arguments)

    monkeypatch.setattr(WorkerGroup, "_dispatch", late)


ORDERS = [refused_before_the_first_version_is_sent, refused_before_the_death_is_seen, died_before_the_send]


def test_the_error_for_a_killed_worker_names_its_version_and_where_to_look(make: Make) -> None:
    with make(workers.act, capacity=1) as group:
        await_results(group)
        os.kill(group.processes[0].pid, signal.SIGKILL)
        with pytest.raises(WorkerFailedError) as caught:
            list(group.results())
    assert (caught.value.worker, caught.value.version) == (0, 1)
    said = "worker 0 failed while it served version 1: its process was ended by SIGKILL"
    assert str(caught.value).startswith(said)
    assert "run out of memory: see the kernel's log" in str(caught.value)


def test_the_error_for_a_worker_model_that_does_not_fit_advises_make_model(make: Make) -> None:
    with (
        make(workers.act, make_model=workers.biased) as group,
        pytest.raises(WorkerFailedError, match=r"(?s)refused the trainer's weights .* missing 'bias'.*make_model="),
    ):
        list(group.results())


@pytest.mark.parametrize("ask", [WorkerGroup.send, WorkerGroup.wait_async])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("make_over", [SHARED, PIPES], indirect=True)
def test_a_worker_whose_model_does_not_fit_fails_in_any_order_of_events(
    make_over: Make,
    order: Callable[[pytest.MonkeyPatch], None],
    ask: Callable[[WorkerGroup], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order(monkeypatch)
    with make_over(workers.act, make_model=workers.biased) as group, pytest.raises(WorkerFailedError) as caught:
        ask(group)
    reason = r"this worker refused the trainer's weights before its first version: .* missing 'bias'.*make_model="
    assert re.search(reason, caught.value.reason)
    assert FOREIGN_METHODS.findall(str(caught.value)) == []


@pytest.mark.parametrize("order", ORDERS)
def test_a_worker_whose_model_does_not_fit_is_restarted_in_any_order_of_events(
    make: Make, order: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    order(monkeypatch)
    with make(workers.act, make_model=workers.biased, max_restarts=1, restart_delay=3600.0) as group:
        assert group.send().of(OutcomeKind.LOST, OutcomeKind.REFUSED) == (0,)
        assert "missing 'bias'" in group.failures[0].reason
        assert "It restarts in 60 s" in str(group.failures[0])


@pytest.mark.parametrize("make_over", [RANKS], indirect=True)
def test_a_rank_whose_model_does_not_fit_fails(make_over: Make) -> None:
    with make_over(workers.act, rank_model=workers.biased) as group:
        with pytest.raises(WorkerFailedError, match="missing 'bias'") as caught:
            group.send()
        assert FOREIGN_METHODS.findall(str(caught.value).replace("run_worker()", "")) == []


@pytest.mark.parametrize("make_over", [RAY], indirect=True)
def test_an_actor_whose_model_does_not_fit_fails(make_over: Make) -> None:
    with make_over(workers.act, make_model=workers.biased) as group:
        with pytest.raises(WorkerFailedError, match="missing 'bias'") as caught:
            group.send()
        assert FOREIGN_METHODS.findall(str(caught.value)) == []


def test_the_timeout_of_a_groups_send_advises_only_methods_of_the_group(make: Make) -> None:
    with make(workers.act, make_model=workers.slow_model) as group:
        for send in (lambda: group.send(timeout=0.0), lambda: group.send_async(on_pending="wait", timeout=0.0)):
            with pytest.raises(AckTimeoutError) as caught:
                send()
            assert FOREIGN_METHODS.findall(str(caught.value)) == []
            assert "worker 0: TIMED_OUT (it has been starting for" in str(caught.value)
            assert "the next send() or send_async() supersedes it" in str(caught.value)
        with pytest.raises(StateError) as refused:
            group.send_async(on_pending="raise")
        assert FOREIGN_METHODS.findall(str(refused.value)) == []
        assert "version 2 still awaits worker 0. Call wait_async(), or leave out on_pending=" in str(refused.value)


def test_only_a_worker_that_timed_out_as_it_started_is_said_to_be_starting() -> None:
    unused: Any = None
    member = Member(0, Rules(1, 0, 1.0, None), unused)
    members = Members({0: member}, lambda: None)
    timed_out, applied = (Outcome(kind=kind, reason="late") for kind in (OutcomeKind.TIMED_OUT, OutcomeKind.APPLIED))
    for state, outcome, reason in (
        (MemberState.RUNNING, timed_out, "late"),
        (MemberState.STARTING, applied, "late"),
        (MemberState.STARTING, timed_out, "it has been starting for"),
    ):
        member.state = state
        report = SyncReport(model_id="policy", version=1, incarnation=1, outcomes={0: outcome})
        assert reword_report(report, members, unused)[0].reason.startswith(reason)


def test_wait_async_without_an_outstanding_update_raises_with_advice(make: Make) -> None:
    with make(workers.act) as group:
        group.send()
        with pytest.raises(StateError, match=r"^wait_async\(\): no update is outstanding\. send_async\(\)") as caught:
            group.wait_async()
    assert FOREIGN_METHODS.findall(str(caught.value)) == []
    assert "results" in caught.value.allowed


def test_the_error_for_a_result_that_cannot_be_pickled_advises_what_to_put(make: Make) -> None:
    with (
        make(workers.put_unpicklable_result) as group,
        pytest.raises(WorkerFailedError, match=r"put\(\) was given a function that cannot be pickled .*: put tensors"),
    ):
        list(group.results())


def test_errors_of_a_group_that_was_not_started_or_has_ended_say_what_to_do(make: Make) -> None:
    group = make(workers.act)
    with pytest.raises(StateError, match=r"group\.sender: no worker runs yet\. Enter the group by `with`"):
        print(group.sender)
    with pytest.raises(StateError, match=r"Enter the group by `with`, or call start\(\), first"):
        group.send()
    with pytest.raises(StateError, match=r"send_async\(\)"):
        group.send_async()
    group.start()
    group.close()
    with pytest.raises(StateError, match=r"Make a new WorkerGroup"):
        group.send()


def test_a_worker_that_is_sent_no_first_version_in_time_ends_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_TIMEOUT", "0.01")
    (link, far_link), (near, far) = multiprocessing.Pipe(), socket.socketpair()
    plan = Plan(workers.must_not_be_called, workers.policy, "policy", 1, Staleness(None, OnStale.BLOCK), None)
    scheme = MultiProcessWeightSyncScheme()
    with link, far_link, near:
        error = live(Job(plan, 0, 0, scheme, {"pipe": far_link}, InheritedChannel(far), None))

    assert isinstance(error, AckTimeoutError)
    assert "sent this worker no first version of 'policy' in time: it sends one while it is inside" in str(error)


def test_the_error_of_a_worker_whose_trainer_is_gone_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    near, far = socket.socketpair()
    near.close()
    with contextlib.closing(WorkerEnd(far, 1)) as channel:
        _report(ValueError("a pole fell"), SharedMemWeightSyncScheme(), channel)

    assert "ValueError: a pole fell" in capsys.readouterr().err
