"""Manual acks, for loops that apply weights themselves: they take an update, apply it, and answer for it."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

from weightsync.clock import Deadline, Timeout
from weightsync.engine.applier import Applier
from weightsync.engine.driver import Shield
from weightsync.engine.listening import Listening
from weightsync.engine.receiver_driver import Pending, ReceiverDriver
from weightsync.engine.serving_lock import ServedModel
from weightsync.errors import ConfigurationError, reason_of
from weightsync.protocol import receiver as pure
from weightsync.protocol.messages import Ack
from weightsync.protocol.report import Evidence
from weightsync.weights.unpacking import present_as

#: The only text of a manual ack that says that the weights are applied.
UPDATED = "updated"
_UNANSWERED = "Nothing has changed: an update that was taken is still to be answered."


@dataclass(frozen=True, slots=True, eq=False)
class TakenUpdate:
    """A pending version that was taken by `take_update`, and the digest that was computed of it."""

    pending: Pending
    digest: bytes


class ManualAck:
    """Gives updates to the caller as weights. Each stays pending until it is answered.

    The methods are those of `WeightReceiver` by the same names, which documents them.

    Args:
        served: the model; others may be serving it.
    """

    def __init__(self, driver: ReceiverDriver, served: ServedModel, listening: Listening, applier: Applier) -> None:
        self._driver = driver
        self._served = served
        self._listening = listening
        self._applier = applier
        self._taken: TakenUpdate | None = None

    def take_update(self, timeout: float | None) -> Any:
        """See `WeightReceiver.take_update`."""
        self._require_no_background_reader("take_update")
        deadline = Deadline(timeout)
        weights: Any = None
        try:
            with Shield(self._driver.waker.fire) as shield:
                while True:
                    fired = self._driver.waker.fired
                    weights = self._take_pending()
                    if weights is not None or deadline.passed:
                        return weights
                    shield.deliver()
                    self._driver.wait(deadline.nap, fired)
        except BaseException:
            if weights is not None:  # a signal that came meanwhile was handled, and its handler has raised
                self._taken = None
            raise

    def has_update(self) -> bool:
        """See `WeightReceiver.has_update`."""
        self._require_no_background_reader("has_update")
        with Shield(self._driver.waker.fire), self._driver.lock:
            self._driver.pump()
            return self._driver.pending is not None and self._unanswered is None

    def _require_no_background_reader(self, method: str) -> None:
        """Refuse a call that would take updates away from the background reader."""
        if self._listening.background_reader is not None:
            raise self._driver.refused(
                method,
                "connect() has started a thread that receives in the background and applies updates. Use receive(); "
                "or do not call connect(), and apply updates by hand.",
            )

    def _take_pending(self) -> Any:
        with self._driver.lock:
            self._driver.pump()
            pending = self._driver.pending
            if pending is None or pending is self._unanswered:
                self._listening.check("take_update")
                return None
            try:
                digest = self._applier.verified(pending)
                weights = present_as(pending.update.form, pending.layout, pending.on_host(), pending.update.extras)
            except Exception as error:  # noqa: BLE001 - the refusal carries whatever is wrong with it
                self._applier.refuse_for(pending, error)
                return None
            self._taken = TakenUpdate(pending, digest)
            return weights

    @property
    def _unanswered(self) -> Pending | None:
        """The pending version, if it was taken."""
        taken = self._taken
        return taken.pending if taken is not None and taken.pending is self._driver.pending else None

    @property
    def owes_ack(self) -> bool:
        """See `WeightReceiver.owes_ack`."""
        with self._driver.lock:
            return self._unanswered is not None

    def ack(self, message: str, timeout: float | Timeout | None) -> None:
        """See `WeightReceiver.ack`."""
        deadline = Deadline(timeout)
        if not isinstance(message, str):
            raise ConfigurationError(
                f"message= is {message!r}: give a str, {UPDATED!r} if the update is applied. {_UNANSWERED}"
            )
        with self._served.serving.alone(deadline, "ack"), Shield(self._driver.waker.fire), self._driver.lock:
            taken = self._taken
            if taken is None or self._unanswered is None:
                raise self._driver.refused(
                    "ack",
                    "no update that was taken is pending: take_update() was not called, the update is answered "
                    "already, a newer one superseded it, or its sender is gone. take_update() returns the next one.",
                )
            self._taken = None
            if message == UPDATED:
                self._driver.take(pure.Applied(self._ack_of(taken)))
            else:
                refusal = self._applier.refusal(taken.pending, manual_refusal_reason(message), "", Evidence.CALL)
                self._driver.take(pure.Refused(refusal))

    def nack(self, error: BaseException, timeout: float | Timeout | None) -> None:
        """See `WeightReceiver.nack`."""
        deadline = Deadline(timeout)
        if not isinstance(error, BaseException):
            raise ConfigurationError(
                f"error= is {error!r}: give an exception, such as RuntimeError(...). {_UNANSWERED}"
            )
        with self._served.serving.alone(deadline, "nack"), Shield(self._driver.waker.fire), self._driver.lock:
            pending, self._taken = self._unanswered, None
            if pending is not None:
                trace = "".join(traceback.format_exception(error))
                self._driver.take(pure.Refused(self._applier.refusal(pending, reason_of(error), trace, Evidence.CALL)))

    def drop_taken(self) -> None:
        """Note that the update that was taken is answered in another way."""
        self._taken = None

    def _ack_of(self, taken: TakenUpdate) -> Ack:
        update = taken.pending.update
        self._served.applied, self._served.layout = update.digest, taken.pending.layout
        return Ack(
            model_id=self._driver.model_id,
            incarnation=update.incarnation,
            version=update.version,
            digest=taken.digest,
            evidence=Evidence.CALL,
        )


def manual_refusal_reason(message: str) -> str:
    """The reason of a refusal that stands for a manual ack with another text."""
    return f"answered by hand with {message!r}, not {UPDATED!r}"
