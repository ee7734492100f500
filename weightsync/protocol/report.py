"""What became of a send: one `Outcome` a worker, gathered in a `SyncReport`."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from weightsync.errors import AckTimeoutError, RefusedError, SyncError, WorkerLostError, warn_renamed


class OutcomeKind(enum.Enum):
    """What a report can say of one worker."""

    #: The worker serves that version, whole.
    APPLIED = "applied"
    #: The worker refused it and serves what it served.
    REFUSED = "refused"
    #: No answer by the deadline; unknown: it may have applied it, or may yet.
    TIMED_OUT = "timed_out"
    #: Its link is lost; unknown: it may have applied it, or may yet.
    LOST = "lost"
    #: The caller gave the update up first; unknown: it may have applied it, or may yet.
    ABANDONED = "abandoned"
    #: Dispatched, not yet answered (in what `send_async` returns).
    PENDING = "pending"
    #: Not dispatched: it was not its turn (updaters with an interval).
    SKIPPED = "skipped"


class Evidence(enum.Enum):
    """What an outcome rests on."""

    #: The worker's own answer, which names the version and its digest.
    ANSWER = "answer"
    #: A call that returned, or an ack sent by hand: less than an answer.
    CALL = "call"
    #: Nothing came back.
    NONE = "none"


FINE = frozenset({OutcomeKind.APPLIED, OutcomeKind.PENDING, OutcomeKind.SKIPPED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one version on one worker."""

    kind: OutcomeKind
    #: Why, in words; empty for APPLIED and PENDING.
    reason: str = ""
    #: The worker's own traceback, where it raised.
    remote_traceback: str = ""
    evidence: Evidence = Evidence.NONE
    #: The highest incarnation the worker has met, if it was lost to a newer sender; else 0.
    fence: int = 0
    #: Seconds the worker spent applying.
    seconds: float = 0.0
    #: What became of it where the worker handed it on to, its own sub-collectors; None: nowhere.
    nested: SyncReport | None = None

    def __str__(self) -> str:
        text = self.kind.name
        if self.reason:
            text += f" ({self.reason})"
        if self.remote_traceback:
            # Its last line says the reason again.
            text += "\n" + self.remote_traceback.rstrip().removesuffix(f": {self.reason}")
        if self.nested is not None and not self.nested.ok:
            text += f", but what it handed on did not reach everybody: {self.nested}"
        return text

    @property
    def fine(self) -> bool:
        """Whether nothing failed, here or where the worker handed it on to."""
        return self.kind in FINE and (self.nested is None or not self.nested.failed)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """What became of one send, worker by worker.

    Reading it like a mapping gives the outcomes: ``report[0].kind``, ``for worker_id in report``.
    """

    model_id: str
    #: The version sent; None if there was nobody to send to.
    version: int | None
    incarnation: int
    outcomes: Mapping[int, Outcome]
    #: Size of the weights as they travel, in bytes.
    nbytes: int = 0
    #: Seconds spent extracting and packing.
    pack_s: float = 0.0
    #: Seconds from the dispatch until the last of the targets that were not connected yet had connected; until this
    #: report, if one of them has not.
    connect_s: float = 0.0
    #: Seconds from the dispatch to this report, less `connect_s`.
    transfer_s: float = 0.0
    #: The longest time, in seconds, that any worker spent applying.
    apply_s: float = 0.0
    #: Worker id to the versions that were given up in favour of this one (``on_pending="supersede"``).
    superseded: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    #: Joiners that refused the version they were to catch up with, since the last report.
    not_caught_up: Mapping[int, Outcome] = field(default_factory=dict)
    #: What became of the update that was waited for before this one was sent (``on_pending="wait"``); None: there was
    #: none, or an earlier report of this version has told of it.
    previous: SyncReport | None = None
    #: Workers that closed their receiver since the last report, by id, and what they said: they are no longer members.
    left: Mapping[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        sent = f"version {self.version} of" if self.version else "nothing sent of"
        told = _each(self.outcomes, FINE)
        told += [f"{text} (did not catch up)" for text in _each(self.not_caught_up)]
        # Who has answered and then left is named by its answer; `left` has them all.
        gone = {worker: goodbye for worker, goodbye in self.left.items() if worker not in self.outcomes}
        told += [f"worker {worker} left: {goodbye}" for worker, goodbye in gone.items()]
        took = self.pack_s + self.transfer_s
        text = f"{sent} {self.model_id!r} [{', '.join(told)}] {self.nbytes} bytes in {took:.3f} s"
        if self.connect_s:
            text += f", after {self.connect_s:.3f} s of waiting for workers to connect"
        return text if self.previous is None else f"{text}; before it: {self.previous}"

    def __getitem__(self, worker_id: int) -> Outcome:
        return self.outcomes[worker_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self.outcomes)

    def __len__(self) -> int:
        return len(self.outcomes)

    def of(self, *kinds: OutcomeKind) -> tuple[int, ...]:
        """The ids of the workers whose outcome is one of ``kinds``."""
        return tuple(worker for worker, outcome in self.outcomes.items() if outcome.kind in kinds)

    @property
    def preparing(self) -> float:
        """The former name of `pack_s`."""
        warn_renamed("SyncReport.preparing", "pack_s")
        return self.pack_s

    @property
    def transferring(self) -> float:
        """The former name of `transfer_s`."""
        warn_renamed("SyncReport.transferring", "transfer_s")
        return self.transfer_s

    @property
    def applying(self) -> float:
        """The former name of `apply_s`."""
        warn_renamed("SyncReport.applying", "apply_s")
        return self.apply_s

    @property
    def ok(self) -> bool:
        """Whether every target applied the version."""
        return all(_applied(outcome) for outcome in self.outcomes.values())

    @property
    def failed(self) -> tuple[int, ...]:
        """The ids of the workers that did not apply it, or of which that is unknown."""
        return tuple(worker for worker, outcome in self.outcomes.items() if not outcome.fine)

    def raise_on_failure(self, advice: Mapping[OutcomeKind, str] | None = None) -> None:
        """Raise if any worker failed, of this update or of the `previous` one.

        Args:
            advice: as for `error`.

        Raises:
            AckTimeoutError: all failures are TIMED_OUT; the update can still be waited for.
            WorkerLostError: all failures are LOST.
            RefusedError: all failures are REFUSED.
            SyncError: failures of several kinds, or ABANDONED.
        """
        if any(report.failed for report in self._history()):
            raise self.error(advice)

    def raise_for_previous(self) -> None:
        """Raise if any worker failed of an update before this one.

        Raises:
            SyncError: as `raise_on_failure`.
        """
        if any(report.failed for report in self._history()[1:]):
            raise self.error()

    def error(self, advice: Mapping[OutcomeKind, str] | None = None) -> SyncError:
        """The exception that tells of this report's failures, and of those of the `previous` one.

        Args:
            advice: what to do next about each kind of failure; None: what a sender's caller can do.
        """
        failures: dict[int, Outcome] = {}
        for report in reversed(self._history()):
            failures |= report._failures()
        kinds = {outcome.kind for report in self._history() for outcome in report._failures().values()}
        message = self._message(kinds, _ADVICE if advice is None else advice)
        told = {worker: outcome.reason for worker, outcome in failures.items()}
        if kinds == {OutcomeKind.TIMED_OUT}:
            return AckTimeoutError(message, self, tuple(failures))
        if kinds == {OutcomeKind.LOST}:
            fence = max(outcome.fence for outcome in failures.values())
            return WorkerLostError(message, self, told, fence or None)
        if kinds == {OutcomeKind.REFUSED}:
            full = {w: f"{o.reason}\n{o.remote_traceback}".strip() for w, o in failures.items()}
            return RefusedError(message, self, full)
        return SyncError(message, self)

    def _history(self) -> tuple[SyncReport, ...]:
        """This report, and those of the updates before it, newest first."""
        return (self,) if self.previous is None else (self, *self.previous._history())

    def _failures(self) -> dict[int, Outcome]:
        return {worker: self.outcomes[worker] for worker in self.failed}

    def _message(self, kinds: set[OutcomeKind], advice: Mapping[OutcomeKind, str]) -> str:
        told = [advice[kind] for kind in OutcomeKind if kind in kinds and kind in advice]
        return "\n".join([*self._lines(), *told])

    def _lines(self) -> list[str]:
        """What failed of this update and of those before it."""
        told = [line for report in self._history() for line in report._own_lines()]
        if self.failed:
            return told
        sent = f"version {self.version} of {self.model_id!r} was sent"
        return [f"{sent}, but an update before it did not reach everybody:", *told]

    def _own_lines(self) -> list[str]:
        failures = self._failures()
        if not failures:
            return []
        reached = f"version {self.version} of {self.model_id!r} did not reach {len(failures)} of {len(self)} workers:"
        head = f"nothing was sent of {self.model_id!r}:" if self.version is None else reached
        return [head, *(f"  {line}" for line in _each(failures))]


def _each(outcomes: Mapping[int, Outcome], apart: Collection[OutcomeKind] = ()) -> list[str]:
    """What became of each worker; of workers with the very same outcome it is said once.

    Args:
        outcomes: by worker.
        apart: kinds that are short enough to be said of each worker all the same.
    """
    alike: dict[tuple[str, int | None], list[int]] = {}
    for worker, outcome in outcomes.items():
        alike.setdefault((str(outcome), worker if outcome.kind in apart else None), []).append(worker)
    return [f"{_workers(workers)}: {text}" for (text, _), workers in alike.items()]


def _workers(workers: Sequence[int]) -> str:
    """``worker 3``, or ``workers 0-7, 9``."""
    runs: list[list[int]] = []
    for worker in sorted(workers):
        if runs and worker == runs[-1][-1] + 1:
            runs[-1].append(worker)
        else:
            runs.append([worker])
    told = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"worker {told}" if len(workers) == 1 else f"workers {told}"


def _applied(outcome: Outcome) -> bool:
    return outcome.kind is OutcomeKind.APPLIED and (outcome.nested is None or outcome.nested.ok)


_ADVICE = {
    OutcomeKind.TIMED_OUT: "The update is still outstanding: wait_async() waits again, abandon() gives it up.",
    OutcomeKind.LOST: (
        "Lost workers stay on the roll: add_worker() brings one back on a new link, remove_worker() takes it off."
    ),
    OutcomeKind.REFUSED: "Workers that refused still serve what they served before.",
    OutcomeKind.ABANDONED: "An abandoned update may still be applied by its workers; the next send overtakes it.",
}
