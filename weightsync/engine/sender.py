"""`WeightSender`: sends the weights of one model to its workers, and says what became of them."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from weightsync.clock import Deadline, Stopwatch, Timeout
from weightsync.engine.copies import expected_number, require_worker_id
from weightsync.engine.packer import Packed
from weightsync.engine.reporter import Reporter
from weightsync.engine.signals import Shield
from weightsync.engine.workers import Roster
from weightsync.errors import ConfigurationError, RefusedError, WorkerLostError
from weightsync.options import OnFailure, OnPending, option
from weightsync.protocol import sender as pure
from weightsync.protocol._tables import SenderInput, State
from weightsync.protocol.report import OutcomeKind, SyncReport

#: Seconds between two looks at processes that have not started yet.
STARTS: Final = 0.5


class Wanted(NamedTuple):
    """Whom a send is for."""

    #: Worker ids; None: all.
    targets: tuple[int, ...] | None
    #: How many workers there must be on the roll, at least; None: what the sender expects.
    expected: int | None
    #: Whether a send to all may find nobody.
    allow_empty: bool


class WeightSender(Roster):
    """Sends the weights of one model to its workers.

    A strict state machine (`state`): a call that its state does not allow raises `StateError` and changes nothing.
    Safe to use from several threads. A pickled, copied or forked sender is `uninitialized` and owes nothing.

    Args:
        scheme: the scheme that wires it.
    """

    def _begin(self) -> None:
        super()._begin()
        self._reporter = Reporter(self._driver)
        #: How many workers there must be on the roll for a send, at least; None: one.
        self.expected_workers: int | None = None

    def send(
        self,
        weights: Any = None,
        worker_ids: int | Sequence[int] | None = None,
        *,
        timeout: float | Timeout | None = Timeout.DEFAULT,
        on_failure: OnFailure | str = OnFailure.RAISE,
        on_pending: OnPending | str = OnPending.RAISE,
        allow_empty: bool = False,
        expected_workers: int | None = None,
    ) -> SyncReport:
        """Send weights as the next version and wait until every target has answered or is lost.

        The caller may change its tensors once this returned or raised.

        Args:
            weights: an `nn.Module`, a TensorDict, a dict (nested or flat dotted), a model path such as
                ``"env.transform[0]"``, or None: the registered model's.
            worker_ids: one or several ids on the roll; None: all.
            timeout: seconds until the wait ends; None: for ever; default: `WEIGHTSYNC_TIMEOUT` or 60.
            on_failure: "raise", or "report": return the report whatever is in it.
            on_pending: "raise", "wait" or "supersede", if an update is outstanding. With "wait" the report's
                `previous` tells what became of that one, and its failures are raised once this one was sent. If it is
                still outstanding when time is up, nothing is sent.
            allow_empty: a send to all while nobody is on the roll returns an empty report and uses no version.
            expected_workers: how many workers there must be on the roll, at least; None: `expected_workers` of the
                sender.

        Returns:
            What became of it, worker by worker.

        Raises:
            StateError: not in this state; nothing changed.
            ConfigurationError: nobody to send to, fewer workers than expected, an unknown id, weights of an unsupported
                type.
            LayoutError: weights that cannot travel, or are not those of the registered model (other names, shapes or
                dtypes); nothing was sent.
            AckTimeoutError: some had not answered by the deadline; the update is outstanding (`pending_async`).
            WorkerLostError, RefusedError, SyncError: it did not reach everybody; everybody else was served.
        """
        deadline, failing, stopwatch = Deadline(timeout), option(OnFailure, on_failure), Stopwatch()
        targets = worker_ids_of(worker_ids)
        wanted = Wanted(targets, expected_workers, allow_empty)
        packed = self._prepare(SenderInput.SEND, weights, wanted, deadline, option(OnPending, on_pending))
        if isinstance(packed, SyncReport):
            return _told(packed, failing)
        with Shield(self._driver.waker.fire) as shield:
            version = self._dispatch(pure.Send(targets), packed, stopwatch.seconds)
            report = self._wait_for(version, deadline, shield)
        return _told(report, failing)

    def send_async(
        self,
        weights: Any = None,
        worker_ids: int | Sequence[int] | None = None,
        *,
        on_pending: OnPending | str = OnPending.RAISE,
        timeout: float | Timeout | None = Timeout.DEFAULT,
        allow_empty: bool = False,
        expected_workers: int | None = None,
    ) -> SyncReport:
        """Send weights as the next version and go on; `wait_async` tells what became of it.

        The caller may change its tensors once this returned: a snapshot was taken.

        Args:
            weights: as for `send`.
            worker_ids: as for `send`.
            on_pending: as for `send`.
            timeout: seconds that ``on_pending="wait"`` may wait; otherwise unused, since nothing is waited for.
            allow_empty: as for `send`.
            expected_workers: as for `send`.

        Returns:
            The report so far: PENDING for each worker that owes an answer.

        Raises:
            SyncError: the update that ``on_pending="wait"`` waited for did not reach everybody. This one was dispatched
                all the same, unless time was up (`AckTimeoutError`). Otherwise as `send`, but for the outcomes.
        """
        deadline, stopwatch, targets = Deadline(timeout), Stopwatch(), worker_ids_of(worker_ids)
        self._refuse_blocking(targets)
        wanted = Wanted(targets, expected_workers, allow_empty)
        packed = self._prepare(SenderInput.SEND_ASYNC, weights, wanted, deadline, option(OnPending, on_pending))
        if isinstance(packed, SyncReport):
            return _told(packed, OnFailure.RAISE)
        # In one: another thread may close the sender, or give the version up, as soon as it is dispatched.
        with Shield(self._driver.waker.fire), self._driver.lock:
            self._dispatch(pure.SendAsync(targets), packed, stopwatch.seconds)
            report = self._reporter.so_far(OutcomeKind.PENDING)
        report.raise_for_previous()
        return report

    def wait_async(
        self,
        *,
        timeout: float | Timeout | None = Timeout.DEFAULT,
        on_failure: OnFailure | str = OnFailure.RAISE,
    ) -> SyncReport:
        """Wait until every target of the outstanding update has answered or is lost.

        Args:
            timeout: seconds, of its own; None: for ever; default: `WEIGHTSYNC_TIMEOUT` or 60.
            on_failure: "raise" or "report".

        Raises:
            StateError: nothing is outstanding, or another thread waits already.
            AckTimeoutError, WorkerLostError, RefusedError, SyncError: as for `send`.
        """
        deadline, failing = Deadline(timeout), option(OnFailure, on_failure)
        return _told(self._wait(deadline), failing)

    def update_weights(self, weights: Any) -> SyncReport:
        """Send weights to all workers: the older name of ``send(weights=weights)``."""
        return self.send(weights=weights)

    def poll(self) -> SyncReport | None:
        """Take in all that has arrived, without waiting.

        Returns:
            What is known of the outstanding update (PENDING for those who owe), or None if none is outstanding.

        Raises:
            StateError: the sender is closed.
        """
        self._driver.require_open("poll")
        with Shield(self._driver.waker.fire), self._driver.lock:
            self._driver.pump()
            return self._reporter.so_far(OutcomeKind.PENDING) if self._driver.data.outstanding else None

    def abandon(self) -> SyncReport:
        """Give the outstanding update up. Workers that owe may have applied it, or may yet: ABANDONED.

        Raises:
            StateError: nothing is outstanding, or somebody waits for it.
        """
        with Shield(self._driver.waker.fire), self._driver.lock:
            self._driver.pump()
            self._driver.take(pure.Abandon())
            return self._reporter.concluded(self.version)

    def close(self) -> None:
        """Close for good: links close, a caller who waits is woken, what is outstanding is ABANDONED.

        Closing twice is allowed. Buffers are freed; what the workers serve stays.
        """
        self._end(self._driver.close)

    def fail(self, error: BaseException) -> None:
        """Close for good, since ``error`` was raised: as `close`, but the workers are told what failed.

        Their `receive()` raises `TransportError` with its type and text, not `SenderClosed`. Leaving a ``with sender:``
        block by an exception does this.
        """
        told = "".join(traceback.format_exception_only(error)).strip()
        self._end(lambda: self._driver.fail(told))

    def _end(self, close: Callable[[], None]) -> None:
        with Shield(self._driver.waker.fire):
            close()
            self._packer.close()
            self._endpoints.clear()

    def digest(self) -> bytes:
        """The xxh3-128 digest of the newest version's weights as they travelled, 16 bytes; empty: none is kept."""
        packed = self._driver.packed(self.version)
        return packed.digested() if packed else b""

    # ------------------------------------------------------------------------------------------- internals

    def _prepare(
        self,
        asked: SenderInput,
        weights: Any,
        wanted: Wanted,
        deadline: Deadline,
        pending: OnPending,
    ) -> Packed | SyncReport:
        """Check that the call is allowed, make way and pack the weights; a report: nothing is to be sent."""
        with Shield(self._driver.waker.fire):
            self._driver.pump()
        unlaid = self.state is State.UNINITIALIZED and bool(self._endpoints)
        in_the_way = self.state is State.PENDING_ASYNC and pending is not OnPending.RAISE
        if not (in_the_way or unlaid):
            self._driver.require(asked)
        if self._sends_to_nobody(wanted):
            return self._reporter.empty()
        with self._reported():
            pure.targets_of(self._driver.data, wanted.targets)
        if unlaid:
            self.connect()
        if in_the_way and pending is OnPending.WAIT:
            previous = self._wait(deadline)
            self._reporter.follows(previous)
            if previous.of(OutcomeKind.TIMED_OUT):
                return self._reporter.not_sent(wanted.targets)
        return self._pack(weights, in_the_way and pending is OnPending.SUPERSEDE)

    def _sends_to_nobody(self, wanted: Wanted) -> bool:
        """Whether nobody is on the roll, and that is allowed.

        Raises:
            ConfigurationError: fewer workers are on the roll than are expected, or that is no number.
        """
        data, expected = self._driver.data, expected_number(wanted.expected)
        expected = expected_number(self.expected_workers) if expected is None else expected
        if expected is not None and len(data.workers) < expected:
            left = "".join(f" Worker {worker} left: {goodbye}." for worker, goodbye in data.left.items())
            raise ConfigurationError(
                f"{expected} workers are expected, and {len(data.workers)} have been added: "
                f"{sorted(data.workers)}.{left} "
                "Nothing was sent, no version was used. add_worker() puts a worker on the roll."
            )
        return wanted.targets is None and not data.workers and wanted.allow_empty

    def _refuse_blocking(self, targets: tuple[int, ...] | None) -> None:
        blocking = self._driver.blocking(targets)
        if blocking:
            hint = (
                f"workers {blocking} are reached by transports of your own, whose calls have to be waited for. Call "
                "send() instead."
            )
            raise self._driver.refused("send_async", hint)

    def _pack(self, weights: Any, superseding: bool) -> Packed:
        """Pack the weights. What is outstanding is given up only when nothing can refuse them any more."""
        # A context that was collected is missed only where it is asked.
        context = self._context() if weights is None or isinstance(weights, str) else None
        prepared = self._scheme.prepare_weights(weights, self._model_id, self._scheme.strategy, context)
        packed = self._packer.pack(prepared)
        try:
            if weights is not None:
                self._refuse_other_model(packed.layout)
            self._scheme.published(self._model_id, prepared)
            if superseding:
                self._reporter.superseded(self.abandon())
        except BaseException:
            self._packer.handed_over(packed)
            raise
        return packed

    def _dispatch(self, event: pure.Send | pure.SendAsync, packed: Packed, pack_s: float) -> int:
        try:
            with self._reported():
                version = self._driver.dispatch(event, packed)
        finally:
            self._packer.handed_over(packed)
        self._reporter.dispatched(pack_s, packed.nbytes)
        return version

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Give a send that is refused since all are lost or have refused already its report."""
        try:
            yield
        except (WorkerLostError, RefusedError) as error:
            raise self._reporter.all_ended(error) from None

    def _wait(self, deadline: Deadline) -> SyncReport:
        """Wait for what is outstanding."""
        with Shield(self._driver.waker.fire) as shield:
            with self._driver.lock:
                self._driver.pump()
                self._driver.take(pure.Wait())
                version = self.version
            return self._wait_for(version, deadline, shield)

    def _wait_for(self, version: int, deadline: Deadline, shield: Shield) -> SyncReport:
        try:
            seen = self._driver.waker.fired
            while not self._reporter.is_over(version) and not deadline.passed:
                shield.deliver()
                self._driver.wait(self._nap(deadline), seen)
                seen = self._driver.waker.fired
                self._driver.pump()
        except BaseException:
            self._driver.take(pure.Interrupted(version))
            raise
        with self._driver.lock:
            if self._reporter.is_over(version):
                return self._reporter.concluded(version)
            self._driver.take(pure.Deadline(version))
            return self._reporter.so_far(OutcomeKind.TIMED_OUT)

    def _nap(self, deadline: Deadline) -> float | None:
        """How long to sleep before the deadline, and processes that have yet to start, are looked at again."""
        if not self._driver.awaits_processes:
            return deadline.nap
        return STARTS if deadline.nap is None else min(deadline.nap, STARTS)


def _told(report: SyncReport, failing: OnFailure) -> SyncReport:
    """The report, for the caller. That the update was given up while it was waited for is always raised."""
    if failing is OnFailure.RAISE or report.of(OutcomeKind.ABANDONED):
        report.raise_on_failure()
    return report


def worker_ids_of(worker_ids: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """The ids that a send's ``worker_ids`` names; None: all.

    Raises:
        ConfigurationError: one of them is none.
    """
    if worker_ids is None:
        return None
    several = isinstance(worker_ids, Iterable) and not isinstance(worker_ids, str | bytes)
    given: Iterable[Any] = worker_ids if several else (worker_ids,)  # type: ignore[assignment]
    return tuple(require_worker_id(worker_id, "worker_ids") for worker_id in given)
