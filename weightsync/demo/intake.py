"""What comes from the workers: experience, and word of how they stand."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping

import numpy as np

from weightsync.demo.board import Board
from weightsync.demo.fleet import Fleet, Gone
from weightsync.demo.settings import BATCH_STEPS, CHUNKS_AHEAD, MAX_STALENESS, WORKER_TIMEOUT
from weightsync.demo.wire import Chunk, Collect, Failure, FromWorker, Proof, Prove, Status


class Intake:
    """Takes in all that the workers send, and lets them go on.

    Args:
        fleet: the workers.
        board: told of everything.
    """

    def __init__(self, fleet: Fleet, board: Board) -> None:
        self._fleet = fleet
        self._board = board
        self._chunks: list[Chunk] = []
        self._proofs: dict[int, Proof] = {}
        self._gone: set[int] = set()

    @property
    def gone(self) -> frozenset[int]:
        """The workers from which nothing will come any more."""
        return frozenset(self._gone)

    def begin(self) -> None:
        """Let every worker collect."""
        for index in range(self._fleet.size):
            self._fleet.tell(index, Collect(CHUNKS_AHEAD))

    def gather(self, version: Callable[[], int], until: float) -> tuple[list[Chunk], float]:
        """Wait for one batch of experience.

        Args:
            version: tells the trainer's version, against which staleness is counted.
            until: the time, on the monotonic clock, at which to give up.

        Returns:
            The chunks, and how many versions they lie behind on average. No chunks: time is up, nobody is left, or
            those who are have been silent for too long.
        """
        until = min(until, time.monotonic() + WORKER_TIMEOUT)
        while sum(chunk.steps for chunk in self._chunks) < BATCH_STEPS:
            if len(self._gone) == self._fleet.size or not self._listen(until):
                return [], 0.0
        chunks, self._chunks = self._chunks, []
        fresh = [chunk for chunk in chunks if version() - int(chunk.versions.min()) <= MAX_STALENESS]
        self._board.dropped(sum(chunk.steps for chunk in chunks) - sum(chunk.steps for chunk in fresh))
        behind = [version() - float(np.mean(chunk.versions)) for chunk in fresh]
        return fresh, sum(behind) / max(1, len(behind))

    def proofs(self, of: frozenset[int]) -> Mapping[int, Proof]:
        """Ask workers to prove what they serve, and wait for their answers until the deadline of a worker."""
        for index in of:
            self._fleet.tell(index, Prove())
        until = time.monotonic() + WORKER_TIMEOUT
        while of - self._gone - self._proofs.keys() and self._listen(until):
            pass
        return self._proofs

    def _listen(self, until: float) -> bool:
        """Take one message in. False: none came in time."""
        try:
            index, message = self._fleet.inbox.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return False
        self._take(index, message)
        return True

    def _take(self, index: int, message: FromWorker | Gone) -> None:
        match message:
            case Chunk():
                self._chunks.append(message)
                self._fleet.tell(index, Collect(1))
            case Proof():
                self._proofs[index] = message
            case Failure(reason, trace):
                self._board.note(f"worker {index} failed: {reason}\n{trace.rstrip()}")
            case Gone():
                self._gone.add(index)
            case Status():
                pass  # the board has heard it
