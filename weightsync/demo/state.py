"""How a run stands, and how it ended. Imports no torch: the display must not wait for it."""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightsync import SyncReport
from weightsync.demo.settings import Settings

if TYPE_CHECKING:
    from weightsync import WeightSender

_MEAN_OVER = 20


class Phase(enum.Enum):
    """Where a run is."""

    STARTING = "starting the workers"
    TRAINING = "training"
    PROVING = "proving"
    ENDED = "ended"


@dataclass(slots=True)
class WorkerState:
    """What one worker last said. Version None: it serves none yet."""

    state: str = "starting"
    version: int | None = None
    steps: int = 0
    episodes: int = 0


@dataclass(slots=True)
class RunState:
    """A run as it is now. The trainer's thread writes it; a display reads it in another thread."""

    settings: Settings
    phase: Phase = Phase.STARTING
    sender: WeightSender | None = None
    workers: list[WorkerState] = field(init=False)
    updates: int = 0
    #: Steps of experience that the policy has learned from, and that were too old for that.
    steps: int = 0
    dropped: int = 0
    #: How many versions old the last batch of experience was, on average.
    staleness: float = 0.0
    #: How many syncs there were, the last one's report, and the bytes that workers have applied.
    syncs: int = 0
    report: SyncReport | None = None
    applied_bytes: int = 0
    #: The return of each episode, and (steps, mean return) after each update.
    returns: list[float] = field(default_factory=list)
    curve: list[tuple[int, float]] = field(default_factory=list)
    #: What happened that people want to know of.
    notes: list[str] = field(default_factory=list)
    _created: float = field(default_factory=time.monotonic)
    _began: float | None = None
    _ended: float | None = None

    def __post_init__(self) -> None:
        self.workers = [WorkerState() for _ in range(self.settings.workers)]

    def enter(self, phase: Phase) -> None:
        """Go on to a phase."""
        if phase is Phase.TRAINING:
            self._began = time.monotonic()
        elif self._ended is None:
            self._ended = time.monotonic()
        self.phase = phase

    @property
    def age(self) -> float:
        """Seconds since the run was begun."""
        return time.monotonic() - self._created

    @property
    def elapsed(self) -> float:
        """Seconds of training so far."""
        if self._began is None:
            return 0.0
        return (time.monotonic() if self._ended is None else self._ended) - self._began

    @property
    def first_mean(self) -> float | None:
        """The mean return of the first 20 episodes; None: none has ended."""
        return _mean(self.returns[:_MEAN_OVER])

    @property
    def last_mean(self) -> float | None:
        """The mean return of the last 20 episodes; None: none has ended."""
        return _mean(self.returns[-_MEAN_OVER:])


def _mean(returns: Sequence[float]) -> float | None:
    return sum(returns) / len(returns) if returns else None


@dataclass(frozen=True, slots=True)
class Proof:
    """A version and the digest of its weights: of the worker's live model, or of what the trainer sent."""

    version: int | None
    digest: bytes


class Verdict(enum.Enum):
    """What became of a worker."""

    PROVED = "proved"
    KILLED = "killed, and reported LOST"
    LOST = "lost"
    DIFFERS = "serves something else"
    SILENT = "did not answer"


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """What became of one worker, why, and the proof that it gave (None: it gave none)."""

    index: int
    proof: Proof | None
    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended: what the trainer sent last, and what became of each worker."""

    state: RunState
    sent: Proof
    workers: Sequence[WorkerResult]

    def of(self, verdict: Verdict) -> list[int]:
        """The workers with this verdict."""
        return [worker.index for worker in self.workers if worker.verdict is verdict]

    @property
    def failures(self) -> list[str]:
        """All that keeps the run from being a success; empty: it is one."""
        found = [] if self.state.updates else ["no training happened: there was too little time, or nobody to collect"]
        if self.state.settings.kill_worker and not self.of(Verdict.KILLED):
            found.append("no worker was killed and reported LOST")
        if not self.of(Verdict.PROVED):
            found.append("nobody has proved to serve the trainer's last weights")
        for worker in self.workers:
            if worker.verdict not in (Verdict.PROVED, Verdict.KILLED):
                reason = f" ({worker.reason})" if worker.reason else ""
                found.append(f"worker {worker.index}: {worker.verdict.value}{reason}")
        return found


def judge(
    count: int, sent: Proof, proofs: Mapping[int, Proof], lost: Mapping[int, str], killed: int | None
) -> list[WorkerResult]:
    """Compare what each worker serves with what the trainer sent last.

    Args:
        count: how many workers there were.
        sent: the trainer's last version and its digest.
        proofs: what workers answered.
        lost: the workers that are gone, and why.
        killed: the worker that was killed as asked, and that a report called LOST.
    """

    def verdict(index: int, proof: Proof | None) -> tuple[Verdict, str]:
        if index in lost:
            return Verdict.KILLED if index == killed else Verdict.LOST, lost[index]
        if proof is None:
            return Verdict.SILENT, ""
        if not sent.digest:
            return Verdict.DIFFERS, "the trainer has no digest to compare with"
        if proof.version != sent.version:
            return Verdict.DIFFERS, f"version {proof.version} instead of {sent.version}"
        if proof.digest != sent.digest:
            return Verdict.DIFFERS, "the digest of its live model is another"
        return Verdict.PROVED, ""

    return [WorkerResult(index, proofs.get(index), *verdict(index, proofs.get(index))) for index in range(count)]
