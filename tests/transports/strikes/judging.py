"""What is asked of every transport when somebody is struck: a typed outcome by the deadline, nothing torn."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable
from typing import Any

import pytest
from fleet import PATIENCE, segments
from fleets import Fleet
from striking import (
    FROM_WITHOUT,
    SHORT,
    SOON,
    Signal,
    Strike,
    TrainerPoint,
    WorkerPoint,
    abandon,
    arm_sender,
    break_reading,
    close,
    follow_anew,
    follow_until_gone,
    gone_or_stopped,
    holds,
    incarnation,
    look,
    refill,
    remove_worker,
    send,
    send_async,
    state,
    wait_async,
    within,
)

from weightsync import AckTimeoutError, OutcomeKind, State, SyncReport, WorkerLostError

APPLIED, LOST, TIMED_OUT = OutcomeKind.APPLIED, OutcomeKind.LOST, OutcomeKind.TIMED_OUT


def some(points: Iterable[Any], *chosen: Any) -> list[Any]:
    """All of them as parameters; those that were not chosen run in `make verify` only."""
    return [pytest.param(each, marks=() if each in chosen else pytest.mark.slow) for each in points]


def kinds(report: SyncReport) -> tuple[OutcomeKind, OutcomeKind]:
    return report[0].kind, report[1].kind


def a_killed_worker_is_lost_and_the_others_are_served(fleet: Fleet, at: WorkerPoint) -> None:
    """Killed at that point; then one in its place, or the reason why there is none."""
    report = _killed(fleet, at)
    version = report.version

    if at is WorkerPoint.ANSWERED:
        assert report[0].kind in fleet.answered
    elif at is WorkerPoint.AHEAD:
        assert report[0].kind is fleet.unmet
    else:
        assert report[0].kind is LOST
    if report[0].kind is LOST:
        assert report[0].reason
        with pytest.raises(WorkerLostError):
            report.raise_on_failure()
    assert report[1].kind is APPLIED
    assert (version, {float(version)}) == fleet.other.do(holds)
    goes_on(fleet, version + 1)


def _killed(fleet: Fleet, at: WorkerPoint) -> SyncReport:
    strike = Strike(at, Signal.KILL, fleet.worker_payload)
    fleet.start_receiver(fleet.other)
    fleet.start_receiver(fleet.victim, None if at in FROM_WITHOUT else strike)
    fleet.start_sender(fleet.trainer)
    if at in FROM_WITHOUT:
        return _killed_from_without(fleet, at)
    fleet.follow(fleet.other, 1)
    fleet.trainer.tell(send, 1.0, SHORT if at is WorkerPoint.AHEAD and fleet.unmet is TIMED_OUT else PATIENCE)
    if at is not WorkerPoint.AHEAD and fleet.receives:
        fleet.follow(fleet.victim, 1)
    gone_or_stopped(fleet.victim.pid)
    with within(SOON):
        report: SyncReport = fleet.trainer.answer()
    fleet.followed(fleet.other)
    if report.of(TIMED_OUT):
        fleet.trainer.do(abandon)
    return report


def _killed_from_without(fleet: Fleet, at: WorkerPoint) -> SyncReport:
    all_sent(fleet, 1)
    if at is WorkerPoint.OUTSTANDING:
        fleet.victim.stop()  # so that it has not answered
        fleet.trainer.do(send_async, 2.0)
    fleet.victim.kill()
    fleet.follow(fleet.other, 2)
    with within(SOON):
        report: SyncReport = fleet.trainer.do(send, 2.0) if at is WorkerPoint.IDLE else fleet.trainer.do(wait_async)[0]
    fleet.followed(fleet.other)
    return report


def all_sent(fleet: Fleet, version: int) -> None:
    for worker in (fleet.victim, fleet.other):
        fleet.follow(worker, version)
    report = fleet.trainer.do(send, float(version))
    assert report.ok, report
    for worker in (fleet.victim, fleet.other):
        fleet.followed(worker)
        assert (version, {float(version)}) == worker.do(holds)


def goes_on(fleet: Fleet, version: int) -> None:
    """The next send works, or says precisely why not, and works without the dead."""
    why_not = fleet.readmit()
    if why_not:
        fleet.follow(fleet.other, version)
        report = fleet.trainer.do(send, float(version))
        assert (LOST, APPLIED) == kinds(report)
        assert why_not in report[0].reason
        fleet.followed(fleet.other)
        fleet.trainer.do(remove_worker, 0)
        fleet.follow(fleet.other, version + 1)
        assert fleet.trainer.do(send, float(version + 1)).ok
        fleet.followed(fleet.other)
        assert (version + 1, {float(version + 1)}) == fleet.other.do(holds)
    else:
        all_sent(fleet, version)


def a_stopped_worker_costs_the_deadline_and_its_late_answer_counts(fleet: Fleet, at: WorkerPoint) -> None:
    """Stopped at that point, and resumed once the deadline has passed."""
    strike = Strike(at, Signal.STOP, fleet.worker_payload)
    fleet.start_receiver(fleet.other)
    fleet.start_receiver(fleet.victim, None if at in FROM_WITHOUT else strike)
    fleet.start_sender(fleet.trainer)
    version = 1
    if at in FROM_WITHOUT:
        all_sent(fleet, version)
        version = 2
        fleet.victim.stop()
    fleet.follow(fleet.other, version)
    fleet.trainer.do(send_async, float(version))
    if at is not WorkerPoint.AHEAD:
        fleet.follow(fleet.victim, version)
    fleet.poll_until(fleet.victim.is_struck)
    fleet.followed(fleet.other, polling=True)
    survives = at is WorkerPoint.ANSWERED and LOST not in fleet.answered
    report, took = fleet.trainer.do(wait_async, PATIENCE if survives else SHORT)

    if survives:
        assert report.ok
    elif at is not WorkerPoint.ANSWERED:
        assert (TIMED_OUT, APPLIED) == kinds(report), report
        assert SHORT <= took < SHORT + SOON
        with pytest.raises(AckTimeoutError) as late:
            report.raise_on_failure()
        assert (0,) == tuple(late.value.pending)
        assert fleet.trainer.do(state) is State.PENDING_ASYNC
    fleet.trainer.do(refill, 99.0)  # what was sent is what the model held at the send
    fleet.victim.resume()
    if at is WorkerPoint.AHEAD:
        fleet.victim.answer()
        fleet.follow(fleet.victim, version)
    fleet.followed(fleet.victim, polling=True)
    if report.of(TIMED_OUT):
        assert fleet.trainer.do(wait_async)[0].ok
    assert (version, {float(version)}) == fleet.victim.do(holds) == fleet.other.do(holds)
    all_sent(fleet, version + 1)


def a_killed_trainer_leaves_whole_weights_and_room_for_the_next(fleet: Fleet, at: TrainerPoint) -> None:
    """Killed at that point; its workers are told, and a new trainer takes over."""
    workers = fleet.victim, fleet.other
    for worker in workers:
        fleet.start_receiver(worker)
    _trainer_struck(fleet, at, Signal.KILL)
    known = [worker.do(incarnation) for worker in workers] if at is TrainerPoint.CONNECT else []
    if fleet.receives and at is not TrainerPoint.CONNECT:
        with within(SOON):
            reasons = [worker.answer() for worker in workers]
        assert all("no sender any more" in reason for reason in reasons)
    for worker in workers:
        assert worker.do(holds) in [(None, {0.0}), (1, {1.0}), (2, {2.0})]
    known = known or [worker.do(incarnation) for worker in workers]
    fleet.trainer = fleet.successor()
    fleet.start_sender(fleet.trainer)
    if fleet.receives:
        for worker, before in zip(workers, known, strict=True):
            worker.tell(follow_anew, before)
    assert fleet.trainer.do(send, 7.0).ok
    for worker in workers:
        fleet.followed(worker)
        assert (1, {7.0}) == worker.do(holds)


def _trainer_struck(fleet: Fleet, at: TrainerPoint, sent: Signal) -> None:
    strike = Strike(at, sent, fleet.trainer_payload)
    fleet.start_sender(fleet.trainer, strike)
    if at is not TrainerPoint.CONNECT:
        all_sent(fleet, 1)
        if fleet.receives:
            for worker in (fleet.victim, fleet.other):
                worker.tell(follow_until_gone if sent is Signal.KILL else look)
        if at is TrainerPoint.OUTSTANDING:
            fleet.trainer.do(send_async, 2.0)
        elif at is not TrainerPoint.IDLE:
            fleet.trainer.do(arm_sender, strike)
            fleet.trainer.tell(send, 2.0)
    if at not in FROM_WITHOUT:
        gone_or_stopped(fleet.trainer.pid)
    elif sent is Signal.KILL:
        fleet.trainer.kill()


def a_stopped_trainer_holds_nobody_up_and_goes_on(fleet: Fleet, at: TrainerPoint) -> None:
    """Stopped at that point, while its workers look; resumed, its send reaches them."""
    workers = fleet.victim, fleet.other
    for worker in workers:
        fleet.start_receiver(worker)
    _trainer_struck(fleet, at, Signal.STOP)
    if fleet.receives:
        with within(SHORT + 5):
            for worker in workers:
                worker.answer()
    for worker in workers:
        assert worker.do(holds) in [(1, {1.0}), (2, {2.0})]
        fleet.follow(worker, 2)
    fleet.trainer.resume()
    assert fleet.trainer.answer().ok
    for worker in workers:
        fleet.followed(worker)
        assert (2, {2.0}) == worker.do(holds)


def an_adapter_that_raises_loses_its_link_with_the_reason(fleet: Fleet, where: str) -> None:
    """Its fault, at either end, costs that worker, and nobody else; a new link brings it back."""
    for worker in (fleet.victim, fleet.other):
        fleet.start_receiver(worker)
    fleet.start_sender(fleet.trainer)
    all_sent(fleet, 1)
    (fleet.victim if where == "worker" else fleet.trainer).do(break_reading, where)
    fleet.follow(fleet.other, 2)
    if fleet.receives:
        fleet.victim.tell(follow_until_gone)
    with within(SOON):
        report = fleet.trainer.do(send, 2.0)

    assert (LOST, APPLIED) == kinds(report)
    assert "a fault of the adapter's own" in report[0].reason
    fleet.followed(fleet.other)
    if fleet.receives:
        assert ("a fault of the adapter's own" in fleet.victim.answer()) or where == "trainer"
    assert fleet.victim.do(holds) in [(1, {1.0}), (2, {2.0})]


def a_trainer_closes_while_a_worker_is_stopped_in_the_middle(fleet: Fleet) -> None:
    """Its close waits for no answer; the worker serves the whole update, or nothing of it."""
    strike = Strike(WorkerPoint.PAYLOAD, Signal.STOP, fleet.worker_payload)
    fleet.start_receiver(fleet.victim, strike)
    fleet.start_receiver(fleet.other)
    fleet.start_sender(fleet.trainer)
    fleet.trainer.do(send_async, 3.0)
    for worker in (fleet.victim, fleet.other):
        fleet.follow(worker, 1)
    fleet.poll_until(fleet.victim.is_struck)
    report, _ = fleet.trainer.do(wait_async, SHORT)
    assert report[0].kind is TIMED_OUT
    with within(SOON):
        fleet.trainer.do(close)

    fleet.victim.resume()
    for worker in (fleet.victim, fleet.other):
        with contextlib.suppress(ConnectionError):
            fleet.followed(worker)
        assert worker.do(holds) in [(1, {3.0}), (None, {0.0})]
    fleet.victim.kill()
    gc.collect()  # errors that earlier tests have caught hold frames, and those hold buffers
    assert 0 == segments()
