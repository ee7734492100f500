"""The sends of a group. If no worker is alive, the weights are sent when the first one has been restarted."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from weightsync.clock import Timeout
from weightsync.errors import SyncError
from weightsync.options import OnFailure, OnPending
from weightsync.protocol.report import Evidence, OutcomeKind, SyncReport
from weightsync.schemes.base import WeightSyncScheme


class _UnsentWeights(NamedTuple):
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
        self._owed: _UnsentWeights | None = None
        #: The report of the last send, if no worker was alive to receive it.
        self._empty: SyncReport | None = None

    def dispatch(self, weights: Any, pending: OnPending, timeout: float | Timeout | None) -> SyncReport:
        """Send weights as the next version. If every worker is lost, they are sent when one is restarted.

        Raises:
            SyncError: as `WeightSender.send_async`, but not for workers whose links have ended.
        """
        sender = self._scheme.get_sender()
        try:
            report = sender.send_async(weights, on_pending=pending, timeout=timeout, allow_empty=True)
        except SyncError as error:
            report = _report_of_ended(error)
        finally:
            self.version = max(sender.version, self.version)
            self._announce(self.version)  # once it is sent: from now on a worker may wait for it
        self._empty, self._owed = None, None
        if report.version is None:
            self._empty, self._owed = report, _UnsentWeights(weights) if report.outcomes else None
        return report

    def resume(self) -> None:
        """A worker was added: send the weights that no worker was alive to receive."""
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


def failed_for_running_workers(report: SyncReport, ended_workers: Collection[int] = ()) -> bool:
    """Whether an update, or an earlier one in its report, failed for workers that go on.

    A worker whose link has ended, because it was lost or it refused the handshake, has failed or finished, and the
    group sees to it.

    Args:
        report: of the update.
        ended_workers: workers that have refused it, and have ended since.
    """
    for worker in report.failed:
        outcome = report.outcomes[worker]
        ended = outcome.kind is OutcomeKind.REFUSED and (outcome.evidence is Evidence.NONE or worker in ended_workers)
        if outcome.kind is not OutcomeKind.LOST and not ended:
            return True
    return report.previous is not None and failed_for_running_workers(report.previous)


def _report_of_ended(error: SyncError) -> SyncReport:
    """The report of an error, if it failed only for workers whose links have ended.

    Raises:
        SyncError: the error.
    """
    report: SyncReport = error.report
    if failed_for_running_workers(report):
        raise error
    return report
