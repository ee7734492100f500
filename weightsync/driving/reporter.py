"""Makes the reports of one sender from what its driver knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weightsync.driving.sender import SenderDriver
from weightsync.errors import RefusedError, WorkerLostError
from weightsync.protocol.sender import Standing, ended
from weightsync.report import Outcome, OutcomeKind, SyncReport
from weightsync.timing import Stopwatch


class Reporter:
    """Makes the reports of one sender.

    Args:
        driver: the sender's driver.
    """

    def __init__(self, driver: SenderDriver) -> None:
        self._driver = driver
        self._preparing = 0.0
        self._dispatched = Stopwatch()
        self._given_up: dict[int, tuple[int, ...]] = {}

    def dispatched(self, preparing: float) -> None:
        """A version has just been dispatched, after ``preparing`` seconds of packing."""
        self._preparing = preparing
        self._dispatched = Stopwatch()

    def superseded(self, report: SyncReport) -> None:
        """The version of ``report`` was given up in favour of the next one."""
        for worker in report.of(OutcomeKind.ABANDONED):
            assert report.version is not None
            self._given_up[worker] = (*self._given_up.get(worker, ()), report.version)

    def is_over(self, version: int) -> bool:
        """Whether the version was concluded, and nobody was told yet."""
        return version in self._driver.concluded

    def concluded(self, version: int) -> SyncReport:
        """What became of a version that `is_over`; tells it once."""
        concluded = self._driver.concluded.pop(version)
        report = self._report(version, concluded.outstanding.outcomes, concluded.not_caught_up, concluded.left)
        told = report.outcomes.keys() - report.of(OutcomeKind.ABANDONED)
        self._given_up = {w: versions for w, versions in self._given_up.items() if w not in told}
        return report

    def so_far(self, owing: OutcomeKind) -> SyncReport:
        """What is known of the outstanding version; ``owing`` for those who owe. Empty if none is outstanding."""
        with self._driver.lock:
            outstanding = self._driver.data.outstanding
            if outstanding is None:
                return self.empty()
            owed = {worker: self._owing(owing, worker) for worker in outstanding.owed}
            left = self._driver.data.left
            return self._report(outstanding.version, {**outstanding.outcomes, **owed}, {}, left)

    def empty(self) -> SyncReport:
        """The report of a send to nobody."""
        incarnation = self._driver.data.incarnation
        return SyncReport(model_id=self._driver.model_id, version=None, incarnation=incarnation, outcomes={})

    def all_ended(self, error: WorkerLostError | RefusedError) -> WorkerLostError | RefusedError:
        """``error``, which refused a send since every target is lost or has refused, with the report of that."""
        roll, told = self._driver.data.roll, error.lost if isinstance(error, WorkerLostError) else error.refused
        outcomes = {worker: ended(roll[worker]) for worker in told if worker in roll}
        error.report = replace(self.empty(), outcomes=outcomes)
        return error

    def _owing(self, owing: OutcomeKind, worker: int) -> Outcome:
        if owing is OutcomeKind.PENDING:
            return Outcome(kind=owing)
        expected = self._driver.data.roll[worker].standing is Standing.EXPECTED
        return Outcome(kind=owing, reason="never connected" if expected else "connected, but has not answered")

    def _report(
        self,
        version: int,
        outcomes: Mapping[int, Outcome],
        not_caught_up: Mapping[int, Outcome],
        left: Mapping[int, str],
    ) -> SyncReport:
        packed = self._driver.packed(version)
        return SyncReport(
            model_id=self._driver.model_id,
            version=version,
            incarnation=self._driver.data.incarnation,
            outcomes=dict(sorted(outcomes.items())),
            nbytes=packed.nbytes if packed else 0,
            preparing=self._preparing,
            transferring=self._dispatched.seconds,
            applying=max((outcome.seconds for outcome in outcomes.values()), default=0.0),
            superseded={w: versions for w, versions in self._given_up.items() if w in outcomes},
            not_caught_up=not_caught_up,
            left=left,
        )
