"""The result of a send: a `SyncReport` with one `Outcome` per worker."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct, field
from msgspec.structs import replace

from weightsync.errors import AckTimeoutError, RefusedError, SyncError, WorkerLostError, warn_renamed
from weightsync.options import WireDtype


class OutcomeKind(enum.Enum):
    """The result of an update for one worker."""

    #: The worker applied the version completely.
    APPLIED = "applied"
    #: The worker refused the version and still serves its previous one.
    REFUSED = "refused"
    #: No answer before the deadline. The worker may have applied the version, or may still apply it.
    TIMED_OUT = "timed_out"
    #: The link was lost. The worker may have applied the version, or may still apply it.
    LOST = "lost"
    #: The caller gave up the update. The worker may have applied the version, or may still apply it.
    ABANDONED = "abandoned"
    #: Dispatched but not answered yet (in the report that `send_async` returns).
    PENDING = "pending"
    #: Not dispatched, because it was not the worker's turn (updaters with an interval).
    SKIPPED = "skipped"


class Evidence(enum.Enum):
    """How an outcome is known."""

    #: The worker's own answer, which carries the version and its digest.
    ANSWER = "answer"
    #: A call returned, or the user acked. This is weaker than an answer.
    CALL = "call"
    #: There was no answer.
    NONE = "none"


FINE = frozenset({OutcomeKind.APPLIED, OutcomeKind.PENDING, OutcomeKind.SKIPPED})


class Outcome(Struct, frozen=True, kw_only=True):
    """The result of one version on one worker."""

    kind: OutcomeKind
    #: Why, in words; empty for APPLIED and PENDING.
    reason: str = ""
    #: The worker's own traceback, if it raised.
    remote_traceback: str = ""
    evidence: Evidence = Evidence.NONE
    #: The highest incarnation that the worker has accepted, if a refusal named it; else 0. If it is above that of the
    #: report, a newer sender took the worker over.
    fence: int = 0
    #: Seconds the worker spent applying.
    apply_s: float = 0.0
    #: The report on the worker's own workers, if it passes weights on to any; else None.
    nested: SyncReport | None = None

    def __str__(self) -> str:
        text = self.kind.name
        if self.reason:
            text += f" ({self.reason})"
        if self.remote_traceback:
            # The traceback's last line repeats the reason.
            text += "\n" + self.remote_traceback.rstrip().removesuffix(f": {self.reason}")
        if self.nested is not None and not self.nested.ok:
            text += f", but not every worker it forwards to applied it: {self.nested}"
        return text

    def to_dict(self) -> dict[str, Any]:
        """The outcome in plain types: the names of its fields, enums by their values, `nested` as a report's dict."""
        return {
            "kind": self.kind.value,
            "reason": self.reason,
            "remote_traceback": self.remote_traceback,
            "evidence": self.evidence.value,
            "fence": self.fence,
            "apply_s": self.apply_s,
            "nested": None if self.nested is None else self.nested.to_dict(),
        }

    @property
    def seconds(self) -> float:
        """The former name of `apply_s`."""
        warn_renamed("Outcome.seconds", "apply_s")
        return self.apply_s

    @property
    def fine(self) -> bool:
        """Whether nothing failed, neither on this worker nor on those that it passes weights on to."""
        return self.kind in FINE and (self.nested is None or not self.nested.failed)


