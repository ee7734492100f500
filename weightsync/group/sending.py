"""What a group sends, also while none of its workers lives: then the first one that is restarted brings it about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from weightsync.clock import Timeout
from weightsync.errors import SyncError
from weightsync.options import OnFailure, OnPending
from weightsync.protocol.report import OutcomeKind, SyncReport
from weightsync.schemes.base import WeightSyncScheme


class _Owed(NamedTuple):
    """Weights that were sent while no worker was alive. None: the model's."""

    weights: Any


class Sending:
    """The sends of a group.

    Args:
        scheme: the trainer's.
        announce: told the newest version that is dispatched.
    """

    def __init__(self, scheme: WeightSyncScheme, announce: Callable[[int], None]) -> None:
        self._scheme = scheme
        self._announce = announce
        #: The newest version dispatched.
        self.version = 0
        self._owed: _Owed | None = None
        #: The report of the last send, if that was dispatched to nobody.
        self._empty: SyncReport | None = None

    def dispatch(self, weights: Any, pending: OnPending, timeout: float | Timeout | None) -> SyncReport:
        """Send weights as the next version. If every worker is lost, they are sent when one is restarted.

        Raises:
            SyncError: as `WeightSender.send_async`, but not for workers that were lost.
        """
        sender = self._scheme.get_sender()
        try:
            report = sender.send_async(weights, on_pending=pending, timeout=timeout, allow_empty=True)
        except SyncError as error:
            report = _of_the_lost(error)
        finally:
            self.version = max(sender.version, self.version)
            self._announce(self.version)  # once it is sent: from now on a worker may wait for it
        self._empty, self._owed = None, None
        if report.version is None:
            self._empty, self._owed = report, _Owed(weights) if report.outcomes else None
        return report

    def resume(self) -> None:
        """A worker was added: send what reached nobody."""
        if self._owed is not None:
            self.dispatch(self._owed.weights, OnPending.SUPERSEDE, Timeout.DEFAULT)

    def wait(self, timeout: float | Timeout | None) -> SyncReport:
        """Wait until every worker has answered the last send, or is lost.

        Raises:
            StateError: nothing is outstanding.
        """
        if self._empty is None:
            return self._scheme.get_sender().wait_async(timeout=timeout, on_failure=OnFailure.REPORT)
        report, self._empty = self._empty, None
        return report


def kinds_of_failures(report: SyncReport) -> set[OutcomeKind]:
    """The kinds of outcomes that are failures, in this update and in those before it that it reports."""
    before = set() if report.previous is None else kinds_of_failures(report.previous)
    return before | {report.outcomes[worker].kind for worker in report.failed}


def _of_the_lost(error: SyncError) -> SyncReport:
    """The report of an error, if no worker failed otherwise than by being lost: the group has seen to those.

    Raises:
        SyncError: the error.
    """
    report: SyncReport = error.report
    if kinds_of_failures(report) - {OutcomeKind.LOST}:
        raise error
    return report
