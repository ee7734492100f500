"""`WeightReceiver`: takes in the weights of one model, applies them whole, and answers for each version."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from weightsync._tables import RECEIVER_ROWS, ReceiverInput, State
from weightsync.byhand import ByHand
from weightsync.driving.interrupts import Shield
from weightsync.driving.receiver import Pending, ReceiverDriver
from weightsync.errors import ConfigurationError, LayoutError, StateError, TransportError, WeightSyncError
from weightsync.extras import encode_extras
from weightsync.machine import next_state
from weightsync.messages import Ack
from weightsync.packing import digest, digest_of
from weightsync.paths import _resolve_model
from weightsync.protocol import receiver as pure
from weightsync.serving import PATIENCE, ServingLock
from weightsync.side import pipes_travel
from weightsync.target import Mode, Staged, SwapBroken, Target
from weightsync.timing import Deadline, Stopwatch
from weightsync.transports.base import Link, wait
from weightsync.transports.user import UserMessages
from weightsync.weights import layout_of, read_weights

logger = logging.getLogger("weightsync")


class Attendant(Protocol):
    """Reads a receiver's links for it, on a thread of its own."""

    def receive(self, timeout: float | None) -> bool:
        """Wait for what comes of it: see `WeightReceiver.receive`."""

    def link_added(self) -> None:
        """There is one more link to read."""

    def model_set(self, model: Any) -> None:
        """Another model is served from now on."""

    def applied(self) -> None:
        """A version went live, or was refused, on whichever thread."""

    def hands_on(self) -> bool:
        """Whether what is applied is handed on, and answered for only afterwards."""

    def stop(self) -> None:
        """Read no more, and end the thread; waits for it, except on itself."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A version that has been verified and staged, and only has to be swapped in."""

    pending: Pending
    staged: Staged
    digest: bytes
    seconds: float


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
        self._handed = None
        self._staged: Ready | None = None
        self._serving = ServingLock()
        self._attendant: Attendant | None = None
        #: Why the last version that was refused did not fit; empty: none was refused.
        self.last_refusal = ""
        #: Why the model serves nothing any more; None: it does.
        self.broken: WeightSyncError | None = None

    # ------------------------------------------------------------------------------------------- wiring

    def register_model(self, model: Any) -> None:
        """Say what the weights are applied to.

        A model set anew serves the version of the one before only if it holds the very same weights; otherwise
        `version` is None until the next one.

        Args:
            model: an `nn.Module`, a TensorDict, a dict of tensors, or a path that is resolved on the context when
                it is needed, such as ``"env.transform[0]"``.
        """
        with self._serving.alone(), self._driver.lock:
            self._model = model
            self._target = self._staged = None
            if not isinstance(model, str):
                self._destination()
            if self.version is not None and (self._target is None or self._target.digest() != self._served_digest()):
                self._driver.spoil()
        if self._attendant is not None:
            self._attendant.model_set(model)

    def _served_digest(self) -> bytes | None:
        answer = self._driver.data.answer
        return answer.digest if isinstance(answer, Ack) and answer.digest else None

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
        self._endpoint = pipe_or_context
        self._listening.append(self._scheme.listen(pipe_or_context, self._model_id, self._accept))

    def _accept(self, link: Link) -> None:
        self._driver.add_link(link)
        if self._attendant is not None:
            self._attendant.link_added()

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
        if self._attendant is not None:
            return self._attendant.receive(timeout)
        target, deadline = self._destination(), Deadline(timeout)
        with Shield(self._driver.waker.fire) as shield:
            while True:
                seen = self._driver.waker.fired
                applied = self.take_in(target)
                if applied is not None:
                    return applied
                if deadline.passed:
                    return False
                shield.deliver()
                wait(self._driver.waker, self._driver.links(), deadline.remaining, seen)

    def apply_weights(self, weights: Any, *, inplace: bool = True) -> None:
        """Apply weights by hand.

        If they are those of the pending version, that is applied and acked. Other weights are written into the
        model as they are; then a pending version is refused, and `version` is None until the next one.

        Args:
            weights: a TensorDict or dict, nested or flat dotted.
            inplace: if false, other weights than the pending version's get tensors of their own, as
                `WeightStrategy.apply_weights` says.

        Raises:
            StateError: the receiver is closed.
            ConfigurationError: no model is registered, or an unsupported type of weights.
            LayoutError: they do not fit; nothing was changed.
        """
        target = self._destination()
        with self._serving.alone(), Shield(self._driver.waker.fire), self._driver.lock:
            next_state(RECEIVER_ROWS, self.state, ReceiverInput.REJECTED)
            # What was handed out is not overtaken now: the weights are probably its own.
            if self._out is None and self._attendant is None:
                self._driver.pump()
            pending = self._driver.pending
            if pending is not None and self._are_of(pending, weights):
                self._handed = None
                self._apply(target)
                return
            self._write(target, weights, inplace)
            self._driver.spoil()
            if pending is not None:
                self._refuse(pending, "other weights were applied by hand", "")

    def _write(self, target: Target, weights: Any, inplace: bool) -> None:
        try:
            if inplace:
                target.apply(weights)
            else:
                self._scheme.strategy.apply_weights(target.destination, weights, inplace=False)
        except SwapBroken:
            self._driver.spoil()
            raise

    @contextlib.contextmanager
    def serving(self) -> Iterator[int | None]:
        """Hold the version served: inside the block no other becomes live. Yields it.

        A `receive` meanwhile, in whichever thread, reads but applies nothing; it does so once the block is left.
        Where a thread receives in the background, what it has staged goes live as the outermost block begins.

        Raises:
            WeightSyncError: a swap failed half way, now or before: the model serves nothing.
        """
        self.begin_serving(None)
        try:
            yield self.version
        finally:
            self.end_serving()

    def begin_serving(self, frame: FrameType | None) -> None:
        """A forward begins: first it makes live what is staged, so that a busy worker never starves a swap.

        Args:
            frame: its call.

        Raises:
            WeightSyncError: a swap failed half way, now or before: the model serves nothing.
        """
        if self.broken is not None:
            raise WeightSyncError(str(self.broken)) from self.broken
        if self._staged is not None and self._attendant is not None and not self._serving.mine():
            with Shield(self._driver.waker.fire):
                self._swap_staged(PATIENCE)
        self._serving.enter(frame)

    def end_serving(self) -> None:
        """What was begun last ends; whoever waits to swap is woken."""
        self._serving.leave()
        if self._driver.data.pending is not None:
            self._driver.waker.fire()

    def close(self) -> None:
        """Close for good. The model keeps the version it serves; the sender takes us off its roll."""
        if self._attendant is not None:
            self._attendant.stop()
        with Shield(self._driver.waker.fire):
            self._deafen()
            self._driver.close()
            self._staged = None

    def attend(self, attendant: Attendant | None) -> None:
        """From now on ``attendant`` is the only one who reads our links; None: `receive` does again."""
        self._attendant = attendant

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

    @property
    def _transport(self) -> Any:
        """What TorchRL calls so: its transport class, over this receiver.

        Raises:
            ConfigurationError: there is no link, or the scheme has no such class.
        """
        return self._scheme.transport_of(self, self._endpoint)

    @property
    def driver(self) -> ReceiverDriver:
        """The driver, for an attendant."""
        return self._driver

    def target(self) -> Target:
        """What the weights are applied to, as a target.

        Raises:
            ConfigurationError: no model is registered.
        """
        return self._destination()

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

    def take_in(self, target: Target) -> bool | None:
        """Read, stage, and make live what is pending unless somebody holds the version served.

        The serving lock comes before the driver's and is held until `version` names what is live.

        Returns:
            Whether a version went live; False: it was refused; None: nothing was decided.
        """
        with self._driver.lock:
            self._driver.pump()
            if self._staged is not None and self._staged.pending is not self._driver.pending:
                self._staged = None
            if self._appliable() and not self._stage(target):
                return False
        applied = self._swap_staged(0.0) if self._staged is not None else None
        with self._driver.lock:
            if applied is None:
                self.check_links()
            return applied

    def _appliable(self) -> bool:
        return self.state is State.PENDING_ASYNC and not self._driver.holding

    def _swap_staged(self, timeout: float) -> bool | None:
        """Make live what is staged, once nobody serves; None: somebody does, or there is nothing."""
        with self._serving.swapping(timeout) as free, self._driver.lock:
            if not free or not self._appliable() or self._target is None:
                return None
            return self._apply(self._target)

    def check_links(self) -> None:
        """Check that there is somebody to receive from, or will be.

        Raises:
            StateError: the receiver is closed, or has no link yet.
            TransportError: the sender is gone.
        """
        if self.state is State.CLOSED:
            next_state(RECEIVER_ROWS, self.state, ReceiverInput.UPDATE)
        if not self._driver.links() and (self._driver.ended or not self._listening):
            if self._driver.ended:
                raise TransportError(
                    f"model {self._model_id!r} has no sender any more: {self._driver.ended.rstrip('.')}. It keeps "
                    f"version {self.version}; register_worker_transport() gives it a new link."
                )
            next_state(RECEIVER_ROWS, self.state, ReceiverInput.UPDATE)

    def _stage(self, target: Target) -> bool:
        """Verify and validate what is pending, beside what is live; False: it was refused."""
        pending, stopwatch = self._driver.pending, Stopwatch()
        assert pending is not None
        if self._staged is not None and self._staged.pending is pending:
            return True
        try:
            digest = self._verified(pending)
            staged = target.stage(pending.layout, pending.payload, pending.update.extras)
        except Exception as error:  # noqa: BLE001 - whatever a user's hook raises is told to the sender
            self._refuse(pending, str(error), traceback.format_exc())
            return False
        self._staged = Ready(pending, staged, digest, stopwatch.seconds)
        return True

    def _apply(self, target: Target) -> bool:
        """Make live what is pending. The serving lock and the driver's are held."""
        if not self._stage(target):
            return False
        ready, stopwatch = self._staged, Stopwatch()
        assert ready is not None
        try:
            target.swap(ready.staged)
        except SwapBroken as error:
            raise self._break_down(ready, error) from error
        except Exception as error:  # noqa: BLE001 - whatever a user's hook raises is told to the sender
            self._refuse(ready.pending, str(error), traceback.format_exc())
            return False
        self._staged = None
        if self._attendant is not None and self._attendant.hands_on():
            self._driver.hold()
        self._driver.take(pure.Applied(self._ack(ready.pending, ready.digest, ready.seconds + stopwatch.seconds)))
        self._decided()
        return True

    def _break_down(self, ready: Ready, error: SwapBroken) -> WeightSyncError:
        self.broken = broken = self._broken(ready.pending, error)
        self._staged = None
        self._deafen()
        self._driver.break_down()
        self._decided()
        return broken

    def _decided(self) -> None:
        if self._attendant is not None:
            self._attendant.applied()

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
        self._staged = None
        logger.warning("model %r refused version %d: %s", self._model_id, pending.update.version, reason)
        self._driver.take(pure.Refused(self._refusal(pending, reason, remote_traceback)))
        self._decided()

    def _require_unattended(self, asked: str) -> None:
        if self._attendant is not None:
            hint = (
                "connect() has started a thread that receives in the background and applies what comes: "
                "use receive(), or do not connect() and apply by hand."
            )
            raise StateError("receiver", f"{self.state.value}, attended", asked, ["receive", "apply_weights"], hint)

    def _serving_lock(self) -> contextlib.AbstractContextManager[None]:
        return self._serving.alone()
