"""What is asked of every transport when somebody is struck: a typed outcome by the deadline, nothing torn."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from fleet import PATIENCE
from striking import (
    FROM_WITHOUT,
    SHORT,
    SOON,
    At,
    Blow,
    Field,
    Strike,
    TrainerAt,
    abandon,
    arm_sender,
    break_reading,
    follow_anew,
    follow_until_gone,
    gone_or_stopped,
    holds,
    incarnation,
    look,
    remove_worker,
    send,
    send_async,
    wait_async,
    within,
)

from weightsync import AckTimeoutError, OutcomeKind, SyncReport, WorkerLostError

APPLIED, LOST, TIMED_OUT = OutcomeKind.APPLIED, OutcomeKind.LOST, OutcomeKind.TIMED_OUT


def some(points: Iterable[Any], *chosen: Any) -> list[Any]:
    """All of them as parameters; those that were not chosen run in `make verify` only."""
    return [pytest.param(each, marks=() if each in chosen else pytest.mark.slow) for each in points]


def kinds(report: SyncReport) -> tuple[OutcomeKind, OutcomeKind]:
    return report[0].kind, report[1].kind


def a_killed_worker_is_lost_and_the_others_are_served(field: Field, at: At) -> None:
    """Killed at that point; then one in its place, or the reason why there is none."""
    report = _killed(field, at)
    version = report.version

    if at is At.ANSWERED:
        assert report[0].kind in (APPLIED, LOST)  # the answer may have died with it
    elif at is At.AHEAD:
        assert report[0].kind is field.unmet
    else:
        assert report[0].kind is LOST
        assert report[0].reason
        with pytest.raises(WorkerLostError):
            report.raise_on_failure()
    assert report[1].kind is APPLIED
    assert (version, {float(version)}) == field.other.do(holds)
    goes_on(field, version + 1)


def _killed(field: Field, at: At) -> SyncReport:
    strike = Strike(at, Blow.KILL, field.worker_payload)
    field.enlist(field.other)
    field.enlist(field.victim, None if at in FROM_WITHOUT else strike)
    field.command(field.trainer)
    if at in FROM_WITHOUT:
        return _killed_from_without(field, at)
    field.follow(field.other, 1)
    field.trainer.tell(send, 1.0, SHORT if at is At.AHEAD and field.unmet is TIMED_OUT else PATIENCE)
    if at is not At.AHEAD and field.receives:
        field.follow(field.victim, 1)
    gone_or_stopped(field.victim.pid)
    with within(SOON):
        report: SyncReport = field.trainer.answer()
    field.followed(field.other)
    if report.of(TIMED_OUT):
        field.trainer.do(abandon)
    return report


def _killed_from_without(field: Field, at: At) -> SyncReport:
    all_sent(field, 1)
    if at is At.OUTSTANDING:
        field.victim.stop()  # so that it has not answered
        field.trainer.do(send_async, 2.0)
    field.victim.kill()
    field.follow(field.other, 2)
    with within(SOON):
        report: SyncReport = field.trainer.do(send, 2.0) if at is At.IDLE else field.trainer.do(wait_async)[0]
    field.followed(field.other)
    return report


def all_sent(field: Field, version: int) -> None:
    for worker in (field.victim, field.other):
        field.follow(worker, version)
    report = field.trainer.do(send, float(version))
    assert report.ok, report
    for worker in (field.victim, field.other):
        field.followed(worker)
        assert (version, {float(version)}) == worker.do(holds)


def goes_on(field: Field, version: int) -> None:
    """The next send works, or says precisely why not, and works without the dead."""
    why_not = field.readmit()
    if why_not:
        field.follow(field.other, version)
        report = field.trainer.do(send, float(version))
        assert (LOST, APPLIED) == kinds(report)
        assert why_not in report[0].reason
        field.followed(field.other)
        field.trainer.do(remove_worker, 0)
        field.follow(field.other, version + 1)
        assert field.trainer.do(send, float(version + 1)).ok
        field.followed(field.other)
        assert (version + 1, {float(version + 1)}) == field.other.do(holds)
    else:
        all_sent(field, version)


def a_stopped_worker_costs_the_deadline_and_its_late_answer_counts(field: Field, at: At) -> None:
    """Stopped at that point, and resumed once the deadline has passed."""
    strike = Strike(at, Blow.STOP, field.worker_payload)
    field.enlist(field.other)
    field.enlist(field.victim, None if at in FROM_WITHOUT else strike)
    field.command(field.trainer)
    version = 1
    if at in FROM_WITHOUT:
        all_sent(field, version)
        version = 2
        field.victim.stop()
    field.follow(field.other, version)
    field.trainer.do(send_async, float(version))
    if at is not At.AHEAD:
        field.follow(field.victim, version)
    gone_or_stopped(field.victim.pid)
    field.followed(field.other)
    report, took = field.trainer.do(wait_async, SHORT)

    if at is not At.ANSWERED:
        assert (TIMED_OUT, APPLIED) == kinds(report), report
        assert SHORT <= took < SHORT + 5
        with pytest.raises(AckTimeoutError):
            report.raise_on_failure()
    field.victim.resume()
    if at is At.AHEAD:
        field.victim.answer()
        field.follow(field.victim, version)
    field.followed(field.victim)
    if report.of(TIMED_OUT):
        assert field.trainer.do(wait_async)[0].ok
    assert (version, {float(version)}) == field.victim.do(holds) == field.other.do(holds)
    all_sent(field, version + 1)


def a_killed_trainer_leaves_whole_weights_and_room_for_the_next(field: Field, at: TrainerAt) -> None:
    """Killed at that point; its workers are told, and a new trainer takes over."""
    workers = field.victim, field.other
    for worker in workers:
        field.enlist(worker)
    _trainer_struck(field, at, Blow.KILL)
    known = [worker.do(incarnation) for worker in workers] if at is TrainerAt.CONNECT else []
    if field.receives and at is not TrainerAt.CONNECT:
        with within(SOON):
            reasons = [worker.answer() for worker in workers]
        assert all("no sender any more" in reason for reason in reasons)
    for worker in workers:
        assert worker.do(holds) in [(None, {0.0}), (1, {1.0}), (2, {2.0})]
    known = known or [worker.do(incarnation) for worker in workers]
    field.trainer = field.successor()
    field.command(field.trainer)
    if field.receives:
        for worker, before in zip(workers, known, strict=True):
            worker.tell(follow_anew, before)
    assert field.trainer.do(send, 7.0).ok
    for worker in workers:
        field.followed(worker)
        assert (1, {7.0}) == worker.do(holds)


def _trainer_struck(field: Field, at: TrainerAt, blow: Blow) -> None:
    strike = Strike(at, blow, field.trainer_payload)
    field.command(field.trainer, strike)
    if at is not TrainerAt.CONNECT:
        all_sent(field, 1)
        if field.receives:
            for worker in (field.victim, field.other):
                worker.tell(follow_until_gone if blow is Blow.KILL else look)
        if at is TrainerAt.OUTSTANDING:
            field.trainer.do(send_async, 2.0)
        elif at is not TrainerAt.IDLE:
            field.trainer.do(arm_sender, strike)
            field.trainer.tell(send, 2.0)
    if at not in FROM_WITHOUT:
        gone_or_stopped(field.trainer.pid)
    elif blow is Blow.KILL:
        field.trainer.kill()


def a_stopped_trainer_holds_nobody_up_and_goes_on(field: Field, at: TrainerAt) -> None:
    """Stopped at that point, while its workers look; resumed, its send reaches them."""
    workers = field.victim, field.other
    for worker in workers:
        field.enlist(worker)
    _trainer_struck(field, at, Blow.STOP)
    if field.receives:
        with within(SHORT + 5):
            for worker in workers:
                worker.answer()
    for worker in workers:
        assert worker.do(holds) in [(1, {1.0}), (2, {2.0})]
        field.follow(worker, 2)
    field.trainer.resume()
    assert field.trainer.answer().ok
    for worker in workers:
        field.followed(worker)
        assert (2, {2.0}) == worker.do(holds)


def an_adapter_that_raises_loses_its_link_with_the_reason(field: Field, where: str) -> None:
    """Its fault, at either end, costs that worker, and nobody else; a new link brings it back."""
    for worker in (field.victim, field.other):
        field.enlist(worker)
    field.command(field.trainer)
    all_sent(field, 1)
    (field.victim if where == "worker" else field.trainer).do(break_reading, where)
    field.follow(field.other, 2)
    if field.receives:
        field.victim.tell(follow_until_gone)
    with within(SOON):
        report = field.trainer.do(send, 2.0)

    assert (LOST, APPLIED) == kinds(report)
    assert "a fault of the adapter's own" in report[0].reason
    field.followed(field.other)
    if field.receives:
        assert ("a fault of the adapter's own" in field.victim.answer()) or where == "trainer"
    assert field.victim.do(holds) in [(1, {1.0}), (2, {2.0})]
