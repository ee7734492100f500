"""SIGKILL and SIGSTOP of worker and trainer while a payload travels in parts, before its update (G10)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fleet import Crew, serve_until_gone
from fleet_adapters import PipePartsFleet, StorePartsFleet
from fleets import APPLIED, LOST, TIMED_OUT, kinds
from striking import (
    SHORT,
    Signal,
    Strike,
    TrainerPoint,
    WorkerPoint,
    arm_payload,
    follow_anew,
    gone_or_stopped,
    holds,
    in_parts,
    incarnation,
    refill,
    send,
    send_async,
    wait_async,
)

from weightsync.engine import parts


@pytest.fixture
def over_store(crew: Crew, store: object) -> Iterator[StorePartsFleet]:
    made = StorePartsFleet(crew, store.port)  # type: ignore[attr-defined] # torch has no types
    made.start()
    yield made
    made.close()


@pytest.fixture
def over_pipes(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> Iterator[PipePartsFleet]:
    for name in ("LEAST_PART", "LEAST_NBYTES", "LEAST_IF_BUSY"):
        monkeypatch.setattr(parts, name, getattr(parts, name))  # monkeypatch restores what `in_parts` sets
    in_parts(None)
    made = PipePartsFleet(crew)
    made.start()
    yield made
    made.close()


@pytest.fixture(params=["over_pipes", pytest.param("over_store", marks=pytest.mark.gloo)])
def fleet(request: pytest.FixtureRequest) -> PipePartsFleet | StorePartsFleet:
    """A fleet whose workers serve version 3 and whose next payload travels in parts."""
    made: PipePartsFleet | StorePartsFleet = request.getfixturevalue(request.param)
    return made


def strike_worker(fleet: PipePartsFleet | StorePartsFleet, sent: Signal) -> None:
    """Arm a strike of the victim at the third part of the next payload."""
    fleet.victim.do(arm_payload, Strike(WorkerPoint.PAYLOAD, sent, fleet.worker_payload))
    for worker in (fleet.victim, fleet.other):
        fleet.follow(worker, 4)


def test_g10_a_worker_killed_between_parts_is_lost_and_the_others_are_served(
    fleet: PipePartsFleet | StorePartsFleet,
) -> None:
    strike_worker(fleet, Signal.KILL)
    fleet.trainer.tell(send, 4.0)
    gone_or_stopped(fleet.victim.pid)

    assert (LOST, APPLIED) == kinds(fleet.trainer.answer())
    fleet.followed(fleet.other)
    assert (4, {4.0}) == fleet.other.do(holds)
    fleet.goes_on(5)


def test_g10_a_worker_stopped_between_parts_times_out_and_its_late_answer_counts(
    fleet: PipePartsFleet | StorePartsFleet,
) -> None:
    fleet.outlast_stops()
    strike_worker(fleet, Signal.STOP)
    fleet.trainer.do(send_async, 4.0)
    fleet.poll_until(fleet.victim.is_struck)
    fleet.followed(fleet.other, polling=True)
    report, _ = fleet.trainer.do(wait_async, SHORT)

    assert (TIMED_OUT, APPLIED) == kinds(report)
    fleet.trainer.do(refill, 99.0)  # a worker must get the weights as they were at the send
    fleet.victim.resume()
    fleet.followed(fleet.victim, polling=True)
    assert fleet.trainer.do(wait_async)[0].ok
    assert (4, {4.0}) == fleet.victim.do(holds) == fleet.other.do(holds)
    fleet.send_to_all(5)


@pytest.mark.gloo
def test_g10_a_trainer_killed_between_parts_leaves_untorn_weights_and_a_successor_takes_over(
    over_store: StorePartsFleet,
) -> None:
    fleet, workers = over_store, (over_store.victim, over_store.other)
    fleet.trainer.do(arm_payload, Strike(TrainerPoint.PAYLOAD, Signal.KILL, fleet.trainer_payload))
    for worker in workers:
        worker.tell(serve_until_gone)
    fleet.trainer.tell(send, 4.0)
    gone_or_stopped(fleet.trainer.pid)

    assert all("no sender any more" in worker.answer() for worker in workers)
    assert [worker.do(holds) for worker in workers] == [(3, {3.0}), (3, {3.0})]
    known = [worker.do(incarnation) for worker in workers]
    fleet.trainer = fleet.successor()
    fleet.start_sender(fleet.trainer)
    for worker, before in zip(workers, known, strict=True):
        worker.tell(follow_anew, before)
    assert fleet.trainer.do(send, 7.0).ok
    for worker in workers:
        fleet.followed(worker)
        assert (1, {7.0}) == worker.do(holds)
