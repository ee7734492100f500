"""What a display may show of a run: written by the trainer, read by any thread."""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightsync import SyncReport
from weightsync.demo.settings import MEAN_OVER, Settings
from weightsync.demo.wire import Chunk, Failure, FromWorker, Proof, Status

if TYPE_CHECKING:
    from weightsync import WeightSender


class Phase(enum.Enum):
    """Where a run is."""

    STARTING = "starting the workers"
    TRAINING = "training"
    PROVING = "proving"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker: what it last reported, and how the sender's roll has it."""

    index: int
    state: str
    #: None: none served yet.
    version: int | None
    #: How many versions it lies behind the trainer's; None: it serves none.
    staleness: int | None
    standing: str
    #: Why its link is lost; empty: it is not.
    reason: str
    steps: int
    episodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncView:
    """The syncs so far."""

    count: int = 0
    #: Seconds of the last one.
    preparing: float = 0.0
    transferring: float = 0.0
    applying: float = 0.0
    #: Size of one version in bytes.
    nbytes: int = 0
    #: Bytes that workers have taken up, over all versions.
    total_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A run at one moment."""

    settings: Settings
    phase: Phase
    #: Seconds since the run began.
    age: float
    #: Seconds of training so far.
    elapsed: float
    sender_state: str
    version: int
    workers: Sequence[WorkerView]
    sync: SyncView
    updates: int
    steps: int
    episodes: int
    #: How many versions the last batch of experience lay behind, on average.
    staleness: float
    #: Steps of experience that were too stale to learn from.
    dropped: int
    #: The mean return of the last episodes; None: none has ended yet.
    mean_return: float | None
    #: (steps, mean return), one a training update.
    curve: Sequence[tuple[int, float]]
    #: What happened last, for people.
    notes: Sequence[str]


@dataclass(slots=True)
class _Reported:
    state: str = "starting"
    version: int | None = None
    steps: int = 0
    episodes: int = 0


@dataclass(slots=True)
class _Tally:
    updates: int = 0
    steps: int = 0
    episodes: int = 0
    staleness: float = 0.0
    dropped: int = 0
    sync: SyncView = field(default_factory=SyncView)
    phase: Phase = Phase.STARTING
    began: float | None = None
    elapsed: float = 0.0


class Board:
    """Gathers what there is to show. Safe to use from several threads.

    Args:
        settings: the run's settings.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._born = time.monotonic()
        self._sender: WeightSender | None = None
        self._tally = _Tally()
        self._workers = [_Reported() for _ in range(settings.workers)]
        self._returns: deque[float] = deque(maxlen=MEAN_OVER)
        self._first_returns: list[float] = []
        self._curve: list[tuple[int, float]] = []
        self._notes: list[str] = []

    # ----------------------------------------------------------------------------------------- writing

    def enter(self, phase: Phase) -> None:
        """The run has come to a phase; the clock runs while it trains."""
        with self._lock:
            if phase is Phase.TRAINING:
                self._tally.began = time.monotonic()
            elif self._tally.began is not None:
                self._tally.elapsed, self._tally.began = self._running(), None
            self._tally.phase = phase

    def watch(self, sender: WeightSender) -> None:
        """Show this sender's state and roll from now on."""
        self._sender = sender

    def heard(self, index: int, message: FromWorker) -> None:
        """A worker has reported."""
        worker = self._workers[index]
        with self._lock:
            match message:
                case Status(state, version):
                    worker.state, worker.version = state, version
                case Chunk():
                    worker.steps += message.steps
                    worker.episodes += len(message.returns)
                    worker.version = int(message.versions[-1])
                    self._ended(message.returns)
                case Proof(version):
                    worker.version = version
                case Failure():
                    worker.state = "failed"

    def _ended(self, returns: Sequence[float]) -> None:
        self._tally.episodes += len(returns)
        self._returns.extend(returns)
        self._first_returns += returns[: MEAN_OVER - len(self._first_returns)]

    def trained(self, steps: int, staleness: float) -> None:
        """The policy was updated with so many steps of experience, so many versions old on average."""
        with self._lock:
            self._tally.updates += 1
            self._tally.steps += steps
            self._tally.staleness = staleness
            if self._returns:
                self._curve.append((self._tally.steps, self._mean()))

    def dropped(self, steps: int) -> None:
        """So many steps were too stale to learn from."""
        with self._lock:
            self._tally.dropped += steps

    def synced(self, report: SyncReport, takers: int) -> None:
        """A version was sent, and so many workers took it up."""
        with self._lock:
            before = self._tally.sync
            self._tally.sync = SyncView(
                count=before.count + 1,
                preparing=report.preparing,
                transferring=report.transferring,
                applying=report.applying,
                nbytes=report.nbytes,
                total_bytes=before.total_bytes + report.nbytes * takers,
            )

    def note(self, text: str) -> None:
        """Something happened that people want to know of."""
        with self._lock:
            self._notes.append(text)

    # ----------------------------------------------------------------------------------------- reading

    @property
    def elapsed(self) -> float:
        """Seconds of training so far."""
        with self._lock:
            return self._running()

    @property
    def updates(self) -> int:
        """How often the policy was updated."""
        return self._tally.updates

    @property
    def mean_return(self) -> float | None:
        """The mean return of the last episodes; None: too few have ended."""
        with self._lock:
            return self._mean() if len(self._returns) == MEAN_OVER else None

    @property
    def first_mean(self) -> float | None:
        """The mean return of the first episodes; None: none has ended."""
        with self._lock:
            return sum(self._first_returns) / len(self._first_returns) if self._first_returns else None

    def view(self) -> View:
        """The run as it is now."""
        with self._lock:
            tally = self._tally
            version = self._sender.version if self._sender else 0
            return View(
                settings=self._settings,
                phase=tally.phase,
                age=time.monotonic() - self._born,
                elapsed=self._running(),
                sender_state=self._sender.state.value if self._sender else "uninitialized",
                version=version,
                workers=[self._worker(index, version) for index in range(len(self._workers))],
                sync=tally.sync,
                updates=tally.updates,
                steps=tally.steps,
                episodes=tally.episodes,
                staleness=tally.staleness,
                dropped=tally.dropped,
                mean_return=self._mean() if self._returns else None,
                curve=tuple(self._curve),
                notes=tuple(self._notes),
            )

    def _worker(self, index: int, version: int) -> WorkerView:
        worker = self._workers[index]
        entry = self._sender.roll.get(index) if self._sender else None
        return WorkerView(
            index=index,
            state=worker.state,
            version=worker.version,
            staleness=None if worker.version is None else max(0, version - worker.version),
            standing=entry.standing.value if entry else "none",
            reason=entry.reason if entry else "",
            steps=worker.steps,
            episodes=worker.episodes,
        )

    def _running(self) -> float:
        return self._tally.elapsed if self._tally.began is None else time.monotonic() - self._tally.began

    def _mean(self) -> float:
        return sum(self._returns) / len(self._returns)