class SyncReport(Struct, frozen=True, kw_only=True):
    """The result of one send, with one outcome per worker.

    It reads like a mapping to the outcomes: ``report[0].kind``, ``for worker_id in report``.
    """

    model_id: str
    #: The version sent. None: nothing was sent, since there were no workers, every target was lost or had refused
    #: before, or the deadline passed before the update that ``on_pending="wait"`` waited for had its answers.
    version: int | None
    incarnation: int
    outcomes: Mapping[int, Outcome]
    #: Size of the weights in bytes, as they were sent.
    nbytes: int = 0
    #: What floating tensors were cast to before they were sent, if theirs was wider; None if nothing was cast.
    wire_dtype: WireDtype | None = None
    #: With ``delta=True``: maps worker ids to the bytes of payload sent to that worker. Fewer than `nbytes`: it was
    #: sent a delta. More: it did not hold the base of the delta, and was sent the whole weights as well.
    payload_nbytes: Mapping[int, int] = field(default_factory=dict)
    #: Seconds spent extracting and packing.
    pack_s: float = 0.0
    #: Seconds from the dispatch until every target was connected, or until this report if one still is not.
    connect_s: float = 0.0
    #: Seconds from the dispatch to this report, without `connect_s`.
    transfer_s: float = 0.0
    #: The longest time, in seconds, that any worker spent applying.
    apply_s: float = 0.0
    #: Maps worker ids to the versions that were abandoned in favour of this one (``on_pending="supersede"``): for each
    #: worker the newest 100.
    superseded: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    #: Workers that joined late and refused the version sent to them, since the last report: maps their ids to why.
    not_caught_up: Mapping[int, Outcome] = field(default_factory=dict)
    #: The report of the update that had to finish before this one was sent (``on_pending="wait"``). None: there was
    #: no such update, or an earlier report of this version has included it.
    previous: SyncReport | None = None
    #: Workers that closed their receiver since the last report, and why. They are no longer among the workers.
    left: Mapping[int, str] = field(default_factory=dict)
    #: Workers whose link had ended before: maps their ids to the version whose report first said so (0: that report had
    #: no version). `str()` names that report instead of repeating the traceback, which `outcomes` still has.
    reported_before: Mapping[int, int] = field(default_factory=dict)
    #: After `send_sharded`, on every rank: the rank that sent. None: not a sharded send.
    sent_by_rank: int | None = None

    def __str__(self) -> str:
        sent = f"version {self.version} of" if self.version else "nothing sent of"
        items = _worker_lines(self._short(self.outcomes), FINE)
        items += [f"{text} (did not catch up)" for text in _worker_lines(self.not_caught_up)]
        # A worker that answered and then left is listed once, with its answer.
        gone = {worker: goodbye for worker, goodbye in self.left.items() if worker not in self.outcomes}
        items += [f"worker {worker} left: {goodbye}" for worker, goodbye in gone.items()]
        took = self.pack_s + self.transfer_s
        cast = f" ({self.wire_dtype.value})" if self.wire_dtype else ""
        if self.payload_nbytes:
            cast += f", {sum(self.payload_nbytes.values())} sent to {len(self.payload_nbytes)} workers,"
        text = f"{sent} {self.model_id!r} [{', '.join(items)}] {self.nbytes} bytes{cast} in {took:.3f} s"
        if self.connect_s:
            text += f", after waiting {self.connect_s:.3f} s for workers to connect"
        if self.sent_by_rank is not None:
            text += f", sent by rank {self.sent_by_rank}"
        return text if self.previous is None else f"{text}; before it: {self.previous}"

    def __getitem__(self, worker_id: int) -> Outcome:
        return self.outcomes[worker_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self.outcomes)

    def __len__(self) -> int:
        return len(self.outcomes)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data that `json.dumps` accepts. These keys are stable; more may be added.

        Returns:
            ``model_id``, ``version``, ``incarnation``, ``ok``, ``nbytes``, ``wire_dtype``, ``pack_s``, ``connect_s``,
            ``transfer_s``, ``apply_s``, ``outcomes``, ``superseded``, ``not_caught_up``, ``left``, ``previous``,
            ``sent_by_rank``, ``payload_nbytes`` and ``reported_before``, as the attributes of these names. Worker ids
            are keys, in decimal; enums are given by their values.
        """
        return {
            "model_id": self.model_id,
            "version": self.version,
            "incarnation": self.incarnation,
            "ok": self.ok,
            "nbytes": self.nbytes,
            "wire_dtype": None if self.wire_dtype is None else self.wire_dtype.value,
            "pack_s": self.pack_s,
            "connect_s": self.connect_s,
            "transfer_s": self.transfer_s,
            "apply_s": self.apply_s,
            "outcomes": {str(worker): outcome.to_dict() for worker, outcome in self.outcomes.items()},
            "superseded": {str(worker): list(versions) for worker, versions in self.superseded.items()},
            "not_caught_up": {str(worker): outcome.to_dict() for worker, outcome in self.not_caught_up.items()},
            "left": {str(worker): reason for worker, reason in self.left.items()},
            "previous": None if self.previous is None else self.previous.to_dict(),
            "sent_by_rank": self.sent_by_rank,
            "payload_nbytes": {str(worker): nbytes for worker, nbytes in self.payload_nbytes.items()},
            "reported_before": {str(worker): version for worker, version in self.reported_before.items()},
        }

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
        for outcome in self.outcomes.values():
            if outcome.kind is not OutcomeKind.APPLIED or not (outcome.nested is None or outcome.nested.ok):
                return False
        return True

    @property
    def failed(self) -> tuple[int, ...]:
        """The ids of the workers that did not apply the version, or may not have."""
        return tuple(worker for worker, outcome in self.outcomes.items() if not outcome.fine)

    def raise_on_failure(self, advice: Mapping[OutcomeKind, str] | None = None) -> None:
        """Raise if any worker failed, in this update or in the `previous` one.

        Args:
            advice: as for `error`.

        Raises:
            AckTimeoutError: all failures are TIMED_OUT; the update can still be waited for.
            WorkerLostError: all failures are LOST.
            RefusedError: all failures are REFUSED.
            SyncError: the failures are of several kinds, or ABANDONED.
        """
        if self.failed or (self.previous is not None and any(report.failed for report in self._history())):
            raise self.error(advice)

    def raise_for_previous(self) -> None:
        """Raise if any worker failed in an update before this one.

        Raises:
            SyncError: as for `raise_on_failure`.
        """
        if any(report.failed for report in self._history()[1:]):
            raise self.error()

    def error(self, advice: Mapping[OutcomeKind, str] | None = None) -> SyncError:
        """Build the exception for the failures of this report and of the `previous` one.

        Args:
            advice: what to do next about each kind of failure; None: the advice for callers of a sender.
        """
        failures: dict[int, Outcome] = {}
        for report in reversed(self._history()):
            failures |= report._failures()
        kinds = {outcome.kind for report in self._history() for outcome in report._failures().values()}
        message = self._message(kinds, advice)
        reasons = {worker: outcome.reason for worker, outcome in failures.items()}
        if kinds == {OutcomeKind.TIMED_OUT}:
            return AckTimeoutError(message, self, tuple(failures))
        if kinds == {OutcomeKind.LOST}:
            fence = max(outcome.fence for outcome in failures.values())
            return WorkerLostError(message, self, reasons, fence or None)
        if kinds == {OutcomeKind.REFUSED}:
            full = {w: f"{o.reason}\n{o.remote_traceback}".strip() for w, o in failures.items()}
            return RefusedError(message, self, full)
        return SyncError(message, self)

    def _history(self) -> tuple[SyncReport, ...]:
        """This report and those of the updates before it, newest first."""
        return (self,) if self.previous is None else (self, *self.previous._history())

    def _failures(self) -> dict[int, Outcome]:
        return {worker: self.outcomes[worker] for worker in self.failed}

    def _message(self, kinds: set[OutcomeKind], advice: Mapping[OutcomeKind, str] | None) -> str:
        given = ADVICE if advice is None else advice
        steps = {kind: given[kind] for kind in OutcomeKind if kind in kinds and kind in given}
        if advice is None and OutcomeKind.LOST in steps:
            steps[OutcomeKind.LOST] = self._advice_for_lost(steps[OutcomeKind.LOST])
        return "\n".join([*self._lines(), *steps.values()])

    def _advice_for_lost(self, usual: str) -> str:
        fences, said_goodbye = [], False
        for report in self._history():
            for worker, outcome in report._failures().items():
                if outcome.kind is OutcomeKind.LOST and worker in report.left:
                    said_goodbye = True
                elif outcome.kind is OutcomeKind.LOST:
                    fences.append(outcome.fence)
        advice = [advice_for_lost(usual, fences)] if fences else []
        return "\n".join([*advice, *([_LEFT] if said_goodbye else [])])

    def _lines(self) -> list[str]:
        """The failures of this update and of those before it."""
        lines = [line for report in self._history() for line in report._own_lines()]
        if self.failed:
            return lines
        nothing = f"there was no worker to send {self.model_id!r} to"
        sent = f"version {self.version} of {self.model_id!r} was sent" if self.version else nothing
        return [f"{sent}, but an earlier update did not reach every worker:", *lines]

    def _own_lines(self) -> list[str]:
        failures = self._failures()
        if not failures:
            return []
        reached = f"version {self.version} of {self.model_id!r} did not reach {len(failures)} of {len(self)} workers:"
        head = f"nothing was sent of {self.model_id!r}:" if self.version is None else reached
        return [head, *(f"  {line}" for line in _worker_lines(self._short(failures)))]

    def _short(self, outcomes: Mapping[int, Outcome]) -> Mapping[int, Outcome]:
        """The outcomes for a text, without the tracebacks that are in an earlier report."""
        return {w: _short(o, self.reported_before[w]) if w in self.reported_before else o for w, o in outcomes.items()}


def _short(outcome: Outcome, before: int) -> Outcome:
    earlier = f"the report of version {before}" if before else "an earlier report"
    return replace(outcome, reason=f"{outcome.reason}; its traceback is in {earlier}", remote_traceback="")


def _worker_lines(outcomes: Mapping[int, Outcome], apart: Collection[OutcomeKind] = ()) -> list[str]:
    """One line per outcome. Workers with the same outcome share a line."""
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
    ranges = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"worker {ranges}" if len(workers) == 1 else f"workers {ranges}"


def advice_for_lost(usual: str, fences: Sequence[int]) -> str:
    """What to do next about lost workers, of which those with a fence were taken over by a newer sender."""
    fenced = (
        "A newer trainer has taken over the workers that are FENCED, or an earlier trainer's clock was ahead of this "
        "one's. To take them back, close this scheme, and pass fence=error.fence to init_on_sender() of a new one."
    )
    return "\n".join([*([] if all(fences) else [usual]), *([fenced] if any(fences) else [])])


_LEFT = "A worker that said goodbye is no longer a member: add_worker() adds it again, on a new link."

#: What the caller of a sender can do next about each kind of failure.
ADVICE: Final[Mapping[OutcomeKind, str]] = {
    OutcomeKind.TIMED_OUT: "The update is still outstanding: wait_async() waits for it again, abandon() gives it up.",
    OutcomeKind.LOST: (
        "A lost worker stays a member: add_worker() reconnects it on a new link, and remove_worker() removes it."
    ),
    OutcomeKind.REFUSED: (
        "Workers that refused serve what they served before, unless your method or loader raised halfway through. "
        "Correct what they refused, and send again; add_worker() reconnects those that refused the handshake."
    ),
    OutcomeKind.ABANDONED: "Workers may still apply an abandoned update; the next send replaces it.",
}
