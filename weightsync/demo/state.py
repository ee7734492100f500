"""The options of a run, its progress and its result. It does not import torch, so that the display starts at once."""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weightsync import ConfigurationError, SyncReport
from weightsync.local_workers import SchemeName

if TYPE_CHECKING:
    from weightsync import WeightSender

_MEAN_OVER = 20


class Phase(enum.Enum):
    """The phase of a run."""

    STARTING = "starting the workers"
    TRAINING = "training"
    PROVING = "proving"
    ENDED = "ended"


@dataclass(slots=True)
class WorkerState:
    """The last report of one worker. Version None: it serves none yet."""

    state: str = "starting"
    version: int | None = None
    steps: int = 0
    episodes: int = 0


@dataclass(slots=True)
class RunState:
    """The current state of a run. The trainer's thread writes it; a display reads it in another thread."""

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
    #: The return of each episode, and (steps, mean return) after each update.
    returns: list[float] = field(default_factory=list)
    curve: list[tuple[int, float]] = field(default_factory=list)
    #: Notable events, as lines to print.
    notes: list[str] = field(default_factory=list)
    _created: float = field(default_factory=time.monotonic)
    _began: float | None = None
    _ended: float | None = None

    def __post_init__(self) -> None:
        self.workers = [WorkerState() for _ in range(self.settings.workers)]

    def enter(self, phase: Phase) -> None:
        """Enter a phase."""
        if phase is Phase.TRAINING:
            self._began = time.monotonic()
        elif self._ended is None:
            self._ended = time.monotonic()
        self.phase = phase

    @property
    def age(self) -> float:
        """Seconds since the run started."""
        return time.monotonic() - self._created

    @property
    def elapsed(self) -> float:
        """Seconds of training so far."""
        if self._began is None:
            return 0.0
        return (time.monotonic() if self._ended is None else self._ended) - self._began

    @property
    def first_mean(self) -> float | None:
        """The mean return of the first 20 episodes; None if none has ended."""
        return _mean(self.returns[:_MEAN_OVER])

    @property
    def last_mean(self) -> float | None:
        """The mean return of the last 20 episodes; None if none has ended."""
        return _mean(self.returns[-_MEAN_OVER:])


def _mean(returns: Sequence[float]) -> float | None:
    return sum(returns) / len(returns) if returns else None


@dataclass(frozen=True, slots=True)
class Proof:
    """A version and the digest of its weights, of a worker's live model or of the trainer's last update."""

    version: int | None
    digest: bytes


class Verdict(enum.Enum):
    """The result for one worker."""

    PROVED = "proved"
    KILLED = "killed, and reported LOST"
    LOST = "lost"
    DIFFERS = "serves other weights"
    SILENT = "did not answer"


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """The result for one worker, the reason, and the proof that it sent (None: it sent none)."""

    index: int
    proof: Proof | None
    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run: the last version that the trainer sent, and the result for each worker."""

    state: RunState
    sent: Proof
    workers: Sequence[WorkerResult]

    def of(self, verdict: Verdict) -> list[int]:
        """The workers with this verdict."""
        return [worker.index for worker in self.workers if worker.verdict is verdict]

    def record(self) -> dict[str, Any]:
        """The result as plain data, for JSON."""
        state = self.state
        return {
            "scheme": state.settings.scheme.value,
            "updates": state.updates,
            "steps": state.steps,
            "episodes": len(state.returns),
            "mean_return": {"first": state.first_mean, "last": state.last_mean},
            "seconds": round(state.elapsed, 3),
            "sent": _proof_fields(self.sent),
            "workers": [
                {
                    "worker": each.index,
                    "verdict": each.verdict.name,
                    "reason": each.reason,
                    "serves": _proof_fields(each.proof),
                }
                for each in self.workers
            ],
            "failures": self.failures,
        }

    @property
    def failures(self) -> list[str]:
        """The reasons why the run is not a success; empty if it is."""
        found = [] if self.state.updates else ["the policy was not trained: too little time, or no experience"]
        if self.state.settings.kill_worker and not self.of(Verdict.KILLED):
            found.append("no worker was killed and reported LOST")
        if not self.of(Verdict.PROVED):
            found.append("no worker has proved that it serves the trainer's last weights")
        for worker in self.workers:
            if worker.verdict not in (Verdict.PROVED, Verdict.KILLED):
                reason = f" ({worker.reason})" if worker.reason else ""
                found.append(f"worker {worker.index}: {worker.verdict.value}{reason}")
        return found


def _proof_fields(proof: Proof | None) -> dict[str, Any] | None:
    return None if proof is None else {"version": proof.version, "digest": proof.digest.hex()}


def judge(
    count: int, sent: Proof, proofs: Mapping[int, Proof], lost: Mapping[int, str], killed: int | None
) -> list[WorkerResult]:
    """Compare what each worker serves with what the trainer sent last."""

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
            return Verdict.DIFFERS, "the digest of its live model differs"
        return Verdict.PROVED, ""

    return [WorkerResult(index, proofs.get(index), *verdict(index, proofs.get(index))) for index in range(count)]


#: The name under which the policy is sent.
MODEL_ID = "policy"
#: The number of environments over all workers; each worker gets an equal share, at least one.
ENVIRONMENTS = 16
#: Steps of each environment in one chunk of experience.
CHUNK_STEPS = 32
#: Seconds for the workers to start, import torch and apply their first version.
START_TIMEOUT = 60.0
#: Seconds for a worker to apply a version, to send experience, or to prove its version.
WORKER_TIMEOUT = 15.0


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

    Raises ConfigurationError: there are no workers, no time, or a negative seed, or no worker would survive.
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
        if not self.seconds > 0:
            raise ConfigurationError(f"the demo needs more than 0 seconds, not {self.seconds:g}.")
        if self.seed < 0:
            raise ConfigurationError(f"the demo's seed must be 0 or more, not {self.seed}.")
        if self.kill_worker and self.workers == 1:
            raise ConfigurationError("--kill-worker needs at least 2 workers: one to kill and one to continue with.")
