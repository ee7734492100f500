"""Sends of a group whose workers are lost: no failure if they are restarted, and no version is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import group_workers as workers
import pytest
import torch
from clocks import advance_a_minute_once
from group_worlds import PIPES, RANKS, RAY, SHARED, Make
from prometheus_client import CollectorRegistry
from torch import nn

from weightsync import (
    ConfigurationError,
    EventKind,
    Evidence,
    Outcome,
    OutcomeKind,
    StateError,
    SyncEvent,
    SyncReport,
    SyncRole,
    TransportError,
    WorkerFailedError,
    WorkerGroup,
)
from weightsync.clock import Deadline
from weightsync.group.sending import failed_for_running_workers
from weightsync.protocol.sender import LinkState
from weightsync.telemetry.prometheus import Metrics


def kill_all(group: WorkerGroup) -> None:
    """Kill the workers, and wait until the group and its sender have noticed."""
    known = len(group.failures)
    for life in [member.running for member in group._members.by_index.values()]:
        assert life is not None
        life.process.kill()
    while len(group.failures) == known or any(
        entry.link_state is not LinkState.LOST for entry in group.sender.workers.values()
    ):
        group._members.pump()
        group.sender.progress()
        time.sleep(0.01)


def sends(group: WorkerGroup) -> SyncReport:
    return group.send()


def sends_and_waits(group: WorkerGroup) -> SyncReport:
    report = group.send_async()
    assert group.wait_async() is report
    return report


@pytest.mark.parametrize("send", [sends, sends_and_waits])
@pytest.mark.parametrize("make_over", [SHARED, PIPES, RAY], indirect=True)
def test_weights_sent_while_no_worker_lives_reach_the_first_restarted_worker(
    make_over: Make, model: nn.Linear, send: Callable[[WorkerGroup], SyncReport]
) -> None:
    with make_over(workers.act, 1, max_restarts=1, restart_delay=3600.0) as group:
        next(group.results())
        group.wait_async()
        kill_all(group)
        torch.nn.init.constant_(model.weight, 2.0)
        report = send(group)
        assert (report.version, report[0].kind, group.version) == (None, OutcomeKind.LOST, 1)
        with pytest.raises(StateError):
            group.wait_async()
        group._members.results.clear()  # drop the results of the first life
        group._members.by_index[0].due = Deadline(0.0)
        assert next(result.value for result in group.results() if 2 in result.versions) == 2.0
        assert group.version == 2


def test_an_update_that_waits_for_the_previous_one_is_announced_even_if_a_worker_was_lost(make: Make) -> None:
    with make(workers.act, 2, max_restarts=1, restart_delay=3600.0) as group:
        next(group.results())
        group.wait_async()
        group.processes[0].kill()
        for version in (2, 3, 4):
            report = group.send_async(on_pending="wait")
            assert (report.version, group.version) == (version, version)
        assert report[0].kind is OutcomeKind.LOST


def test_a_report_of_an_update_that_waited_tells_whether_the_previous_one_failed() -> None:
    def report(kind: OutcomeKind, previous: SyncReport | None = None) -> SyncReport:
        outcome = Outcome(kind=kind, evidence=Evidence.ANSWER)
        return SyncReport(model_id="policy", version=1, incarnation=1, outcomes={0: outcome}, previous=previous)

    failed = [OutcomeKind.REFUSED, OutcomeKind.TIMED_OUT]
    for kind in (OutcomeKind.APPLIED, OutcomeKind.LOST, *failed):
        waited = report(OutcomeKind.APPLIED, report(OutcomeKind.APPLIED, report(kind)))
        assert failed_for_running_workers(waited) is (kind in failed)


def test_send_and_wait_async_raise_if_all_workers_died_without_restarts(make: Make) -> None:
    with make(workers.act, 1) as group:
        next(group.results())
        kill_all(group)
        assert group.send_async()[0].kind is OutcomeKind.LOST
        for waits in (group.wait_async, group.send):
            with pytest.raises(WorkerFailedError, match="SIGKILL"):
                waits()


def test_each_failed_worker_leaves_the_sender_when_its_failure_is_raised(make: Make) -> None:
    with make(workers.act, 2) as group:
        next(group.results())
        kill_all(group)
        while len(group.failures) < 2:
            group._members.pump()
        for left in (1, 0):
            with pytest.raises(WorkerFailedError, match="SIGKILL"):
                for _ in group.results():
                    pass
            assert set(group.sender.worker_ids) == {error.worker for error in group._members.unreported}
            assert len(group.sender.worker_ids) == left


def a_minute_passes_during_a_send(group: WorkerGroup) -> AbstractContextManager[None]:
    """In the block, time stands still until the next version is sent; then a bit over a minute passes at once."""
    before = group.sender.version
    return advance_a_minute_once(lambda: group.sender.version != before)


def test_a_worker_that_hangs_is_killed_by_its_deadline_while_the_trainer_waits_for_its_answer(make: Make) -> None:
    options = {"deadline": 60.0, "max_staleness": 0, "max_restarts": 1, "restart_delay": 0.0}
    with make(workers.hold_a_step_forever_in_first_life, 1, **options) as group:
        assert next(group.results()).value == 0
        with a_minute_passes_during_a_send(group):
            assert group.send(timeout=600.0)[0].kind is OutcomeKind.LOST
        assert "it gave no result for 60.0 s" in group.failures[0].reason


def test_wait_async_does_not_kill_a_worker_that_was_already_restarted(make: Make) -> None:
    with make(workers.hold_a_step_forever_in_first_life, 1, max_restarts=1, restart_delay=0.0) as group:
        assert next(group.results()).value == 0
        group.send_async()
        group.processes[0].kill()
        assert next(group.results()).value == 1
        assert group.wait_async()[0].kind is OutcomeKind.LOST
        assert [failure.reason for failure in group.failures] == ["its process was ended by SIGKILL"]
        assert next(group.results()).value == 1


def test_each_restart_is_counted_and_is_an_event_with_its_reason(make: Make) -> None:
    registry = CollectorRegistry()
    counted = Metrics(registry)
    seen: list[SyncEvent] = []
    with make(workers.fail_in_first_life, 2, max_restarts=1, restart_delay=0.0) as group:
        counted.watch(group.scheme)
        group.scheme.on_event(seen.append)
        results = [result.value for result in group.results()]
    assert sorted(restarts for restarts, _ in results) == [0, 0, 1, 1]
    restarts = {event.worker: event for event in seen if event.kind is EventKind.RESTARTED}
    assert {worker: event.reason for worker, event in restarts.items()} == {
        0: "ValueError: a pole fell",
        1: "its process was ended by SIGKILL",
    }
    assert {(event.model_id, event.role, event.version) for event in restarts.values()} == {
        ("policy", SyncRole.TRAINER, None)
    }
    page = {(s.name, *s.labels.values()): s.value for family in registry.collect() for s in family.samples}
    assert [page["weightsync_restarts_total", "policy", each] for each in "01"] == [1.0, 1.0]


def test_a_restart_whose_link_cannot_be_made_ends_its_process_and_is_a_failure_with_the_reason(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise TransportError("no more links")

    with make(workers.act, 1, max_restarts=1, restart_delay=0.0) as group:
        next(group.results())
        launched, launch = [], group._launcher.launch
        monkeypatch.setattr(group._launcher, "launch", lambda *given: launched.append(launch(*given)) or launched[-1])
        monkeypatch.setattr(group.sender, "add_worker", refuse)
        group.processes[0].kill()
        with pytest.raises(WorkerFailedError, match=r"could not be started again \(TransportError: no more links\)"):
            for _ in group.results():
                pass
        [(running, _, process)] = launched
        assert running.process.dead
        assert running.channel.ended
        with pytest.raises(ValueError, match="closed"):
            process.is_alive()


@pytest.mark.parametrize("make_over", [RANKS], indirect=True)
def test_a_send_does_not_wait_for_a_rank_that_was_given_up(make_over: Make) -> None:
    with make_over(workers.hold_a_step_forever_in_first_life, 1, deadline=60.0, max_staleness=0) as group:
        assert next(group.results()).value == 0
        with a_minute_passes_during_a_send(group):
            assert group.send(timeout=600.0, on_failure="report")[0].kind is OutcomeKind.LOST  # the link lives on
        with pytest.raises(WorkerFailedError, match=r"no result for 60.0 s, and was given up"):
            next(group.results())


def test_a_worker_killed_by_a_real_time_signal_is_reported_as_failed(make: Make) -> None:
    with make(workers.act) as group:
        next(group.results())
        os.kill(group.processes[0].pid, signal.SIGRTMIN + 6)
        with pytest.raises(WorkerFailedError, match=rf"its process was ended by signal {signal.SIGRTMIN + 6}\b"):
            list(group.results())
        assert list(group.results()) == []


def test_a_close_with_an_invalid_timeout_changes_nothing(make: Make) -> None:
    with make(workers.act) as group:
        for timeout in (-1.0, float("nan")):
            with pytest.raises(ConfigurationError, match="Nothing has changed"):
                group.close(timeout=timeout)
        assert group.send(timeout=60.0).ok
