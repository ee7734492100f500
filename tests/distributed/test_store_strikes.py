"""kill -9 and SIGSTOP over torch.distributed (a TCPStore, and gloo pairs), of worker and trainer, at each point (G10)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import judging
import pytest
from fleet import Crew, Worker
from store_fleet import lead, meet
from striking import At, Field, Place, TrainerAt, add_worker, megabytes

from weightsync import OutcomeKind
from weightsync.transports.distributed import group

#: So that a payload of 4 MiB has a middle.
BUCKET_NBYTES = 2**20


class StoreField(Field):
    """A store hosted by the test, a trainer and two workers, all on connections of their own."""

    worker_payload = Place(group.__name__, "Group", "_receiving", time=2)
    trainer_payload = Place(group.__name__, "Group", "_sending", time=2)
    # Nobody knows that it was ever there.
    unmet = OutcomeKind.TIMED_OUT

    def __init__(self, crew: Crew, port: int) -> None:
        self._crew, self._port = crew, port
        self.trainer, self.victim, self.other = (self._start() for _ in range(3))

    def _start(self) -> Worker:
        (worker,) = self._crew.start(None)
        worker.do(small_buckets)
        return worker

    def join(self, worker: Any) -> Any:
        return meet, (self._port, 2 if worker is self.other else 1, megabytes)

    def lead(self) -> Any:
        return lead, (self._port, 2, megabytes)

    def readmit(self) -> str:
        self.victim = self._start()
        self.enlist(self.victim)
        self.trainer.do(add_worker, 0, endpoint)
        return ""

    def successor(self) -> Worker:
        return self._start()


def small_buckets(_: Any) -> None:
    group.BUCKET_NBYTES = BUCKET_NBYTES  # type: ignore[misc]


def endpoint(seat: Any) -> Any:
    return seat.kept["store"], 1


@pytest.fixture
def field(crew: Crew, store: Any) -> Iterator[StoreField]:
    return StoreField(crew, store.port)


@pytest.mark.parametrize("at", At)
def test_g10_a_killed_worker_is_lost_and_the_others_are_served(field: StoreField, at: At) -> None:
    judging.a_killed_worker_is_lost_and_the_others_are_served(field, at)


@pytest.mark.parametrize("at", At)
def test_g10_a_stopped_worker_costs_the_deadline_and_its_late_answer_counts(field: StoreField, at: At) -> None:
    judging.a_stopped_worker_costs_the_deadline_and_its_late_answer_counts(field, at)


@pytest.mark.parametrize("at", TrainerAt)
def test_g10_a_killed_trainer_leaves_whole_weights_and_room_for_the_next(field: StoreField, at: TrainerAt) -> None:
    judging.a_killed_trainer_leaves_whole_weights_and_room_for_the_next(field, at)


@pytest.mark.parametrize("at", [TrainerAt.DISPATCH, TrainerAt.PAYLOAD, TrainerAt.ANSWERED])
def test_g10_a_stopped_trainer_holds_nobody_up_and_goes_on(field: StoreField, at: TrainerAt) -> None:
    judging.a_stopped_trainer_holds_nobody_up_and_goes_on(field, at)


@pytest.mark.parametrize("where", ["worker", "trainer"])
def test_an_adapter_that_raises_loses_its_link_with_the_reason(field: StoreField, where: str) -> None:
    judging.an_adapter_that_raises_loses_its_link_with_the_reason(field, where)
