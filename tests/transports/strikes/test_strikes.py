"""SIGKILL and SIGSTOP of worker and trainer at each point of a send, over each transport (G10).

The report has a typed outcome by the deadline, no weights are torn, and the other workers are served. The leak check
of tests/conftest.py finds no leftovers.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable
from typing import Any

import pytest
from fleet import segments, serve_until_gone
from fleets import APPLIED, LOST, MARKS, TIMED_OUT, Fleet, Wanted, kinds
from striking import (
    SHORT,
    STRUCK_FROM_OUTSIDE,
    Signal,
    Strike,
    TrainerPoint,
    WorkerPoint,
    abandon,
    arm_sender,
    break_reading,
    close,
    follow_anew,
    gone_or_stopped,
    holds,
    incarnation,
    look,
    refill,
    send,
    send_async,
    state,
    wait_async,
)

from weightsync import AckTimeoutError, State, SyncReport, WorkerLostError

#: All points over one kind of pipe, and over the other kinds the points at which they differ.
OVER_PIPES = {
    "pipe": list(WorkerPoint),
    "inline": [WorkerPoint.AHEAD, WorkerPoint.PAYLOAD, WorkerPoint.APPLIED],
    "shared": [WorkerPoint.PAYLOAD, WorkerPoint.APPLIED, WorkerPoint.ANSWERED],
}
ELSEWHERE = ("ray", "rpc", "store", "fanout")
WORKER = {**OVER_PIPES, **dict.fromkeys(ELSEWHERE, tuple(WorkerPoint))}
TRAINER = dict.fromkeys(ELSEWHERE, tuple(TrainerPoint))
STOPPED_TRAINER = dict.fromkeys(ELSEWHERE, (TrainerPoint.DISPATCH, TrainerPoint.PAYLOAD, TrainerPoint.ANSWERED))
ENDS = dict.fromkeys(ELSEWHERE, ("worker", "trainer"))
CLOSED = dict.fromkeys((*OVER_PIPES, "store", "fanout"), (WorkerPoint.PAYLOAD,))
#: The cases with a signal from outside, or over other transports than pipes, that run in `make test`; the others run in
#: `make verify`. tests/unit/schemes/test_sending.py, too, sends signals from outside to workers over pipes.
KILLED_DAILY = {
    ("ray", WorkerPoint.OUTSTANDING),
    ("rpc", WorkerPoint.AHEAD),
    ("rpc", WorkerPoint.PAYLOAD),
    ("store", WorkerPoint.IDLE),
    ("store", WorkerPoint.OUTSTANDING),
    ("fanout", WorkerPoint.PAYLOAD),
}
STOPPED_DAILY = {("ray", WorkerPoint.IDLE)}
TRAINER_DAILY = {("rpc", TrainerPoint.IDLE), ("store", TrainerPoint.IDLE), ("store", TrainerPoint.PAYLOAD)}


def over(points: dict[str, Iterable[Any]], daily: Any = (), dies: bool = False, led: bool = False) -> Any:
    """Parametrize over the fleets, and over the points that are tested with each."""

    def marks(transport: str, at: Any) -> tuple[Any, ...]:
        everyday = (transport, at) in daily or (transport in OVER_PIPES and at not in STRUCK_FROM_OUTSIDE)
        return (*MARKS.get(transport, ()), *(() if everyday else (pytest.mark.slow,)))

    cases = [
        pytest.param(Wanted(transport, at, dies, led), at, id=f"{transport}-{at}", marks=marks(transport, at))
        for transport, some in points.items()
        for at in some
    ]
    return pytest.mark.parametrize(("fleet", "at"), cases, indirect=["fleet"])


@over(WORKER, KILLED_DAILY, dies=True)
def test_g10_a_killed_worker_is_lost_and_the_others_are_served(fleet: Fleet, at: WorkerPoint) -> None:
    """Kill a worker at each point. Later sends reach its replacement, or name the reason why there is none."""
    report = _killed_from_outside(fleet, at) if at in STRUCK_FROM_OUTSIDE else _killed(fleet, at)
    version = report.version

    if at is WorkerPoint.ANSWERED:
        assert report[0].kind in fleet.answered
    elif at is WorkerPoint.AHEAD:
        assert report[0].kind is fleet.outcome_before_handshake
    else:
        assert report[0].kind is LOST
    if report[0].kind is LOST:
        assert report[0].reason
        with pytest.raises(WorkerLostError):
            report.raise_on_failure()
    assert report[1].kind is APPLIED
    assert (version, {float(version)}) == fleet.other.do(holds)
    fleet.goes_on(version + 1)


def _killed(fleet: Fleet, at: WorkerPoint) -> SyncReport:
    strike = Strike(at, Signal.KILL, fleet.worker_payload)
    fleet.start_receiver(fleet.other)
    fleet.start_receiver(fleet.victim, strike)
    fleet.start_sender(fleet.trainer)
    if at is WorkerPoint.AHEAD and fleet.outcome_before_handshake is TIMED_OUT:
        report = fleet.send_without_the_victim(1)
        fleet.trainer.do(abandon)
        return report
    fleet.follow(fleet.other, 1)
    fleet.trainer.tell(send, 1.0)
    if at is not WorkerPoint.AHEAD:
        fleet.follow(fleet.victim, 1)
    gone_or_stopped(fleet.victim.pid)
    report = fleet.trainer.answer()
    fleet.followed(fleet.other)
    return report


def _killed_from_outside(fleet: Fleet, at: WorkerPoint) -> SyncReport:
    fleet.start()
    if at is WorkerPoint.OUTSTANDING:
        fleet.victim.stop()  # so that it cannot answer before it is killed
        fleet.trainer.do(send_async, 2.0)
    fleet.victim.kill()
    fleet.follow(fleet.other, 2)
    report: SyncReport = fleet.trainer.do(send, 2.0) if at is WorkerPoint.IDLE else fleet.trainer.do(wait_async)[0]
    fleet.followed(fleet.other)
    return report


@over(WORKER, STOPPED_DAILY)
def test_g10_a_stopped_worker_times_out_and_its_late_answer_counts(fleet: Fleet, at: WorkerPoint) -> None:
    """Stop a worker at each point, and resume it after the deadline."""
    version = _stopped(fleet, at)
    survives = at is WorkerPoint.ANSWERED and LOST not in fleet.answered
    report, took = fleet.trainer.do(wait_async, *(() if survives else (SHORT,)))

    if survives:
        assert report.ok
    elif at is not WorkerPoint.ANSWERED:
        assert (TIMED_OUT, APPLIED) == kinds(report), report
        assert took >= SHORT
        with pytest.raises(AckTimeoutError) as late:
            report.raise_on_failure()
        assert (0,) == tuple(late.value.pending)
        assert fleet.trainer.do(state) is State.PENDING_ASYNC
    fleet.trainer.do(refill, 99.0)  # a worker must get the weights as they were at the send
    fleet.victim.resume()
    if at is WorkerPoint.AHEAD:
        fleet.victim.answer()
        fleet.follow(fleet.victim, version)
    fleet.followed(fleet.victim, polling=True)
    if report.of(TIMED_OUT):
        assert fleet.trainer.do(wait_async)[0].ok
    assert (version, {float(version)}) == fleet.victim.do(holds) == fleet.other.do(holds)
    fleet.send_to_all(version + 1)


def _stopped(fleet: Fleet, at: WorkerPoint) -> int:
    """Stop the victim at a point of a send that the other worker applies. Returns the version sent."""
    version = 2 if at in STRUCK_FROM_OUTSIDE else 1
    fleet.outlast_stops()
    if at in STRUCK_FROM_OUTSIDE:
        fleet.start()
        fleet.victim.stop()
    else:
        fleet.start_receiver(fleet.other)
        fleet.start_receiver(fleet.victim, Strike(at, Signal.STOP, fleet.worker_payload))
        fleet.start_sender(fleet.trainer)
    fleet.follow(fleet.other, version)
    fleet.trainer.do(send_async, float(version))
    if at is not WorkerPoint.AHEAD:
        fleet.follow(fleet.victim, version)
    fleet.poll_until(fleet.victim.is_struck)
    fleet.followed(fleet.other, polling=True)
    return version


@over(TRAINER, TRAINER_DAILY, dies=True, led=True)
def test_g10_a_killed_trainer_leaves_untorn_weights_and_a_successor_takes_over(fleet: Fleet, at: TrainerPoint) -> None:
    """Kill the trainer at each point. The workers notice, and a new trainer takes over."""
    workers = fleet.victim, fleet.other
    for worker in workers:
        fleet.start_receiver(worker)
    _strike_trainer(fleet, at, Signal.KILL)
    known = [worker.do(incarnation) for worker in workers] if at is TrainerPoint.CONNECT else []
    if fleet.receives and at is not TrainerPoint.CONNECT:
        assert all("no sender any more" in worker.answer() for worker in workers)
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


def _strike_trainer(fleet: Fleet, at: TrainerPoint, sent: Signal) -> None:
    strike = Strike(at, sent, fleet.trainer_payload)
    fleet.start_sender(fleet.trainer, strike)
    if at is not TrainerPoint.CONNECT:
        fleet.send_to_all(1)
        if fleet.receives:
            for worker in (fleet.victim, fleet.other):
                worker.tell(serve_until_gone if sent is Signal.KILL else look)
        if at is TrainerPoint.OUTSTANDING:
            fleet.trainer.do(send_async, 2.0)
        elif at is not TrainerPoint.IDLE:
            fleet.trainer.do(arm_sender, strike)
            fleet.trainer.tell(send, 2.0)
    if at not in STRUCK_FROM_OUTSIDE:
        gone_or_stopped(fleet.trainer.pid)
    elif sent is Signal.KILL:
        fleet.trainer.kill()


@over(STOPPED_TRAINER, led=True)
def test_g10_a_stopped_trainer_blocks_no_worker_and_its_send_completes_once_resumed(
    fleet: Fleet, at: TrainerPoint
) -> None:
    """Stop the trainer at each point while its workers receive. Once it is resumed, its send reaches them."""
    fleet.outlast_stops()
    workers = fleet.victim, fleet.other
    for worker in workers:
        fleet.start_receiver(worker)
    _strike_trainer(fleet, at, Signal.STOP)
    for worker in workers:
        if fleet.receives:
            worker.answer()
        assert worker.do(holds) in [(1, {1.0}), (2, {2.0})]
        fleet.follow(worker, 2)
    fleet.trainer.resume()
    assert fleet.trainer.answer().ok
    for worker in workers:
        fleet.followed(worker)
        assert (2, {2.0}) == worker.do(holds)


@over(CLOSED, {("store", WorkerPoint.PAYLOAD)})
def test_g10_close_does_not_wait_for_a_worker_stopped_mid_payload(fleet: Fleet, at: WorkerPoint) -> None:
    """The close does not wait for the worker's answer, and the worker serves the whole update or nothing of it."""
    before = segments()
    fleet.outlast_stops()
    fleet.start_receiver(fleet.victim, Strike(at, Signal.STOP, fleet.worker_payload))
    fleet.start_receiver(fleet.other)
    fleet.start_sender(fleet.trainer)
    fleet.trainer.do(send_async, 3.0)
    for worker in (fleet.victim, fleet.other):
        fleet.follow(worker, 1)
    fleet.poll_until(fleet.victim.is_struck)
    report, _ = fleet.trainer.do(wait_async, SHORT)
    assert report[0].kind is TIMED_OUT
    fleet.trainer.do(close)
    assert fleet.victim.is_struck()

    fleet.victim.resume()
    for worker in (fleet.victim, fleet.other):
        with contextlib.suppress(ConnectionError):
            fleet.followed(worker)
        assert worker.do(holds) in [(1, {3.0}), (None, {0.0})]
    fleet.victim.kill()
    gc.collect()  # errors caught by earlier tests keep frames, and thereby buffers, alive
    assert segments() <= before


@over(ENDS)
def test_an_adapter_that_raises_loses_its_link_with_the_reason(fleet: Fleet, at: str) -> None:
    """A fault of the adapter, at either end, loses that worker alone."""
    fleet.start()
    (fleet.victim if at == "worker" else fleet.trainer).do(break_reading, at)
    fleet.follow(fleet.other, 2)
    if fleet.receives:
        fleet.victim.tell(serve_until_gone)
    report = fleet.trainer.do(send, 2.0)

    assert (LOST, APPLIED) == kinds(report)
    assert "a fault of the adapter's own" in report[0].reason
    fleet.followed(fleet.other)
    if fleet.receives:
        assert ("a fault of the adapter's own" in fleet.victim.answer()) or at == "trainer"
    assert fleet.victim.do(holds) in [(1, {1.0}), (2, {2.0})]
