"""The options of a run, its progress and its result. It does not import torch, so that the display starts at once."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weightsync import ConfigurationError, SyncReport
from weightsync.local_workers import MOST_WORKERS, SchemeName

if TYPE_CHECKING:
    from weightsync import WeightSender

#: The name under which the policy is sent.
MODEL_ID = "policy"
#: Seconds for the workers to start, import torch and apply their first version.
START_TIMEOUT = 60.0
_MEAN_OVER = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run of the demo.

    Attributes:
        scheme: the scheme that sends the weights.
        workers: the number of rollout processes.
        overlap: send with `send_async`, so that the sync overlaps with training, instead of `send`.
        seconds: the longest time to train.
        seed: the seed for weights, environments and actions. Processes race, so runs with one seed still differ.
        kill_worker: whether to kill the last worker half way.

    Raises ConfigurationError: there are no workers, or too many, or no time, a seed is out of range, or no worker would
        survive.
    """

    scheme: SchemeName = SchemeName.SHARED
    workers: int = 2
    overlap: bool = False
    seconds: float = 90.0
    seed: int = 0
    kill_worker: bool = False

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigurationError(f"the demo needs at least 1 worker, not {self.workers}.")
        if self.workers > MOST_WORKERS:
            raise ConfigurationError(f"the demo takes at most {MOST_WORKERS} workers, not {self.workers}.")
        if not self.seconds > 0:
            raise ConfigurationError(f"the demo needs more than 0 seconds, not {self.seconds:g}.")
        if not 0 <= self.seed < 2**32:  # the workers multiply it, and torch takes 64 bits
            raise ConfigurationError(f"the demo's seed must be 0 or more, and below 2**32, not {self.seed}.")
        if self.kill_worker and self.workers == 1:
            raise ConfigurationError("--kill-worker needs at least 2 workers: one to kill and one to continue with.")


class Phase(enum.Enum):
    """The phase of a run."""

    STARTING = "starting the workers"
    TRAINING = "training"
    PROVING = "proving"
    ENDED = "ended"


class Verdict(enum.Enum):
    """The result for one worker."""

    PROVED = "proved"
    KILLED = "killed, and reported LOST"
    LOST = "lost"
    DIFFERS = "serves other weights"
    SILENT = "did not answer"


@dataclass(frozen=True, slots=True)
class Proof:
    """A version and the digest of its weights, of a worker's live model or of the trainer's last update."""

    version: int | None
    digest: bytes

    def record(self) -> dict[str, Any]:
        """The proof as plain data, for JSON."""
        return {"version": self.version, "digest": self.digest.hex()}


@dataclass(slots=True)
class WorkerState:
    """What the trainer knows about one worker.

    Attributes:
        index: its number.
        state: the state of its receiver, or what became of it.
        version: the version it serves; None: none yet.
        pid: its process, once it runs.
        killed: whether it was killed on request.
        lost: why a report called it LOST; empty: none did.
        failed: why it failed; empty: it did not.
        proof: what it said in the end; None: nothing.
    """

    index: int
    state: str = "starting"
    version: int | None = None
    steps: int = 0
    episodes: int = 0
    pid: int | None = None
    killed: bool = False
    lost: str = ""
    failed: str = ""
    proof: Proof | None = None

    def judge(self, sent: Proof) -> tuple[Verdict, str]:
        """Compare what it serves with what the trainer sent last; returns the verdict and its reason."""
        if self.lost or self.failed:
            return Verdict.KILLED if self.killed and self.lost else Verdict.LOST, self.lost or self.failed
        if self.proof is None:
            return Verdict.SILENT, ""
        if not sent.digest:
            return Verdict.DIFFERS, "the trainer has no digest to compare with"
        if self.proof.version != sent.version:
            return Verdict.DIFFERS, f"version {self.proof.version} instead of {sent.version}"
        if self.proof.digest != sent.digest:
            return Verdict.DIFFERS, "the digest of its live model differs"
        return Verdict.PROVED, ""


@dataclass(slots=True)
class RunState:
    """A run: its progress, and at the end its result. The trainer's thread writes it; a display reads it in another."""

    settings: Settings
    phase: Phase = Phase.STARTING
    sender: WeightSender | None = None
    workers: list[WorkerState] = field(init=False)
    updates: int = 0
    #: Steps of experience that the policy has learned from, and steps that were dropped as too old.
    steps: int = 0
    dropped: int = 0
    #: How many versions old the last batch of experience was, on average.
    staleness: float = 0.0
    #: The number of syncs, the report of the last one, and the bytes that workers have applied.
    syncs: int = 0
    report: SyncReport | None = None
    applied_bytes: int = 0
    #: The return of each episode.
    returns: list[float] = field(default_factory=list)
    #: Notable events, as lines to print.
    notes: list[str] = field(default_factory=list)
    #: The last version that the trainer sent, once each worker has had its chance to prove that it serves it.
    sent: Proof = Proof(None, b"")
    _since: float = field(default_factory=time.monotonic)
    _until: float | None = None

    def __post_init__(self) -> None:
        self.workers = [WorkerState(index) for index in range(self.settings.workers)]

    def enter(self, phase: Phase) -> None:
        """Enter a phase."""
        if phase is Phase.TRAINING:
            self._since = time.monotonic()
        elif self._until is None:
            self._until = time.monotonic()
        self.phase = phase

    @property
    def elapsed(self) -> float:
        """Seconds since the run started, and once it trains, seconds of training."""
        return (time.monotonic() if self._until is None else self._until) - self._since

    @property
    def first_mean(self) -> float | None:
        """The mean return of the first 20 episodes; None if none has ended."""
        return _mean(self.returns[:_MEAN_OVER])

    @property
    def last_mean(self) -> float | None:
        """The mean return of the last 20 episodes; None if none has ended."""
        return _mean(self.returns[-_MEAN_OVER:])

    @property
    def verdicts(self) -> list[tuple[WorkerState, Verdict, str]]:
        """Each worker's result, and its reason."""
        return [(worker, *worker.judge(self.sent)) for worker in self.workers]

    def of(self, verdict: Verdict) -> list[int]:
        """The workers with this verdict."""
        return [worker.index for worker, given, _ in self.verdicts if given is verdict]

    @property
    def failures(self) -> list[str]:
        """The reasons why the run is not a success; empty if it is."""
        found = [] if self.updates else ["the policy was not trained: too little time, or no experience"]
        if self.settings.kill_worker and not self.of(Verdict.KILLED):
            found.append("no worker was killed and reported LOST")
        if not self.of(Verdict.PROVED):
            found.append("no worker has proved that it serves the trainer's last weights")
        for worker, verdict, reason in self.verdicts:
            if verdict not in (Verdict.PROVED, Verdict.KILLED):
                found.append(f"worker {worker.index}: {verdict.value}" + (f" ({reason})" if reason else ""))
        return found

    def record(self) -> dict[str, Any]:
        """The result as plain data, for JSON."""
        return {
            "scheme": self.settings.scheme.value,
            "updates": self.updates,
            "steps": self.steps,
            "episodes": len(self.returns),
            "mean_return": {"first": self.first_mean, "last": self.last_mean},
            "seconds": round(self.elapsed, 3),
            "sent": self.sent.record(),
            "workers": [
                {
                    "worker": worker.index,
                    "verdict": verdict.name,
                    "reason": reason,
                    "serves": worker.proof and worker.proof.record(),
                }
                for worker, verdict, reason in self.verdicts
            ],
            "failures": self.failures,
        }


def _mean(returns: Sequence[float]) -> float | None:
    return sum(returns) / len(returns) if returns else None
