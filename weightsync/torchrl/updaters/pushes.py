"""The pushes of one updater, one at a time, with the state machines of a sender."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

from msgspec.structs import replace

from weightsync.clock import Deadline
from weightsync.engine.sender import WeightSender
from weightsync.engine.sequential import SequentialSends
from weightsync.errors import StateError
from weightsync.protocol._tables import State
from weightsync.protocol.report import OutcomeKind, SyncReport
from weightsync.protocol.sender import LinkState
from weightsync.torchrl.updaters.calls import Begin, Call, Calls, CallServices, WorkerId
from weightsync.transports.process import forget_after_fork

#: What the caller of an updater can do after a failure.
ADVICE: Final = {
    OutcomeKind.TIMED_OUT: "The next push abandons this one and calls those workers again.",
    OutcomeKind.LOST: "It is unknown what lost workers serve. The next push calls them again.",
    OutcomeKind.REFUSED: (
        "A worker that was not called, or whose call raised LayoutError, serves what it served before. After any other "
        "error it is unknown which weights that worker serves."
    ),
}


class Pushes:
    """Makes the calls of each push and waits until they end. A forked child starts afresh."""

    def __init__(self) -> None:
        self._start_over()
        forget_after_fork(self)

    def _start_over(self) -> None:
        self._turn = threading.Lock()
        self._calls = Calls()
        self._sender = WeightSender(CallServices(self._calls))
        self._sends = SequentialSends(self._sender)
        self._numbers: dict[WorkerId, int] = {}
        self._replaced: set[WorkerId] = set()

    def forget(self) -> None:
        """In a forked child: start afresh."""
        self._start_over()

    @property
    def state(self) -> State:
        """The sender's state."""
        return self._sender.state

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Prevent other pushes inside, also by this push's own hooks. Raises StateError: a push is in progress."""
        turn = self._turn
        if not turn.acquire(blocking=False):
            hint = "One push at a time: neither another thread nor a hook may start one before it has returned."
            raise StateError("updater", "pushing", "push_weights", ["nothing until that push has returned"], hint)
        try:
            yield
        finally:
            turn.release()

    def empty(self) -> SyncReport:
        """The report of a push to no worker."""
        sender = self._sender
        return SyncReport(model_id=sender.model_id, version=None, incarnation=sender.incarnation, outcomes={})

    def replaced(self, worker: WorkerId) -> None:
        """Another worker has this id from now on, or none: the next push waits for no call of the former one."""
        self._replaced.add(worker)

    def push(self, workers: Sequence[WorkerId], begin: Begin, deadline: Deadline) -> SyncReport:
        """Make each worker's call, one after the other, and wait until all have ended.

        If one of them raises, even an interrupt, the other calls are made before the exception is raised.

        Returns:
            Each worker's outcome, failed or not.

        Raises SyncError: the failures of the previous push, if they were not reported yet.
        """
        self._clear_outstanding(deadline)
        calls: list[Call] = []
        self._calls.take = calls.append
        try:
            targets = [self._number(worker) for worker in workers]
            version = self._sender.send_async(worker_ids=targets).version
            # Calls that must wait for a worker's earlier calls are made later, during the wait below.
            self._calls.take = functools.partial(_make_if_current, begin, version)
            self._make_all(calls, begin)
            return self._wait_for_report(deadline)
        finally:
            self._calls.take = Call.superseded

    def _clear_outstanding(self, deadline: Deadline) -> None:
        """End an update that a timeout or an interrupt left outstanding; forget lost and replaced workers' links."""
        self._sender.progress()
        before = self._sends.settle(deadline.remaining)
        if before is not None:
            self._with_worker_ids(before).raise_on_failure(ADVICE)
        entries = self._sender.workers
        for worker, number in tuple(self._numbers.items()):
            entry = entries.get(number)
            if entry is None:  # it could not be added
                del self._numbers[worker]
            elif worker in self._replaced or entry.link_state is LinkState.LOST:
                self._sender.remove_worker(number)
                del self._numbers[worker]
        self._replaced.clear()

    def _number(self, worker: WorkerId) -> int:
        if worker not in self._numbers:
            taken = self._sender.workers
            free = next(number for number in range(len(taken) + 1) if number not in taken)
            self._numbers[worker] = worker if isinstance(worker, int) and worker not in taken else free
            self._sender.add_worker(self._numbers[worker], worker)
        return self._numbers[worker]

    def _make_all(self, calls: Sequence[Call], begin: Begin) -> None:
        interrupts: list[BaseException] = []
        for call in calls:
            try:
                call.make(begin)
            except BaseException as error:  # noqa: BLE001 - raised below, after the other calls
                interrupts.append(error)
        if interrupts:
            self._sends.abandon()
            raise interrupts[0]

    def _wait_for_report(self, deadline: Deadline) -> SyncReport:
        report = self._sender.wait_async(timeout=deadline.remaining, on_failure="report")
        self._sends.note(report)
        return self._with_worker_ids(report)

    def _with_worker_ids(self, report: SyncReport) -> SyncReport:
        """A report whose outcomes have the workers' own ids."""
        named: dict[Any, WorkerId] = {number: worker for worker, number in self._numbers.items()}
        return replace(report, outcomes={key_of(named[number]): outcome for number, outcome in report.outcomes.items()})


def key_of(worker: WorkerId) -> Any:
    """A worker's key in reports: its id; 0 for the one without an id."""
    return 0 if worker is None else worker


def _make_if_current(begin: Begin, version: int | None, call: Call) -> None:
    if call.update.version == version:
        call.make(begin)
    else:
        call.superseded()
