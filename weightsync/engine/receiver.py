"""`WeightReceiver`: receives the weights of one model, applies each version whole, and answers for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

from weightsync.clock import Deadline, Timeout
from weightsync.engine.applier import Applier
from weightsync.engine.arguments import reason_and_trace
from weightsync.engine.copies import Participant, pipes_travel
from weightsync.engine.driver import Shield
from weightsync.engine.events import Events
from weightsync.engine.listening import BackgroundReader, Listening
from weightsync.engine.manual_ack import UPDATED, ManualAck
from weightsync.engine.observing import ReceiverObserver
from weightsync.engine.receiver_driver import Pending, ReceiverDriver
from weightsync.engine.recorded_drivers import receiver_driver
from weightsync.engine.serving_lock import PATIENCE, ServedModel, ServingBlock, ServingEntry
from weightsync.errors import ConfigurationError, LayoutError, WeightSyncError, sentence, warn_renamed
from weightsync.options import switch
from weightsync.protocol import receiver as pure
from weightsync.transports.base import Link
from weightsync.transports.pipe.user_messages import UserMessages
from weightsync.weights.device.registry import capturing
from weightsync.weights.extra_state import encode_extras
from weightsync.weights.packing import digest_of
from weightsync.weights.reading import layout_of, read_weights
from weightsync.weights.target import SwapBroken, Target


class WeightReceiver(Participant):
    """Receives the weights of one model in a worker.

    A strict state machine (`state`). Versions are applied in the thread that calls `receive`, whole or not at all;
    every version that arrives is answered. A pickled, copied or forked receiver is `uninitialized`.

    Args:
        scheme: the scheme that makes its links.
    """

    _driver: ReceiverDriver
    #: Whether a staged version goes live when the next forward begins, in that forward's thread, even while another
    #: thread is in `receive`. The return value of that `receive` then does not report this version.
    _forwards_swap = False

    def _reset(self) -> None:
        self._driver = receiver_driver(self._model_id)
        self._listening = Listening(self._scheme, self._driver)
        self._served = ServedModel(self._scheme, self._driver, self._listening, self._context)
        self._applier = Applier(self._driver, self._served, self._listening)
        self._manual = ManualAck(self._driver, self._served, self._listening, self._applier)

    def report_to(self, events: Events, worker: Callable[[], int | None]) -> None:
        """Emit this receiver's events to ``events`` from now on, with the id that ``worker`` gives."""
        ReceiverObserver(self._driver, events, worker)

    def register_model(self, model: Any = None, *, model_ref: Any = None) -> None:
        """Set the model that weights are applied to.

        A new model takes over `version` from the previous one only if it holds exactly the same weights; otherwise
        `version` is None until the next version is applied.

        Args:
            model: an `nn.Module`, a TensorDict, a dict of tensors, or a path such as ``"env.transform[0]"``. A path
                is resolved on the context each time the model is needed; if it then leads to another object, that
                object is registered.
            model_ref: the same, by TorchRL's older name.

        Raises:
            ConfigurationError: neither is given, or both; or the scheme has connected, and the model takes no hooks (a
                ScriptModule); nothing has changed.
            ConfigurationError, LayoutError: weights cannot be applied to this model: its type, or a tensor in it. The
                previous model is no longer served, and what arrives is refused until another model is registered.
            ModelBusyError: (a TimeoutError) other threads used the previous model for `WEIGHTSYNC_TIMEOUT` or 60
                seconds; nothing has changed.
        """
        if (model is None) == (model_ref is None):
            raise ConfigurationError("register_model() takes a model: once, as model= or by its older name model_ref=.")
        model = model_ref if model is None else model
        self._served.serve(model, model if isinstance(model, str) else None, Deadline(Timeout.DEFAULT))

    def register_worker_transport(self, pipe_or_context: Any = None, *, pipe: Any = None) -> None:
        """Listen on a link: the first one, or one over which a sender makes a new handshake.

        Args:
            pipe_or_context: the worker's end of a duplex `multiprocessing.Pipe`, or an object with that as its
                ``.pipe``; for other transports see their scheme's page.
            pipe: the same, by TorchRL's older name.

        Raises:
            StateError: the receiver is closed.
            ConfigurationError: no link can be made over it, or both arguments are given.
        """
        self._driver.require_open("register_worker_transport")
        if pipe is not None and pipe_or_context is not None:
            raise ConfigurationError("pipe= is an older name of pipe_or_context=: give one of them.")
        self._listening.listen(pipe if pipe_or_context is None else pipe_or_context)

    _register_model = register_model
    _register_worker_transport = register_worker_transport

    def set_background_reader(self, background_reader: BackgroundReader | None) -> None:
        """Have only ``background_reader`` read the links from now on; with None `receive` reads them again."""
        self._listening.background_reader = background_reader

    def check_links(self) -> None:
        """Check that a sender is linked, or may still be. Raises StateError and TransportError as `receive` does."""
        self._listening.check()

    def advise_on_another_sender(self, advice: str) -> None:
        """Set what errors tell the user to do in order to receive from another sender."""
        self._listening.relink_advice = advice

    def receive(self, timeout: float | None = 0.001) -> bool:
        """Apply the newest version that has arrived, and answer for it.

        Args:
            timeout: seconds to wait for a version, and for `serving` blocks of other threads. 0 does not wait; None
                waits until a version comes or the sender is gone.

        Returns:
            Whether a new version is live now. False: none came, or it was refused (`last_refusal` says why, and the
            sender is told the same).

        Raises:
            ConfigurationError, ModelPathError: no model is registered, or its path does not resolve. An update that has
                arrived waits until there is a model.
            StateError: the receiver is closed, or has no link yet.
            WeightSyncError: a swap failed halfway and could not be undone, or a loader raised `PartlyLoadedError`: the
                model serves nothing, and the receiver is closed.
            SenderClosed: (a TransportError) the sender closed the link cleanly. The model keeps the version it
                serves; a new link may be registered.
            TransportError: the sender is gone without a goodbye, or this worker refused its handshake because the
                weights do not fit (`last_refusal` says why). The model keeps its version, as above.
            ProtocolError: the peer broke the protocol; its link is closed.
        """
        reader = self._listening.background_reader
        if reader is not None:
            return reader.receive(timeout)
        deadline, serving, queued = Deadline(timeout), self._served.serving, False
        with Shield(self._driver.waker.fire) as shield:
            try:
                while True:
                    fired = self._driver.waker.fired
                    applied = self._applier.receive_and_apply()
                    if applied is not None:
                        return applied
                    nap = deadline.nap
                    if nap == 0.0:  # the deadline has passed
                        return False
                    if shield.recorded:
                        shield.deliver()
                    # Forwards that follow one another without a pause would otherwise delay a staged version forever.
                    waits_for_forwards = self._served.staged is not None and not self.serves_here
                    if waits_for_forwards is not queued:
                        (serving.queue if waits_for_forwards else serving.leave_queue)()
                        queued = waits_for_forwards
                    # A block that an interrupt has ended wakes no waiting thread.
                    self._driver.wait(PATIENCE if queued and (nap is None or nap > PATIENCE) else nap, fired)
            finally:
                if queued:
                    serving.leave_queue()

    def receive_and_apply_here(self) -> bool | None:
        """Read the links and apply what is pending, without waiting for threads that serve the model.

        Returns:
            True: a version went live. False: it was refused. None: neither.

        Raises:
            WeightSyncError: as for `receive`.
        """
        return self._applier.receive_and_apply()

    def apply_weights(
        self, weights: Any, *, inplace: bool = True, timeout: float | Timeout | None = Timeout.DEFAULT
    ) -> None:
        """Apply weights yourself.

        If they are the pending version's weights, that version is applied and acked. Other weights are written into the
        model as they are; a pending version is then refused, and `version` is None until the next one is applied.

        Args:
            weights: a TensorDict or dict, nested or flat with dotted names.
            inplace: if false, weights that are not the pending version's become new tensors of the model: see
                `WeightStrategy.apply_weights`. If a strategy of yours raises in between, `version` is None afterwards.
            timeout: seconds to wait for threads serving the model; None: forever; default: `WEIGHTSYNC_TIMEOUT` or 60.

        Raises:
            ModelBusyError: (a TimeoutError) other threads used the model until the timeout; nothing was changed.
            StateError: the receiver is closed.
            ConfigurationError: no model is registered, weights of an unsupported type, or ``inplace`` is not a bool.
            ModelPathError: (an AttributeError) the model's path does not resolve.
            LayoutError: they do not fit; nothing was changed.
            WeightSyncError: they are the pending version's weights, and that version was refused: the message and
                `last_refusal` say why, and the sender is told the same. Or a swap failed halfway, and the receiver is
                closed.
        """
        switch(inplace, "inplace")
        deadline, driver, serving = Deadline(timeout), self._driver, self._served.serving
        self._served.destination()  # found before this waits; another may have been registered once it has waited
        with serving.alone(deadline, "apply_weights"), Shield(driver.waker.fire), driver.lock:
            driver.require_open("apply_weights")
            # An update that was taken must not be superseded now: these are probably its weights.
            if not self._manual.owes_ack and self._listening.background_reader is None:
                driver.pump()
            pending = driver.pending
            if pending is not None and self._are_of(pending, weights):
                self._manual.drop_taken()
                if not self._applier.apply(self._served.destination()):
                    raise self._turned_down(pending)
                return
            self._write(self._served.destination(), weights, inplace)
            driver.take(pure.Invalidate())
            if pending is not None:
                self._applier.refuse(pending, "other weights were applied by hand", "")

    def _are_of(self, pending: Pending, weights: Any) -> bool:
        """Whether weights that the user passed are those of the pending version, compared by digest."""
        read = read_weights(weights)
        if pending.untaken or layout_of(read, pending.layout) is not pending.layout:
            return False
        return self._applier.digest_sent(pending) == digest_of(read, pending.layout, encode_extras(read.extras()))

    def _turned_down(self, pending: Pending) -> WeightSyncError:
        """The error for weights that were given by hand and are those of a version that was refused."""
        return WeightSyncError(
            f"apply_weights(): these are the weights of version {pending.update.version} of {self._model_id!r}, which "
            f"was refused: {sentence(self.last_refusal)} The model keeps the weights that it had. Correct the cause, "
            "then have the trainer send again."
        )

    def _write(self, target: Target, weights: Any, inplace: bool) -> None:
        self._served.unshare()
        try:
            if inplace:
                target.apply(weights)
            else:
                self._scheme.strategy.apply_weights(target.destination, weights, inplace=False)
        except BaseException as error:  # not in place, a strategy of the user's may have written a part
            if isinstance(error, SwapBroken) or not (inplace or isinstance(error, ConfigurationError | LayoutError)):
                self._driver.take(pure.Invalidate())
            raise

    def take_update(self, timeout: float | None = 0.0) -> Any:
        """The weights of an update that has arrived and was not taken yet; needs no registered model.

        The update stays pending until `ack` or `nack`, or `apply_weights` with these weights.

        Args:
            timeout: seconds to wait for one. 0 does not wait; None waits until one comes or the sender is gone.

        Returns:
            A new TensorDict or dict, of the type that the sender was given; None if none came. An update that was
            damaged on the way is refused.

        Raises:
            StateError: the receiver is closed, or has no link; or a thread receives in the background.
            TransportError: the sender is gone.
            ProtocolError: the peer broke the protocol; its link is down.
        """
        return self._manual.take_update(timeout)

    def has_update(self) -> bool:
        """Whether an update has arrived that was not taken yet. Never waits.

        Raises:
            StateError: a thread receives in the background.
            ProtocolError: the peer broke the protocol; its link is down.
        """
        return self._manual.has_update()

    @property
    def owes_ack(self) -> bool:
        """Whether an update that `take_update` returned is still pending."""
        return self._manual.owes_ack

    def ack(self, message: str = UPDATED, *, timeout: float | Timeout | None = Timeout.DEFAULT) -> None:
        """Ack the update that was taken by `take_update`: the outcome's evidence is `CALL`.

        Args:
            message: "updated": it is applied. Any other text tells the sender that it is not.
            timeout: seconds to wait for other threads that serve the model; None: forever; default:
                `WEIGHTSYNC_TIMEOUT` or 60.

        Raises:
            ModelBusyError: (a TimeoutError) other threads used the model until the timeout; nothing was answered.
            ConfigurationError: ``message`` is not a str; nothing was answered.
            StateError: no update that was taken is pending: it was answered or superseded, or its link went down.
        """
        self._manual.ack(message, timeout)

    def nack(self, error: BaseException, *, timeout: float | Timeout | None = Timeout.DEFAULT) -> None:
        """Refuse the update that was taken: it could not be applied. Does nothing if none is pending.

        Args:
            error: why; the sender gets its text and its traceback.
            timeout: as for `ack`.

        Raises:
            ModelBusyError: as for `ack`.
            ConfigurationError: ``error`` is not an exception; nothing was answered.
        """
        self._manual.nack(error, timeout)

    def hand_out(self, timeout: float | None = 0.0) -> Any:
        """The former name of `take_update`."""
        warn_renamed("WeightReceiver.hand_out()", "take_update()")
        return self.take_update(timeout)

    def acknowledge(self, message: str = UPDATED, *, timeout: float | Timeout | None = Timeout.DEFAULT) -> None:
        """The former name of `ack`."""
        warn_renamed("WeightReceiver.acknowledge()", "ack()")
        self.ack(message, timeout=timeout)

    def refuse(self, error: BaseException, *, timeout: float | Timeout | None = Timeout.DEFAULT) -> None:
        """The former name of `nack`."""
        warn_renamed("WeightReceiver.refuse()", "nack()")
        self.nack(error, timeout=timeout)

    @contextlib.contextmanager
    def serving(self) -> Iterator[int | None]:
        """Keep the served version: no other version goes live inside the block. Yields the served version.

        Meanwhile a `receive` in another thread reads messages but applies nothing; it applies once the block has ended.
        While it waits, blocks that begin in other threads wait too, for at most a second.
        A version that a background thread has staged goes live when the outermost block begins.

        Raises:
            WeightSyncError: a swap failed halfway, now or before: the model serves nothing.
        """
        block = ServingBlock()
        entry = ref(block)
        self.begin_serving(entry)
        try:
            yield self.version
        finally:
            self.end_serving(entry)

    def begin_serving(self, entry: ServingEntry) -> None:
        """Begin a forward or a block. First swap in a staged version: a busy worker never delays a swap forever.

        While some thread captures a CUDA graph, no forward swaps anything: the swap would wait for kernels.

        Args:
            entry: the forward's call, or the block.

        Raises:
            WeightSyncError: a swap failed half way, now or before: the model serves nothing.
        """
        swap_error, served = self._applier.swap_error, self._served
        if swap_error is not None:
            raise WeightSyncError(str(swap_error)) from swap_error
        behind = served.staged is not None and (self._forwards_swap or self._listening.background_reader is not None)
        if behind and not served.serving.serves_here() and not capturing():
            with Shield(self._driver.waker.fire):
                self._applier.swap_staged(served.serving.patience())
        served.serving.enter(entry)

    def end_serving(self, entry: ServingEntry = None) -> None:
        """End the block that began with this entry, and wake a thread that waits to swap.

        Args:
            entry: None: what this thread began last.
        """
        self._served.serving.leave(entry)
        if self._driver.data.pending is not None:
            self._driver.waker.fire()

    def end_forward(self) -> None:
        """End the forward begun last in this thread, if it was guarded, and wake a thread that waits to swap."""
        self._served.serving.leave_forward()
        if self._driver.data.pending is not None:
            self._driver.waker.fire()

    @property
    def serves_here(self) -> bool:
        """Whether this thread is inside a forward of the model, or inside a `serving` block."""
        return self._served.serving.serves_here()

    def close(self) -> None:
        """Close for good. The model keeps the version it serves; the sender removes this worker.

        Waits for a swap that has begun in another thread, and at most 10 seconds for a relay in the background.
        """
        self._end(self._driver.close)

    def fail(self, error: BaseException) -> None:
        """Close for good because ``error`` was raised: without a goodbye, and the sender gets the error.

        This worker stays among the sender's workers, LOST in each report, until it joins again or is removed. Leaving
        a ``with receiver:`` block by an exception does this.
        """
        reason, trace = reason_and_trace(error)
        self._end(lambda: self._driver.fail(reason, trace))

    def fail_links(self, error: BaseException) -> None:
        """Close the links for good because ``error`` was raised, for a background reader: see `fail`."""
        self._driver.fail(*reason_and_trace(error))

    def _end(self, close: Callable[[], None]) -> None:
        if self._listening.background_reader is not None:
            self._listening.background_reader.stop()
        with Shield(self._driver.waker.fire):
            self._listening.stop()
            close()
            self._listening.stop()  # another thread may have registered one more meanwhile
            self._served.staged = None
            self._served.leave_device()
        self._threads.end()

    @property
    def model(self) -> Any:
        """What the weights are applied to."""
        return self._served.model

    @property
    def version(self) -> int | None:
        """The version that the model serves, whole; None before the first, or after other weights were applied."""
        served = self._driver.data.served
        return served[1] if served else None

    @property
    def incarnation(self) -> int | None:
        """The sender's incarnation that `version` belongs to."""
        served = self._driver.data.served
        return served[0] if served else None

    @property
    def last_refusal(self) -> str:
        """Why the last refused version could not be applied, or else a handshake was refused; empty if neither was."""
        return self._applier.last_refusal or self._driver.handshake_refusal

    @property
    def awaits_parameters(self) -> bool:
        """Whether a version waits until the model has its parameters back (after `torch.func.functional_call`)."""
        return self._applier.awaits_parameters

    @property
    def broken(self) -> WeightSyncError | None:
        """The error of the swap that left the model without a whole version, or None."""
        return self._applier.swap_error

    @property
    def pipe(self) -> UserMessages:
        """The user's own messages on our pipe, with the methods of a connection.

        Raises:
            ConfigurationError: there is no pipe.
        """
        return self._scheme.user_messages(self._listening.endpoint)

    @property
    def _transport(self) -> Any:
        """TorchRL's name for its transport class, over this receiver.

        Raises ConfigurationError: there is no link, or the scheme has no such class.
        """
        return self._scheme.transport_of(self, self._listening.endpoint)

    @property
    def driver(self) -> ReceiverDriver:
        """The driver, for a background reader."""
        return self._driver

    def links(self) -> list[Link]:
        """The links that are open, to be waited for."""
        return self._driver.links()

    def target(self) -> Target:
        """What the weights are applied to, as a target.

        Raises:
            ConfigurationError: no model is registered.
        """
        return self._served.destination()

    def digest(self) -> bytes:
        """The xxh3-128 digest of what the model holds now, 16 bytes, computed as a sender computes it.

        Raises:
            ConfigurationError: no model is registered.
        """
        return self._served.destination().digest(self._served.layout)

    def _carried(self) -> tuple[str | None, Any]:
        return self._served.path, (self._listening.endpoint if pipes_travel() else None)

    def _restore(self, carried: tuple[str | None, Any]) -> None:
        path, endpoint = carried
        self._served.restore_path(path)
        if endpoint is not None:
            self.register_worker_transport(endpoint)
