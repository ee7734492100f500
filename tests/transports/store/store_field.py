"""A trainer and two workers over torch.distributed, to be struck, and to be cut off."""

from __future__ import annotations

from typing import Any

from fleet import Crew, Worker
from store_fleet import lead, meet
from striking import Field, Place, add_worker, megabytes

from weightsync import OutcomeKind
from weightsync.transports.store import stream

#: So that a payload of 4 MiB has a middle.
PIECE_NBYTES = 2**20


class StoreField(Field):
    """A store hosted by the test, a trainer and two workers, all on connections of their own."""

    worker_payload = Place(stream.__name__, "Stream", "_read_piece", time=2)
    trainer_payload = Place(stream.__name__, "Stream", "_write_piece", time=2)
    # Nobody knows that it was ever there.
    unmet = OutcomeKind.TIMED_OUT

    def __init__(self, crew: Crew, port: int, victims_port: int | None = None) -> None:
        self._crew, self._port = crew, port
        #: Where the victim meets the store.
        self._victims_port = victims_port or port
        self.trainer, self.victim, self.other = (self._start() for _ in range(3))

    def _start(self) -> Worker:
        (worker,) = self._crew.start(None)
        worker.do(small_pieces)
        return worker

    def join(self, worker: Any) -> Any:
        return meet, (self._port, 2, megabytes) if worker is self.other else (self._victims_port, 1, megabytes)

    def lead(self) -> Any:
        return lead, (self._port, 2, megabytes)

    def readmit(self) -> str:
        self.victim, self._victims_port = self._start(), self._port
        self.enlist(self.victim)
        self.trainer.do(add_worker, 0, endpoint)
        return ""

    def successor(self) -> Worker:
        return self._start()


def small_pieces(_: Any) -> None:
    stream.PIECE_NBYTES = PIECE_NBYTES  # type: ignore[misc]


def endpoint(setup: Any) -> Any:
    return setup.kept["store"], 1
