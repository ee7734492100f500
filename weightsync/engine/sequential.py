"""Sends one after another, where the caller has no verb to wait for an update or to give it up."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from weightsync.clock import Deadline, Timeout
from weightsync.engine.sender import WeightSender
from weightsync.options import OnFailure, option
from weightsync.protocol._tables import State
from weightsync.protocol.report import SyncReport

logger = logging.getLogger("weightsync")


class SequentialSends:
    """Sends by one sender that is never asked to wait or to abandon by anybody else.

    A send first abandons an update whose failure was already reported, and first waits for one that nobody was told
    about.

    Args:
        sender: whose sends these are.
    """

    def __init__(self, sender: WeightSender) -> None:
        self._sender = sender
        self._told = 0

    def send(
        self,
        weights: Any = None,
        worker_ids: int | Sequence[int] | None = None,
        *,
        timeout: float | Timeout | None = Timeout.DEFAULT,
        on_failure: OnFailure | str = OnFailure.RAISE,
    ) -> SyncReport:
        """Send and wait, as `WeightSender.send` does, after what is outstanding was settled.

        What became of the update before is logged, if it failed: this one overtakes it.

        Raises:
            As `WeightSender.send`.
        """
        deadline, failing = Deadline(timeout), option(OnFailure, on_failure)
        before = self.settle(deadline.remaining)
        if before is not None and before.failed:
            logger.warning("the update before: %s", before.error())
        report = self._sender.send(weights, worker_ids, timeout=deadline.remaining, on_failure=OnFailure.REPORT)
        self._tell(report)
        if failing is OnFailure.RAISE:
            report.raise_on_failure()
        return report

    def dispatch(
        self,
        weights: Any = None,
        worker_ids: int | Sequence[int] | None = None,
        *,
        timeout: float | Timeout | None = Timeout.DEFAULT,
        on_failure: OnFailure | str = OnFailure.RAISE,
    ) -> SyncReport:
        """Send and go on, as `WeightSender.send_async` does, after what is outstanding was settled.

        Raises:
            SyncError: the update before did not reach everybody: this one was dispatched all the same. Otherwise as
                `WeightSender.send_async`.
        """
        deadline, failing = Deadline(timeout), option(OnFailure, on_failure)
        before = self.settle(deadline.remaining)
        report = self._sender.send_async(weights, worker_ids)
        if before is not None and before.failed:
            if failing is OnFailure.RAISE:
                raise before.error()
            logger.warning("the update before: %s", before.error())
        return report

    def settle(self, timeout: float | Timeout | None = Timeout.DEFAULT) -> SyncReport | None:
        """Wait for an update that nobody was told about, then give up what is still outstanding.

        Returns:
            The report of that update, whatever is in it; None: there was none, or its failure was reported already.

        Raises:
            StateError: another thread is waiting for it.
        """
        if self._sender.state is not State.PENDING_ASYNC:
            return None
        if self._told == self._sender.version:
            self._sender.abandon()
            return None
        report = self._sender.wait_async(timeout=timeout, on_failure=OnFailure.REPORT)
        self._tell(report)
        if self._sender.state is State.PENDING_ASYNC:
            self._sender.abandon()
        return report

    def _tell(self, report: SyncReport) -> None:
        """Somebody is about to be told."""
        self._told = report.version or 0
