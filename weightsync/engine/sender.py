"""`WeightSender`: sends the weights of one model to its workers, and reports the outcome of each version."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weightsync.clock import Deadline, Stopwatch, Timeout, new_incarnation
from weightsync.engine.arguments import reason_and_trace, require_fence, worker_ids_of
from weightsync.engine.copies import Participant, pipes_travel
from weightsync.engine.driver import Shield
from weightsync.engine.events import Events
from weightsync.engine.observing import SenderObserver
from weightsync.engine.packer import OutgoingWeights, Packed
from weightsync.engine.recorded_drivers import sender_driver
from weightsync.engine.reporter import Reporter
from weightsync.engine.sender_driver import SenderDriver
from weightsync.engine.workers import SendTargets, Workers, seconds_to_check
from weightsync.errors import ConfigurationError, RefusedError, WorkerLostError, warn_renamed
from weightsync.options import OnFailure, OnPending, switch
from weightsync.protocol import sender as pure
from weightsync.protocol._tables import SenderInput, State
from weightsync.protocol.report import OutcomeKind, SyncReport
from weightsync.transports.base import Link
from weightsync.transports.pipe.user_messages import UserMessages


class WeightSender(Participant):
    """Sends the weights of one model to its workers.

    A strict state machine (`state`): a call that its state does not allow raises `StateError` and changes nothing.
    Safe to use from several threads. A pickled, copied or forked sender is `uninitialized` and owes nothing.

    Args:
        scheme: the scheme that makes its links.
    """

    _driver: SenderDriver

    def _reset(self) -> None:
        self._driver = sender_driver(self._model_id)
        self._packer = self._scheme.packer
        self._workers = Workers(self._scheme, self._driver, self._packer)
        self._outgoing = OutgoingWeights(self._scheme, self._driver, self._packer, self._context)
        self._reporter = Reporter(self._driver)
        #: The layout that the handshake carries if no other weights are named, or None.
        self._known_layout = self._outgoing.registered_layout
        #: The least number of workers that a send needs; None means one.
        self.expected_workers: int | None = None

    def report_to(self, events: Events) -> None:
        """Emit this sender's events to ``events`` from now on."""
        SenderObserver(self._driver, events)

    def add_worker(self, worker_id: int, pipe_or_context: Any, *, process: Any = None) -> None:
        """Add a worker, or give one that has been added a new link. Never waits.

        A late joiner receives the latest version addressed to it right after the handshake.

        Args:
            worker_id: its id, 0 or more.
            pipe_or_context: how to reach it. Over pipes: the trainer's end of a duplex `multiprocessing.Pipe`, or an
                object with that as its ``.pipe``. Other schemes: an actor, ``(store, rank)``, and so on.
            process: the worker's process on this host: a `multiprocessing` process or a `subprocess.Popen`, started or
                not, or a process id. Its death is then noticed even before it has connected.

        Raises:
            StateError: the sender is closed.
            ConfigurationError: no link can be made over ``pipe_or_context``, or ``process`` is not a process.
        """
        self._workers.add(worker_id, pipe_or_context, process, self._known_layout)

    def remove_worker(self, worker_id: int) -> None:
        """Remove a worker and close its link; if it owed an answer, its outcome is LOST.

        Raises:
            StateError: the sender is closed.
            ConfigurationError: no such worker has been added.
        """
        self._workers.remove(worker_id)

    def register_worker(self, worker_idx: int, pipe_or_context: Any) -> None:
        """The same as `add_worker`, with TorchRL's names for the method and its arguments; raises the same errors."""
        self.add_worker(worker_idx, pipe_or_context)

    _register_worker = register_worker

    def connect(self, fence: int | None = None, *, weights: Any = None) -> None:
        """Create a link to each worker, put the handshake on it, and reserve shared memory. Never waits for a worker.

        Args:
            fence: from the `WorkerLostError` of a fenced sender: the new sender's incarnation is above this one.
            weights: the weights of the first send, if not the registered model's: the handshake carries their layout.

        Raises:
            StateError: the sender is connected already, or closed.
            ConfigurationError, LayoutError: these weights cannot be sent; no link was created.
        """
        incarnation = new_incarnation(0 if fence is None else require_fence(fence))
        self._driver.require(SenderInput.CONNECT)
        layout = self._known_layout() if weights is None else self._packer.layout_of(weights)
        with Shield(self._driver.waker.fire), self._driver.lock:
            self._driver.layout = layout if self._driver.layout is None else self._driver.layout
            self._driver.take(pure.Connect(incarnation))
        self._packer.reserve()  # while the workers start

    def await_workers(self, timeout: float | Timeout | None = Timeout.DEFAULT) -> None:
        """Wait until every worker has answered the handshake: a rendezvous without weights.

        Args:
            timeout: seconds; None: forever; default: `WEIGHTSYNC_TIMEOUT` or 60.

        Raises:
            StateError: the sender is not connected, or closed, or an asynchronous update is outstanding.
            AckTimeoutError: some workers had not answered by the deadline. The method may be called again.
            WorkerLostError: the links to some workers were lost; all others have answered, or refused the handshake.
            RefusedError: some workers refused the handshake (their models do not fit); all others have answered.
        """
        self._workers.wait(timeout)

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
        """Send weights as the next version, and wait until every target has answered or is lost.

        The caller may change its tensors once this has returned or raised.

        Args:
            weights: an `nn.Module`, a TensorDict, a dict (nested or flat dotted), a model path such as
                ``"env.transform[0]"``, or None: the registered model's.
            worker_ids: one or several ids of workers that have been added; None: all.
            timeout: seconds until the wait ends; None: forever; default: `WEIGHTSYNC_TIMEOUT` or 60.
            on_failure: "raise", or "report": return the report even if workers failed; see `OnFailure`.
            on_pending: "raise", "wait" or "supersede", if an update is outstanding. With "wait" its report is in
                `SyncReport.previous`, and its failures are raised once this version was sent. If the deadline passes
                first, nothing is sent.
            allow_empty: if there are no workers, a send to all returns an empty report and uses no version. What
                ``on_pending`` says of an outstanding update is done first.
            expected_workers: the least number of workers there must be; None: the sender's `expected_workers`.

        Returns:
            The outcome of each worker.

        Raises:
            StateError: an update is outstanding, or the sender has no links yet, or is closed; nothing changed.
            ConfigurationError: no worker to send to, fewer than expected, an unknown id, or weights of another type.
            ModelPathError: (an AttributeError) a model path does not resolve; no version was sent.
            LayoutError: weights that cannot travel, are not those of the registered model (other names, shapes or
                dtypes), or have a value too large for the scheme's ``wire_dtype``; no version was sent.
            NonFiniteError: with ``check_finite=True``, NaN or infinite values; no version was sent.
            TransportError: there is no memory for the packed weights; no version was sent.
            AckTimeoutError: some workers had not answered by the deadline; the update is outstanding (`pending_async`).
            WorkerLostError, RefusedError, SyncError: some workers did not get it; all the others did. If every target
                was lost or had refused before, nothing was sent.
        """
        deadline = Deadline(timeout)
        failure_policy = on_failure if isinstance(on_failure, OnFailure) else OnFailure(on_failure)
        if_pending = on_pending if isinstance(on_pending, OnPending) else OnPending(on_pending)
        targets = None if worker_ids is None else worker_ids_of(worker_ids)
        send_targets = SendTargets(targets, expected_workers, allow_empty)
        try:
            packed = self._prepare(SenderInput.SEND, weights, send_targets, deadline, if_pending)
            if isinstance(packed, SyncReport):
                return self._deliver_report(packed, failure_policy)
            with Shield(self._driver.waker.fire) as shield:
                with self._driver.lock:  # until it is noted for reports, no other thread makes one of this version
                    version = self._dispatch(pure.Send(targets), packed, send_targets)
                report = self._reporter.empty() if version is None else self._wait_for(version, deadline, shield)
        except (WorkerLostError, RefusedError) as ended:  # every target is lost already, or has refused
            if failure_policy is OnFailure.RAISE:
                raise
            report = ended.report
        return self._deliver_report(report, failure_policy)

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
        """Send weights as the next version and return at once; `wait_async` returns the outcomes.

        The caller may change its tensors once this has returned: a snapshot was taken.

        Args:
            weights: as for `send`.
            worker_ids: as for `send`.
            on_pending: as for `send`.
            timeout: seconds that ``on_pending="wait"`` may wait; otherwise unused.
            allow_empty: as for `send`.
            expected_workers: as for `send`.

        Returns:
            The report so far: PENDING for each worker that has not answered.

        Raises:
            SyncError: the update that ``on_pending="wait"`` waited for did not reach every worker. This one was
                dispatched anyway, unless the deadline had passed (`AckTimeoutError`).
            WorkerLostError, RefusedError: every target was lost or had refused before; nothing was sent.
            StateError, ConfigurationError, ModelPathError, LayoutError, NonFiniteError, TransportError: as for `send`.
        """
        deadline = Deadline(timeout)
        if_pending = on_pending if isinstance(on_pending, OnPending) else OnPending(on_pending)
        targets = None if worker_ids is None else worker_ids_of(worker_ids)
        self._refuse_blocking(targets)
        send_targets = SendTargets(targets, expected_workers, allow_empty)
        packed = self._prepare(SenderInput.SEND_ASYNC, weights, send_targets, deadline, if_pending)
        if isinstance(packed, SyncReport):
            return self._deliver_report(packed, OnFailure.RAISE)
        # Under one lock: as soon as it is dispatched, another thread may close the sender or abandon the version.
        with Shield(self._driver.waker.fire), self._driver.lock:
            version = self._dispatch(pure.SendAsync(targets), packed, send_targets)
            report = self._reporter.empty() if version is None else self._reporter.so_far(OutcomeKind.PENDING)
            self._reporter.delivered()
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
            timeout: seconds, counted from this call; None: forever; default: `WEIGHTSYNC_TIMEOUT` or 60.
            on_failure: as for `send`.

        Raises:
            StateError: nothing is outstanding, or another thread waits already.
            AckTimeoutError, WorkerLostError, RefusedError, SyncError: as for `send`.
        """
        deadline = Deadline(timeout)
        failing = on_failure if isinstance(on_failure, OnFailure) else OnFailure(on_failure)
        return self._deliver_report(self._wait(deadline), failing)

    def update_weights(self, weights: Any = None) -> SyncReport:
        """Send weights to all workers: an older name of ``send(weights=weights)``, which raises the same errors."""
        if self._driver.machine.state is not State.UNINITIALIZED:
            self._driver.require(SenderInput.SEND, "update_weights")
        return self.send(weights=weights)

    def poll(self) -> SyncReport | None:
        """Read what has arrived, without waiting.

        Returns:
            The outstanding update's outcomes so far (PENDING: no answer yet), or None.

        Raises:
            StateError: the sender is closed.
        """
        self._driver.require_open("poll")
        with Shield(self._driver.waker.fire), self._driver.lock:
            self._driver.pump()
            if self._driver.data.outstanding is None:
                return None
            report = self._reporter.so_far(OutcomeKind.PENDING)
            self._reporter.delivered()
            return report

    def progress(self) -> None:
        """Read what has arrived, and write what can be written. Like `poll`, but no outcome counts as reported."""
        with Shield(self._driver.waker.fire):
            self._driver.pump()

    def abandon(self) -> SyncReport:
        """Give up the outstanding update. Workers that have not answered are ABANDONED: they may still apply it.

        Raises:
            StateError: nothing is outstanding, or another thread waits for it.
        """
        return self._abandon(pure.Abandon())

    def _abandon(self, event: pure.Abandon) -> SyncReport:
        with Shield(self._driver.waker.fire), self._driver.lock:
            self._driver.pump()
            self._driver.take(event)
            report = self._reporter.concluded(self.version)
            self._reporter.delivered()
            return report

    def expect_goodbyes(self) -> None:
        """Log goodbyes of workers at INFO instead of WARNING: here workers end on purpose. Reports still name them."""
        self._driver.goodbye_level = logging.INFO

    def close(self) -> None:
        """Close for good: links close, waiting callers wake, an outstanding update is ABANDONED.

        Closing twice is allowed. Buffers are freed; the workers keep the versions they serve.
        """
        self._end(self._driver.close)

    def fail(self, error: BaseException) -> None:
        """Close for good because ``error`` was raised, as leaving a ``with sender:`` block by an exception does.

        Like `close`, but the workers' `receive()` raises `TransportError` with its type and text, not `SenderClosed`.
        Raises ConfigurationError: it is not an exception. Nothing was closed.
        """
        reason, _ = reason_and_trace(error)
        self._end(lambda: self._driver.fail(reason))

    def _end(self, close: Callable[[], None]) -> None:
        with Shield(self._driver.waker.fire):
            close()
            self._packer.close()
            self._workers.endpoints.clear()
        self._threads.end()

    @property
    def version(self) -> int:
        """The newest version ever dispatched, or 0."""
        return self._driver.data.version

    @property
    def incarnation(self) -> int:
        """This sender's incarnation; 0 before it is connected."""
        return self._driver.data.incarnation

    @property
    def workers(self) -> Mapping[int, pure.Entry]:
        """Maps each worker's id to what the sender knows of it: its `link_state`, the version that it acked last."""
        return dict(self._driver.data.workers.items())

    @property
    def roll(self) -> Mapping[int, pure.Entry]:
        """The former name of `workers`."""
        warn_renamed("WeightSender.roll", "workers")
        return self.workers

    @property
    def worker_ids(self) -> tuple[int, ...]:
        """The ids of the workers that have been added."""
        return tuple(self._driver.data.workers)

    @property
    def owing(self) -> tuple[int, ...]:
        """The ids of the workers that still owe an answer to the outstanding update. Reads no new answers."""
        outstanding = self._driver.data.outstanding
        return () if outstanding is None else tuple(outstanding.owed)

    @property
    def stale_answers(self) -> int:
        """How many answers were for versions that the sender no longer waited for."""
        return self._driver.data.stale

    def transports(self) -> dict[int, Link]:
        """Each worker's link, while it is up or expected."""
        return self._driver.by_worker()

    def pipe(self, worker_id: int) -> UserMessages:
        """The user's own messages on a worker's pipe, with the methods of a connection.

        Raises:
            StateError: the sender is closed.
            ConfigurationError: no such worker has been added, or it has no pipe.
        """
        return self._workers.pipe(worker_id)

    def digest(self) -> bytes:
        """The xxh3-128 digest of the newest version's weights as they were sent, 16 bytes, or empty."""
        with self._driver.lock:  # otherwise another thread may send meanwhile, and write over it
            return packed.digested() if (packed := self._driver.packed(self.version)) else b""

    def _carried(self) -> dict[int, Any]:
        return self._workers.open_endpoints() if pipes_travel() else {}

    def _restore(self, carried: dict[int, Any]) -> None:
        for worker_id, endpoint in carried.items():
            self.add_worker(worker_id, endpoint)

    def _prepare(
        self, input: SenderInput, weights: Any, targets: SendTargets, deadline: Deadline, on_pending: OnPending
    ) -> Packed | SyncReport:
        """Check that the call is allowed, settle what is outstanding, pack the weights. A report: nothing is sent."""
        stopwatch = Stopwatch()
        if not isinstance(targets.allow_empty, bool):
            switch(targets.allow_empty, "allow_empty")
        with Shield(self._driver.waker.fire):
            self._driver.look()
        state, data = self._driver.machine.state, self._driver.data
        without_links = state is State.UNINITIALIZED and bool(self._workers.endpoints)
        must_settle = state is State.PENDING_ASYNC and on_pending is not OnPending.RAISE
        if not (must_settle or without_links):
            self._driver.require(input)
        if targets.expected is not None or self.expected_workers is not None:
            self._workers.require_enough_workers(targets, self.expected_workers)
        if targets.targets is None and not data.workers and targets.allow_empty:
            return self._report_without_workers(deadline, on_pending if must_settle else OnPending.RAISE)
        try:
            pure.targets_of(data, targets.targets)
        except (WorkerLostError, RefusedError) as error:
            raise self._reporter.add_report(error) from None
        if without_links:
            self.connect()
        if must_settle and on_pending is OnPending.WAIT:
            previous = self._wait(deadline)
            if previous.of(OutcomeKind.TIMED_OUT):
                return self._reporter.not_sent(previous, targets.targets)
            stopwatch.restart()
        return self._pack(weights, targets.targets, must_settle and on_pending is OnPending.SUPERSEDE, stopwatch)

    def _report_without_workers(self, deadline: Deadline, settling: OnPending) -> SyncReport:
        """The report of a send without workers. What is outstanding is settled first: nobody owes it an answer."""
        if settling is OnPending.WAIT:
            self._wait(deadline)
        elif settling is OnPending.SUPERSEDE:
            self._reporter.superseded(self._abandon(pure.Abandon()))
        return self._reporter.empty()

    def _refuse_blocking(self, targets: tuple[int, ...] | None) -> None:
        if blocking := self._driver.blocking(targets):
            hint = f"workers {blocking} are reached by transports of your own, whose calls block. Call send() instead."
            raise self._driver.refused("send_async", hint)

    def _pack(self, weights: Any, targets: tuple[int, ...] | None, superseding: bool, stopwatch: Stopwatch) -> Packed:
        """Pack the weights, and only then give up what is outstanding: nothing can refuse them any more."""
        packed = self._outgoing.pack(weights, targets)
        packed.stopwatch = stopwatch
        try:
            if self._packer.sends_deltas:
                packed.payloads = self._driver.payloads_of(packed)
            if superseding:
                self._reporter.superseded(self._abandon(pure.Abandon(f"superseded by version {self.version + 1}")))
        except BaseException:
            self._packer.release_packed(packed)
            raise
        return packed

    def _dispatch(self, event: pure.Send | pure.SendAsync, packed: Packed, targets: SendTargets) -> int | None:
        assert packed.stopwatch is not None
        packed.pack_s = packed.stopwatch.restart()
        try:
            version = self._driver.dispatch(event, packed)
        except (WorkerLostError, RefusedError) as error:  # the targets are all lost already, or have refused
            raise self._reporter.add_report(error) from None
        except ConfigurationError:
            if targets.targets is None and targets.allow_empty and not self._driver.data.workers:  # they left meanwhile
                return None
            raise
        finally:
            self._packer.release_packed(packed)
        self._reporter.dispatched(packed, packed.stopwatch)
        return version

    def _wait(self, deadline: Deadline) -> SyncReport:
        """Wait for the outstanding update."""
        with Shield(self._driver.waker.fire) as shield:
            with self._driver.lock:
                self._driver.pump()
                self._driver.take(pure.Wait())
                version = self.version
            return self._wait_for(version, deadline, shield)

    def _wait_for(self, version: int, deadline: Deadline, shield: Shield) -> SyncReport:
        driver = self._driver
        try:
            fired = driver.waker.fired
            while version not in driver.concluded and (nap := deadline.nap) != 0.0:  # 0: the deadline has passed
                if shield.recorded:
                    shield.deliver()
                ready = driver.wait(seconds_to_check(nap) if driver.awaited else nap, fired)
                fired = driver.waker.fired
                driver.pump(ready or None)
            if shield.recorded:
                shield.deliver()
        except BaseException:
            with driver.lock:
                driver.take(pure.Interrupted(version))
                if version in driver.concluded:
                    self._reporter.concluded(version)
            raise
        with driver.lock:
            if version in driver.concluded:
                return self._reporter.concluded(version)
            driver.take(pure.Deadline(version))
            return self._reporter.so_far(OutcomeKind.TIMED_OUT)

    def _deliver_report(self, report: SyncReport, on_failure: OnFailure) -> SyncReport:
        """Return the report or raise its failures. That the update was abandoned during the wait is always raised."""
        self._reporter.delivered()
        all_is_well = report.ok and report.previous is None
        if not all_is_well and (on_failure is OnFailure.RAISE or report.of(OutcomeKind.ABANDONED)):
            report.raise_on_failure()
        return report
