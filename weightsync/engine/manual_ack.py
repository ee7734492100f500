"""What receivers offer to loops that apply weights themselves: an update is handed out, and answered by hand."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

from weightsync.clock import Deadline, Timeout
from weightsync.engine.applier import Applier
from weightsync.engine.receiver_driver import Pending
from weightsync.engine.signals import Shield
from weightsync.errors import warn_renamed
from weightsync.protocol import receiver as pure
from weightsync.protocol.messages import Ack
from weightsync.protocol.report import Evidence
from weightsync.transports.base import Link
from weightsync.weights.unpacking import present_as

#: The only text that an ack by hand may have, if it is to say that the weights are applied.
UPDATED = "updated"


@dataclass(frozen=True, slots=True, eq=False)
class Handed:
    """A pending version that was handed out, with the digest that was found of it."""

    pending: Pending
    digest: bytes


class ManualAck(Applier):
    """A receiver whose updates may be handed out as weights; each stays pending until it is answered."""

    def _begin(self) -> None:
        super()._begin()
        self._handed: Handed | None = None

    def take_update(self, timeout: float | None = 0.0) -> Any:
        """The weights of an update that has arrived and was not handed out yet; needs no registered model.

        The update stays pending until `ack`, or `apply_weights` with these weights.

        Args:
            timeout: seconds to wait for one; 0: do not wait; None: until one comes or the sender is gone.

        Returns:
            A TensorDict or a dict, fresh, of the kind that the sender was given; None: none came. An update that was
            damaged on the way is refused, and the sender told.

        Raises:
            StateError: the receiver is closed, or has no link; or a thread receives in the background.
            TransportError: the sender is gone.
            ProtocolError: the peer broke the protocol; its link is down.
        """
        self._require_no_background_reader("take_update")
        deadline = Deadline(timeout)
        with Shield(self._driver.waker.fire) as shield:
            while True:
                seen = self._driver.waker.fired
                weights = self._taken_out()
                if weights is not None or deadline.passed:
                    return weights
                shield.deliver()
                self._driver.wait(deadline.nap, seen)

    def has_update(self) -> bool:
        """Whether an update has arrived that was not handed out yet. Never waits.

        Raises:
            StateError: a thread receives in the background.
            ProtocolError: the peer broke the protocol; its link is down.
        """
        self._require_no_background_reader("has_update")
        with Shield(self._driver.waker.fire), self._driver.lock:
            self._driver.pump()
            return self._driver.pending is not None and self._out is None

    def _require_no_background_reader(self, asked: str) -> None:
        """Refuse what would take updates away from the thread that receives in the background."""
        if self._attendant is not None:
            raise self._driver.refused(
                asked,
                "connect() has started a thread that receives in the background and applies what comes. Use receive(), "
                "or do not call connect() and apply by hand.",
            )

    def links(self) -> list[Link]:
        """The links that are open, to be waited for."""
        return self._driver.links()

    def _taken_out(self) -> Any:
        with self._driver.lock:
            self._driver.pump()
            pending = self._driver.pending
            if pending is None or pending is self._out:
                self.check_links()
                return None
            try:
                digest = self._verified(pending)
                weights = present_as(pending.update.form, pending.layout, pending.payload, pending.update.extras)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with it is told to the sender
                self._refuse_for(pending, error)
                return None
            self._handed = Handed(pending, digest)
            return weights

    @property
    def _out(self) -> Pending | None:
        """The pending version, if it was handed out."""
        held = self._handed
        return held.pending if held is not None and held.pending is self._driver.pending else None

    @property
    def owes_ack(self) -> bool:
        """Whether an update that was handed out is pending."""
        with self._driver.lock:
            return self._out is not None

    def ack(self, message: str = UPDATED, *, timeout: float | Timeout | None = Timeout.DEFAULT) -> None:
        """Answer by hand for the update that was handed out: the outcome's evidence is `CALL`.

        Args:
            message: "updated": it is applied. Any other text tells the sender that it is not.
            timeout: seconds to wait for other threads that serve the model; None: for ever; default:
                `WEIGHTSYNC_TIMEOUT` or 60.

        Raises:
            ModelBusyError: (a TimeoutError) they served it until then; nothing was answered.
            StateError: no update that was handed out is pending: it was answered, overtaken, or its link went down.
        """
        deadline = Deadline(timeout)
        with self._serving.alone(deadline, "ack"), Shield(self._driver.waker.fire), self._driver.lock:
            handed = self._handed
            if handed is None or self._out is None:
                raise self._driver.refused(
                    "ack",
                    "no update that was handed out is pending: none was, it is answered already, a newer one overtook "
                    "it, or its sender is gone. take_update() gives the next one.",
                )
            self._handed = None
            if message == UPDATED:
                self._driver.take(pure.Applied(self._acked_by_hand(handed)))
            else:
                self._driver.take(pure.Refused(self._refusal(handed.pending, other_text(message), "", Evidence.CALL)))

    def nack(self, error: BaseException, *, timeout: float | Timeout | None = Timeout.DEFAULT) -> None:
        """Answer by hand that the update that was handed out could not be applied; nothing happens if none is pending.

        Args:
            error: why; the sender is told its text and its traceback.
            timeout: as for `ack`.

        Raises:
            ModelBusyError: as `ack`.
        """
        deadline = Deadline(timeout)
        with self._serving.alone(deadline, "nack"), Shield(self._driver.waker.fire), self._driver.lock:
            pending, self._handed = self._out, None
            if pending is not None:
                told = "".join(traceback.format_exception(error))
                self._driver.take(pure.Refused(self._refusal(pending, str(error), told, Evidence.CALL)))

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

    def _acked_by_hand(self, handed: Handed) -> Ack:
        update = handed.pending.update
        return Ack(
            model_id=self._model_id,
            incarnation=update.incarnation,
            version=update.version,
            digest=handed.digest,
            evidence=Evidence.CALL,
        )


def other_text(message: str) -> str:
    """The reason of a refusal that stands for an ack by hand with another text."""
    return f"answered by hand with {message!r}, not {UPDATED!r}"
