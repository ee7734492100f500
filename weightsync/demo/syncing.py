"""How the trainer's versions get to the workers, and what becomes of workers that do not take them."""

from __future__ import annotations

from collections.abc import Mapping

from weightsync import OutcomeKind, State, SyncReport, WeightSender, WorkerLostError
from weightsync.demo.board import Board
from weightsync.demo.fleet import Fleet
from weightsync.demo.policy import Policy
from weightsync.demo.settings import WORKER_TIMEOUT, SyncMode


class Sync:
    """Publishes versions of the policy.

    A worker that does not answer within its deadline is killed, so that its link is lost and nobody waits again.

    Args:
        sender: what sends.
        fleet: the workers.
        board: told of each sync and of each loss.
        mode: whether `publish` waits.
    """

    def __init__(self, sender: WeightSender, fleet: Fleet, board: Board, mode: SyncMode) -> None:
        self._sender = sender
        self._fleet = fleet
        self._board = board
        self._mode = mode
        self._lost: dict[int, str] = {}

    @property
    def lost(self) -> Mapping[int, str]:
        """The workers that a report, or the error in its place, called LOST, and why."""
        return self._lost

    @property
    def nobody_left(self) -> bool:
        """Whether no worker is left to send to: each is lost, or has left the roll."""
        return self._sender.roll.keys() <= self._lost.keys()

    def publish(self, policy: Policy) -> None:
        """Send the policy as the next version, in the run's mode."""
        if self._mode is SyncMode.BLOCKING:
            self.send(policy, WORKER_TIMEOUT)
            return
        self.settle()
        try:
            self._sender.send_async(policy, allow_empty=True)
        except WorkerLostError as error:
            self._lose(error.lost)

    def send(self, policy: Policy, timeout: float) -> None:
        """Send the policy as the next version; when this returns, everybody serves it or is known not to."""
        self.settle()
        try:
            report = self._sender.send(policy, timeout=timeout, on_failure="report", allow_empty=True)
        except WorkerLostError as error:
            self._lose(error.lost)
            return
        self._conclude(report)

    def settle(self) -> None:
        """Wait for the version that is still on its way, if one is."""
        if self._sender.state is State.PENDING_ASYNC:
            self._conclude(self._sender.wait_async(timeout=WORKER_TIMEOUT, on_failure="report"))

    def _conclude(self, report: SyncReport) -> None:
        silent = report.of(OutcomeKind.TIMED_OUT)
        self._account(report)
        if silent:
            for index in silent:
                self._board.note(f"worker {index} did not answer in time for version {report.version}: killed")
                self._fleet.kill(index)
            self._conclude(self._sender.wait_async(timeout=WORKER_TIMEOUT, on_failure="report"))

    def _account(self, report: SyncReport) -> None:
        self._lose({index: report[index].reason for index in report.of(OutcomeKind.LOST)})
        for index in report.of(OutcomeKind.REFUSED):
            self._board.note(f"report of version {report.version}: worker {index} has {report[index]}")
        self._board.synced(report, len(report.of(OutcomeKind.APPLIED)))

    def _lose(self, lost: Mapping[int, str]) -> None:
        for index, reason in lost.items():
            if index not in self._lost:
                self._lost[index] = reason
                self._board.note(f"report of version {self._sender.version}: worker {index} is LOST ({reason})")
