"""Sequential sends, for callers that have no method to wait for an update or to abandon it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from weightsync.clock import Deadline, Timeout
from weightsync.engine.sender import WeightSender
from weightsync.options import OnFailure
from weightsync.protocol._tables import State
from weightsync.protocol.report import SyncReport

logger = logging.getLogger("weightsync")


class SequentialSends:
    """Sends by one sender, one after another.

    A send first settles the previous update: it abandons the update if its failure was already reported, and otherwise
    waits for it.

    Args:
        sender: the sender. Nothing else waits on it or abandons its updates.
    """

    def __init__(self, sender: WeightSender) -> None:
        self._sender = sender
        self._reported = 0

    def send(
        self, weights: Any, worker_ids: Sequence[int] | None, deadline: Deadline, on_failure: OnFailure
    ) -> SyncReport:
        """Settle the previous update, then send and wait as `WeightSender.send` does.

        A failure of the previous update is logged: this one supersedes it.

        Raises:
            As `WeightSender.send`.
        """
        previous = self.settle(deadline.remaining)
        if previous is not None and previous.failed:
            logger.warning("the previous update: %s", previous.error())
        report = self._sender.send(weights, worker_ids, timeout=deadline.remaining, on_failure=OnFailure.REPORT)
        self.note(report)
        if on_failure is OnFailure.RAISE:
            report.raise_on_failure()
        return report

    def dispatch(
        self, weights: Any, worker_ids: Sequence[int] | None, deadline: Deadline, on_failure: OnFailure
    ) -> SyncReport:
        """Settle the previous update, then send as `WeightSender.send_async` does.

        Returns:
            The report so far. If the previous update did not reach every worker, `previous` is its report.

        Raises:
            SyncError: the previous update did not reach every worker. This one was dispatched anyway.
                Otherwise as `WeightSender.send_async`.
        """
        previous = self.settle(deadline.remaining)
        report = self._sender.send_async(weights, worker_ids)
        if previous is not None and previous.failed:
            if on_failure is OnFailure.RAISE:
                raise previous.error()
            logger.warning("the previous update: %s", previous.error())
            return replace(report, previous=previous)
        return report

    def settle(self, timeout: float | Timeout | None = Timeout.DEFAULT) -> SyncReport | None:
        """Wait for an outstanding update that was not reported yet, then abandon it if it is still outstanding.

        Returns:
            The report of that update; None if there was none, or its failure was reported already.

        Raises StateError: another thread is waiting for it.
        """
        if self._sender.state is not State.PENDING_ASYNC:
            return None
        if self._reported == self._sender.version:
            self.abandon()
            return None
        report = self._sender.wait_async(timeout=timeout, on_failure=OnFailure.REPORT)
        self.note(report)
        ended = self._sender.abandon() if self._sender.state is State.PENDING_ASYNC else report
        self._sender._reporter.carry(ended)
        return report

    def abandon(self) -> None:
        """Abandon the outstanding update. No caller gets its report: failures that are new in it are logged."""
        self._sender._reporter.withheld(self._sender.abandon())

    def note(self, report: SyncReport) -> None:
        """Note that this report reaches the caller."""
        self._reported = report.version or 0
