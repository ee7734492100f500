"""Makes the reports of one sender from what its driver knows."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from operator import attrgetter
from typing import Final

from msgspec.structs import replace

from weightsync.clock import Stopwatch
from weightsync.engine.delta import VersionPayloads
from weightsync.engine.packer import Packed
from weightsync.engine.refusal_hints import workers_text
from weightsync.engine.sender_driver import SenderDriver
from weightsync.errors import RefusedError, WorkerLostError
from weightsync.options import WireDtype
from weightsync.protocol.report import Outcome, OutcomeKind, SyncReport
from weightsync.protocol.sender import Entry, LinkState, ended

logger = logging.getLogger("weightsync")

#: The most superseded versions that are kept for a worker, the newest ones. Each report and each line of a trace has
#: them, and a worker that answers for none but superseded versions would have ever more of them.
MOST_SUPERSEDED: Final = 100


class Reporter:
    """Makes the reports of one sender.

    Args:
        driver: the sender's driver.
    """

    def __init__(self, driver: SenderDriver) -> None:
        self._driver = driver
        self._pack_s = 0.0
        self._nbytes = 0
        self._wire_dtype: WireDtype | None = None
        #: What the workers were sent, where deltas may be sent.
        self._payloads: VersionPayloads | None = None
        self._dispatched = Stopwatch()
        #: The workers as they were then: one that comes back has another link.
        self._sent_to: Mapping[int, Entry] = {}
        #: For each worker, the newest versions that were superseded since it last had an outcome.
        self._superseded: dict[int, tuple[int, ...]] = {}
        driver.kept.append(self._superseded)
        #: A report that was not returned to a caller yet: it becomes part of the next one.
        self._previous: SyncReport | None = None
        #: For each worker whose end came with a traceback: its link, and the version of the first report with it that a
        #: caller got.
        self._reported: dict[int, tuple[int, int]] = {}
        #: The same for the newest report, which was not returned to a caller yet.
        self._unreported: dict[int, tuple[int, int]] = {}
        #: Workers that left or did not catch up, in reports that no caller got. The next reports repeat them, up to the
        #: first of a version that has ended.
        self._left: dict[int, str] = {}
        self._not_caught_up: dict[int, Outcome] = {}
        #: The newest report of an update that was outstanding.
        self._shown: SyncReport | None = None

    def delivered(self) -> None:
        """Note that a caller gets the newest report: the next one need not contain it."""
        self._previous = None
        self._reported |= self._unreported
        self._unreported = {}

    def dispatched(self, packed: Packed, since: Stopwatch) -> None:
        """Note that ``packed`` was dispatched, and when that began."""
        self._pack_s = packed.pack_s
        self._nbytes = packed.nbytes
        self._wire_dtype = packed.wire_dtype
        self._payloads = packed.payloads
        self._dispatched = since
        self._sent_to = self._driver.data.workers

    def superseded(self, report: SyncReport) -> None:
        """Note that the version of ``report`` was abandoned in favour of the next one."""
        for worker in report.of(OutcomeKind.ABANDONED):
            assert report.version is not None
            self._superseded[worker] = (*self._superseded.get(worker, ()), report.version)[-MOST_SUPERSEDED:]
        self.withheld(report)

    def withheld(self, report: SyncReport) -> None:
        """Note that no caller gets the report of an abandoned update: the next ones repeat what is new in it.

        No later report has the refusals of its version, since their workers go on: they are logged.
        """
        self._previous = report.previous
        self._reported = {worker: end for worker, end in self._reported.items() if end[1] != report.version}
        self.carry(report)
        shown = self._shown.outcomes if self._shown is not None and self._shown.version == report.version else {}
        if any(shown.get(w) != o and self._is_dropped(w, o, report) for w, o in report.outcomes.items()):
            said = replace(report, previous=None).error({})  # too late for advice: the next one is sent
            logger.warning("the previous update: %s", said)

    def _is_dropped(self, worker: int, outcome: Outcome, report: SyncReport) -> bool:
        """Whether an outcome is a failure that no later report repeats, of a worker that is still sent to."""
        if outcome.fine or outcome.kind is OutcomeKind.ABANDONED or worker in report.left:
            return False
        entry = self._driver.data.workers.get(worker)
        return entry is not None and entry.open

    def carry(self, report: SyncReport) -> None:
        """Have the next reports repeat who left or did not catch up, of a report that no caller gets."""
        self._left |= report.left
        self._not_caught_up |= report.not_caught_up

    def _with_carried(self, report: SyncReport) -> SyncReport:
        """A report with what was carried into it."""
        if not (self._left or self._not_caught_up):
            return report
        not_caught_up = {**self._not_caught_up, **report.not_caught_up}
        return replace(report, left={**self._left, **report.left}, not_caught_up=not_caught_up)

    def concluded(self, version: int) -> SyncReport:
        """The report of a version that has ended.

        It is returned once; until `delivered` is called, the next report includes it.
        """
        concluded = self._driver.concluded.pop(version)
        report = self._report(version, concluded.outstanding.outcomes, concluded.not_caught_up, concluded.left)
        if self._superseded:
            for worker in report.outcomes.keys() - report.of(OutcomeKind.ABANDONED):
                self._superseded.pop(worker, None)
        if self._left or self._not_caught_up:
            report = self._with_carried(report)
            self._left, self._not_caught_up = {}, {}
        self._previous = report
        return report

    def so_far(self, kind: OutcomeKind) -> SyncReport:
        """The outstanding version's report so far, ``kind`` for workers without an answer; empty if there is none."""
        with self._driver.lock:
            outstanding = self._driver.data.outstanding
            if outstanding is None:
                return self.empty()
            owed = {worker: self._owing(kind, worker) for worker in outstanding.owed}
            left = self._driver.data.left
            report = self._report(outstanding.version, {**outstanding.outcomes, **owed}, {}, left)
            if kind is OutcomeKind.PENDING:
                self._unreported = {}  # few callers look at it: the report of the wait says it again
            if self._left or self._not_caught_up:
                report = self._with_carried(report)
            self._shown = report
            return report

    def empty(self) -> SyncReport:
        """The report of a send to no worker."""
        return self._with_carried(self._empty_report())

    def _empty_report(self) -> SyncReport:
        return SyncReport(
            model_id=self._driver.model_id,
            version=None,
            incarnation=self._driver.data.incarnation,
            outcomes={},
            previous=self._previous,
        )

    def not_sent(self, previous: SyncReport, targets: tuple[int, ...] | None) -> SyncReport:
        """The report of an update that was not sent: the deadline passed before ``previous`` was answered."""
        before, owing = previous.version, previous.of(OutcomeKind.TIMED_OUT)
        reason = f"not sent: time was up while version {before} still awaited {workers_text(owing)}"
        chosen = self._driver.data.workers if targets is None else targets
        outcomes = {worker: Outcome(kind=OutcomeKind.TIMED_OUT, reason=reason) for worker in chosen}
        return replace(self.empty(), outcomes=outcomes, previous=previous)

    def add_report(self, error: WorkerLostError | RefusedError) -> WorkerLostError | RefusedError:
        """``error``, raised because every target is lost or has refused the handshake, with its report added."""
        workers, named = self._driver.data.workers, error.lost if isinstance(error, WorkerLostError) else error.refused
        outcomes = {worker: ended(workers[worker]) for worker in named if worker in workers}
        report = replace(self._empty_report(), outcomes=outcomes, reported_before=self._reported_before(0, outcomes))
        self.delivered()
        self._driver.reported(report)
        error.report = self._with_carried(report)
        return error

    def _owing(self, kind: OutcomeKind, worker: int) -> Outcome:
        if kind is OutcomeKind.PENDING:
            return Outcome(kind=kind)
        entry = self._driver.data.workers[worker]
        silent = self._driver.hearing.silent_for(worker)
        expected = entry.link_state is LinkState.EXPECTED
        parts = ["never connected" if expected else "connected, but has not answered"]
        if entry.served:
            parts.append(f"it last served version {entry.served}")
        elif not expected:
            parts.append("it is not known to serve a version")
        if silent is not None:
            parts.append(f"it was last heard from {silent:.1f} s ago")
        if not expected:
            parts.append(_READ[self._driver.has_read(worker)])
        remark = self._driver.remark(worker) or (_NEVER_CONNECTED_HINT if expected else "")
        return Outcome(kind=kind, reason="; ".join([*parts, remark] if remark else parts))

    def _report(
        self,
        version: int,
        outcomes: Mapping[int, Outcome],
        not_caught_up: Mapping[int, Outcome],
        left: Mapping[int, str],
    ) -> SyncReport:
        seconds, connecting = self._dispatched.seconds, self._connect_seconds(outcomes)
        superseded = self._superseded
        report = SyncReport(
            model_id=self._driver.model_id,
            version=version,
            incarnation=self._driver.data.incarnation,
            outcomes=dict(sorted(outcomes.items())),
            nbytes=self._nbytes,
            wire_dtype=self._wire_dtype,
            payload_nbytes={} if self._payloads is None else dict(self._payloads.sent),
            pack_s=self._pack_s,
            connect_s=min(connecting, seconds),
            transfer_s=max(0.0, seconds - connecting),
            apply_s=max(map(_APPLY_S, outcomes.values()), default=0.0),
            superseded={w: superseded[w] for w in outcomes if w in superseded} if superseded else {},
            not_caught_up=not_caught_up,
            previous=self._previous,
            left=left,
            reported_before=self._reported_before(version, outcomes),
        )
        self._driver.reported(report)
        return report

    def _reported_before(self, version: int, outcomes: Mapping[int, Outcome]) -> dict[int, int]:
        """Workers whose end, with its traceback, is in an earlier report. Notes those that are new in this one."""
        workers, earlier_reports = self._driver.data.workers, {}
        self._unreported = {}
        for worker, outcome in outcomes.items():
            entry = workers.get(worker)
            if entry is None or not outcome.remote_traceback or entry.open:
                continue
            link, first_version = self._reported.get(worker, (None, version))
            if link != entry.link:
                self._unreported[worker] = entry.link, version
            elif first_version != version or not version:
                earlier_reports[worker] = first_version
        return earlier_reports

    def _connect_seconds(self, outcomes: Mapping[int, Outcome]) -> float:
        """Seconds from the dispatch until all targets had connected. Those with another link by now do not count."""
        workers, hearing, longest = self._driver.data.workers, self._driver.hearing, 0.0
        first_heard, since = hearing.first, self._dispatched.started
        for worker in outcomes:
            entry = workers.get(worker)
            if entry is not None and first_heard.get(entry.link, since + 1) > since and entry.open:
                entry_at_send = self._sent_to.get(worker)
                if entry_at_send is not None and entry_at_send.link == entry.link:
                    longest = max(longest, hearing.connected_after(entry.link, self._dispatched))
        return longest


_APPLY_S = attrgetter("apply_s")
#: What a caller looks at first if a worker has never connected.
_NEVER_CONNECTED_HINT = (
    "is its process running, has it called init_on_worker() or init_on_receiver() (each worker with its own "
    "worker_idx=), and does it call receive() (which raises there as long as it finds no model)?"
)
_READ = {
    True: "it has read the update, and has not applied it yet: a step or a loader may be running",
    False: "it has not read all that was sent to it",
    None: "whether it has read the update is unknown",
}
