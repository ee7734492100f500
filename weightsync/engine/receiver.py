"""`WeightReceiver`: takes in the weights of one model, applies them whole, and answers for each version."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from weightsync.clock import Deadline, Timeout
from weightsync.engine.manual_ack import ManualAck
from weightsync.engine.receiver_driver import Pending
from weightsync.engine.serving_lock import PATIENCE
from weightsync.engine.signals import Shield
from weightsync.errors import WeightSyncError
from weightsync.protocol import receiver as pure
from weightsync.weights.extra_state import encode_extras
from weightsync.weights.packing import digest, digest_of
from weightsync.weights.reading import layout_of, read_weights
from weightsync.weights.target import SwapBroken, Target


class WeightReceiver(ManualAck):
    """Takes in the weights of one model in a worker.

    A strict state machine (`state`). Versions are applied in the thread that calls `receive`, whole or not at all;
    every version that arrives is answered. A pickled, copied or forked receiver is `uninitialized`.

    Args:
        scheme: the scheme that wires it.
    """

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
            SenderClosed: (a TransportError) the sender closed the link in good order. The model keeps the version it
                serves; a new link may be registered.
            TransportError: the sender is gone without a word. Else the same.
            ProtocolError: the peer broke the protocol; its link is down.
        """
        if self._attendant is not None:
            return self._attendant.receive(timeout)
        deadline = Deadline(timeout)
        with Shield(self._driver.waker.fire) as shield:
            while True:
                seen = self._driver.waker.fired
                applied = self.receive_and_apply_here()
                if applied is not None:
                    return applied
                if deadline.passed:
                    return False
                shield.deliver()
                self._driver.wait(deadline.nap, seen)

    def apply_weights(
        self, weights: Any, *, inplace: bool = True, timeout: float | Timeout | None = Timeout.DEFAULT
    ) -> None:
        """Apply weights by hand.

        If they are those of the pending version, that is applied and acked. Other weights are written into the
        model as they are; then a pending version is refused, and `version` is None until the next one.

        Args:
            weights: a TensorDict or dict, nested or flat dotted.
            inplace: if false, other weights than the pending version's get tensors of their own, as
                `WeightStrategy.apply_weights` says.
            timeout: seconds to wait for other threads that serve the model; None: for ever; default:
                `WEIGHTSYNC_TIMEOUT` or 60.

        Raises:
            ModelBusyError: (a TimeoutError) they served it until then; nothing was changed.
            StateError: the receiver is closed.
            ConfigurationError: no model is registered, or an unsupported type of weights.
            LayoutError: they do not fit; nothing was changed.
        """
        deadline, target = Deadline(timeout), self._destination()
        with self._serving.alone(deadline, "apply_weights"), Shield(self._driver.waker.fire), self._driver.lock:
            self._driver.require_open("apply_weights")
            # What was handed out is not overtaken now: the weights are probably its own.
            if self._out is None and self._attendant is None:
                self._driver.pump()
            pending = self._driver.pending
            if pending is not None and self._are_of(pending, weights):
                self._handed = None
                self._apply(target)
                return
            self._write(target, weights, inplace)
            self._driver.take(pure.Invalidate())
            if pending is not None:
                self._refuse(pending, "other weights were applied by hand", "")

    def _write(self, target: Target, weights: Any, inplace: bool) -> None:
        try:
            if inplace:
                target.apply(weights)
            else:
                self._scheme.strategy.apply_weights(target.destination, weights, inplace=False)
        except SwapBroken:
            self._driver.take(pure.Invalidate())
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
        self._end(self._driver.close)

    def fail(self, error: BaseException) -> None:
        """Close for good, since ``error`` was raised: no goodbye, the sender is told what failed.

        This worker stays on the sender's roll, LOST in each report, until it joins again or is removed. Leaving a
        ``with receiver:`` block by an exception does this.
        """
        told = "".join(traceback.format_exception_only(error)).strip()
        trace = "".join(traceback.format_exception(error))
        self._end(lambda: self._driver.fail(told, trace))

    def _end(self, close: Callable[[], None]) -> None:
        if self._attendant is not None:
            self._attendant.stop()
        with Shield(self._driver.waker.fire):
            self._deafen()
            close()
            self._staged = None

    def _are_of(self, pending: Pending, weights: Any) -> bool:
        """Whether weights given by hand are those of the pending version, as their digest tells."""
        read = read_weights(weights)
        if pending.untaken or layout_of(read, pending.layout) != pending.layout:
            return False
        wanted = pending.update.digest or digest(pending.payload, pending.update.extras)
        return wanted == digest_of(read, pending.layout, encode_extras(read.extras()))
