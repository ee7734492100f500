"""`WeightReceiver`: takes in the weights of one model, applies them whole, and answers for each version."""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from weightsync._tables import RECEIVER_ROWS, ReceiverInput, State
from weightsync.byhand import ByHand
from weightsync.driving.interrupts import Shield
from weightsync.driving.receiver import Pending, ReceiverDriver
from weightsync.errors import ConfigurationError, LayoutError, TransportError, WeightSyncError
from weightsync.extras import encode_extras
from weightsync.machine import next_state
from weightsync.messages import Ack
from weightsync.packing import digest, digest_of
from weightsync.paths import _resolve_model
from weightsync.protocol import receiver as pure
from weightsync.side import pipes_travel
from weightsync.target import Mode, SwapBroken, Target
from weightsync.timing import Deadline, Stopwatch
from weightsync.transports.base import wait
from weightsync.transports.user import UserMessages
from weightsync.weights import layout_of, read_weights

logger = logging.getLogger("weightsync")


class WeightReceiver(ByHand):
    """Takes in the weights of one model in a worker.

    A strict state machine (`state`). Versions are applied in the thread that calls `receive`, whole or not at all;
    every version that arrives is answered. A pickled, copied or forked receiver is `uninitialized`.

    Args:
        scheme: the scheme that wires it.
    """

    _driver: ReceiverDriver

    def _begin(self) -> None:
        self._model: Any = None
        self._endpoint: Any = None
        self._listening: list[Callable[[], None]] = []
        self._driver = ReceiverDriver(self._model_id)
        self._target: Target | None = None
        self._serving = threading.RLock()
        self._inside: int | None = None
        self._handed = None
        #: Why the last version that was refused did not fit; empty: none was refused.
        self.last_refusal = ""

    # ------------------------------------------------------------------------------------------- wiring

    def register_model(self, model: Any) -> None:
        """Say what the weights are applied to.

        Args:
            model: an `nn.Module`, a TensorDict, a dict of tensors, or a path that is resolved on the context when
                it is needed, such as ``"env.transform[0]"``.
        """
        self._model = model
        self._target = None
        if not isinstance(model, str):
            self._destination()

    def register_worker_transport(self, pipe_or_context: Any) -> None:
        """Listen on a link: the first, or one over which a sender makes a new handshake.

        Args:
            pipe_or_context: our end of a duplex `multiprocessing.Pipe`, or an object whose ``.pipe`` is that; other
                transports take what their scheme's `listen` says.

        Raises:
            StateError: the receiver is closed.
            ConfigurationError: no link can be made of it.
        """
        next_state(RECEIVER_ROWS, self.state, ReceiverInput.REJECTED)
        self._listening.append(self._scheme.listen(pipe_or_context, self._model_id, self._driver.add_link))
        self._endpoint = pipe_or_context

    _register_model = register_model
    _register_worker_transport = register_worker_transport

    # ---------------------------------------------------------------------------------------- receiving

    def receive(self, timeout: float | None = 0.001) -> bool:
        """Apply the newest version if one has arrived, and answer for it.

        Args:
            timeout: seconds to wait for one; 0: do not wait; None: until one comes or the sender is gone.

        Returns:
            Whether a new version is live now. False: none came, or it was refused (`last_refusal` says why, and
            the sender has been told).

        Raises:
            ConfigurationError: no model is registered.
            StateError: the receiver is closed, or has no link yet.
            TransportError: the sender is gone. The model keeps the version it serves; a new link may be registered.
            ProtocolError: the peer broke the protocol; its link is down.
        """
        target, deadline = self._destination(), Deadline(timeout)
        with Shield(self._driver.waker.fire) as shield:
            while True:
                seen = self._driver.waker.fired
                applied = self._take_in(target)
                if applied is not None:
                    return applied
                if deadline.passed:
                    return False
                shield.deliver()
                wait(self._driver.waker, self._driver.links(), deadline.remaining, seen)

    def apply_weights(self, weights: Any) -> None:
        """Apply weights by hand.

        If they are those of the pending version, that is applied and acked. Other weights are written into the
        model as they are; then a pending version is refused, and `version` is None until the next one.

        Args:
            weights: a TensorDict or dict, nested or flat dotted.

        Raises:
            StateError: the receiver is closed.
            ConfigurationError: no model is registered, or an unsupported type of weights.
            LayoutError: they do not fit; nothing was changed.
        """
        target = self._destination()
        with self._serving, Shield(self._driver.waker.fire), self._driver.lock:
            next_state(RECEIVER_ROWS, self.state, ReceiverInput.REJECTED)
            # What was handed out is not overtaken now: the weights are probably its own.
            if self._out is None:
                self._driver.pump()
            pending = self._driver.pending
            if pending is not None and self._are_of(pending, weights):
                self._handed = None
                self._apply(target)
                return
            try:
                target.apply(weights)
            except SwapBroken:
                self._driver.spoil()
                raise
            self._driver.spoil()
            if pending is not None:
                self._refuse(pending, "other weights were applied by hand", "")

    @contextlib.contextmanager
    def serving(self) -> Iterator[int | None]:
        """Hold the version served: inside the block no other becomes live. Yields it.

        A `receive` meanwhile, in whichever thread, reads but applies nothing; it does so once the block is left.
        """
        try:
            with self._serving:
                outer, self._inside = self._inside, threading.get_ident()
                try:
                    yield self.version
                finally:
                    self._inside = outer
        finally:
            self._driver.waker.fire()

    def close(self) -> None:
        """Close for good. The model keeps the version it serves; the sender takes us off its roll."""
        with Shield(self._driver.waker.fire):
            self._deafen()
            self._driver.close()

    def _deafen(self) -> None:
        while self._listening:
            self._listening.pop()()

    # ------------------------------------------------------------------------------------------- reading

    @property
    def model(self) -> Any:
        """What the weights are applied to."""
        return self._model

    @property
    def version(self) -> int | None:
        """The version that the model serves, whole; None: none yet, or weights were applied by hand."""
        served = self._driver.data.served
        return served[1] if served else None

    @property
    def incarnation(self) -> int | None:
        """The sender's incarnation that `version` belongs to."""
        served = self._driver.data.served
        return served[0] if served else None

    @property
    def pipe(self) -> UserMessages:
        """The user's own messages on our pipe, with the methods of a connection.

        Raises:
            ConfigurationError: there is no pipe.
        """
        return self._scheme.user_messages(self._endpoint)

    def digest(self) -> bytes:
        """The xxh3-128 digest of what the model holds now, 16 bytes, computed as a sender computes it.

        Raises:
            ConfigurationError: no model is registered.
        """
        return self._destination().digest()

    # -------------------------------------------------------------------------------------------- copies

    def _travelling(self) -> tuple[str | None, Any]:
        return (self._model if isinstance(self._model, str) else None), (self._endpoint if pipes_travel() else None)

    def _arrived(self, own: tuple[str | None, Any]) -> None:
        self._model, endpoint = own
        if endpoint is not None:
            self.register_worker_transport(endpoint)

    # ----------------------------------------------------------------------------------------- internals

    def _destination(self) -> Target:
        if self._target is None:
            if self._model is None:
                raise ConfigurationError(
                    f"no model is registered for {self._model_id!r}: call register_model() with a module, a "
                    "TensorDict, a dict or a path on the context."
                )
            if isinstance(self._model, str):
                self._model = _resolve_model(self._context(), self._model)
            self._target = Target(self._model, self._scheme.apply_mode)
            self._driver.layout = self._target.layout
        return self._target

    def _are_of(self, pending: Pending, weights: Any) -> bool:
        """Whether weights given by hand are those of the pending version, as their digest tells."""
        read = read_weights(weights)
        if layout_of(read, pending.layout) != pending.layout:
            return False
        wanted = pending.update.digest or digest(pending.payload, pending.update.extras)
        return wanted == digest_of(read, pending.layout, encode_extras(read.extras()))

    def _take_in(self, target: Target) -> bool | None:
        """Read, and apply what is pending unless somebody holds the version served; None if nothing was decided.

        The serving lock comes before the driver's and is held until `version` names what is live.
        """
        free = self._serving.acquire(blocking=False)
        try:
            with self._driver.lock:
                self._driver.pump()
                held = not free or self._inside == threading.get_ident()
                if self.state is State.PENDING_ASYNC and not held:
                    return self._apply(target)
                self._check_links()
                return None
        finally:
            if free:
                self._serving.release()

    def _check_links(self) -> None:
        if self.state is State.CLOSED:
            next_state(RECEIVER_ROWS, self.state, ReceiverInput.UPDATE)
        if not self._driver.links() and (self._driver.ended or not self._listening):
            if self._driver.ended:
                raise TransportError(
                    f"model {self._model_id!r} has no sender any more: {self._driver.ended.rstrip('.')}. It keeps "
                    f"version {self.version}; register_worker_transport() gives it a new link."
                )
            next_state(RECEIVER_ROWS, self.state, ReceiverInput.UPDATE)

    def _apply(self, target: Target) -> bool:
        pending, stopwatch = self._driver.pending, Stopwatch()
        assert pending is not None
        try:
            digest = self._verified(pending)
            target.swap(target.stage(pending.layout, pending.payload, pending.update.extras))
        except SwapBroken as error:
            self._deafen()
            self._driver.break_down()
            raise self._broken(pending, error) from error
        except Exception as error:  # noqa: BLE001 - whatever a user's hook raises is told to the sender
            self._refuse(pending, str(error), traceback.format_exc())
            return False
        self._driver.take(pure.Applied(self._ack(pending, digest, stopwatch.seconds)))
        return True

    def _broken(self, pending: Pending, error: SwapBroken) -> WeightSyncError:
        return WeightSyncError(
            f"version {pending.update.version} of {self._model_id!r} was swapped in half and could not be undone: "
            f"the model serves nothing, the receiver is closed. Cause: {error}"
        )

    def _ack(self, pending: Pending, digest: bytes, seconds: float) -> Ack:
        return Ack(
            model_id=self._model_id,
            incarnation=pending.update.incarnation,
            version=pending.update.version,
            digest=digest,
            seconds=seconds,
        )

    def _verified(self, pending: Pending) -> bytes:
        """The digest of what arrived, if the sender named one."""
        if not pending.update.digest:
            # No digest would show what this process has written over the pages that it mapped for an older version.
            if self._scheme.apply_mode is Mode.MAP:
                pending.refresh()
            return b""
        found = digest(pending.payload, pending.update.extras)
        if found != pending.update.digest:
            pending.refresh()
            found = digest(pending.payload, pending.update.extras)
        if found != pending.update.digest:
            raise LayoutError(
                f"version {pending.update.version} arrived with digest {found.hex()}, but its sender named "
                f"{pending.update.digest.hex()}: it was damaged on the way. The old weights stay."
            )
        return found

    def _refuse(self, pending: Pending, reason: str, remote_traceback: str) -> None:
        self.last_refusal = reason
        logger.warning("model %r refused version %d: %s", self._model_id, pending.update.version, reason)
        self._driver.take(pure.Refused(self._refusal(pending, reason, remote_traceback)))

    def _serving_lock(self) -> threading.RLock:
        return self._serving
