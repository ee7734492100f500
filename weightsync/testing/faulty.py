"""`FaultyTransport`: a link that misbehaves as far as its declared delivery allows, and no further."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from weightsync.errors import ConfigurationError, TransportError
from weightsync.options import is_number
from weightsync.protocol._tables import Delivery
from weightsync.protocol.messages import Message, Update
from weightsync.transports.base import Link, Received, Waker, require_link
from weightsync.transports.buffers import Buffer


@dataclass(slots=True)
class _Held:
    """A message that was not sent yet, with a copy of its payload, and the number of calls until it is sent."""

    message: Message
    payload: Buffer | None
    calls: int


class FaultyTransport:
    """Wraps one end of a link. Messages sent there are dropped, duplicated, reordered, delayed or cut off.

    Wrap both ends alike, so that both declare the same delivery. The first message over an end is never touched: a link
    that reorders must hold back messages that would overtake the handshake, and a link that loses messages must not
    lose it.

    Args:
        link: the end to wrap.
        delivery: what the wrapped link promises. No fault may break that promise.
        seed: the seed of the random faults; the same seed does the same to the same sends.
        drop: the probability that a message is lost.
        duplicate: the probability that a message arrives twice.
        delay: the probability that a message is sent some calls later. Messages sent in between overtake it where
            the delivery allows that.

    Raises:
        ConfigurationError: ``delivery`` rules a fault out, or an argument is of another type.
    """

    def __init__(
        self,
        link: Link,
        delivery: Delivery,
        *,
        seed: int = 0,
        drop: float = 0.0,
        duplicate: float = 0.0,
        delay: float = 0.0,
    ) -> None:
        require_link(link, "link= is")
        if not isinstance(delivery, Delivery):
            raise ConfigurationError(f"delivery= is {delivery!r}: give a weightsync.Delivery, such as the link's own.")
        whole: Any = seed  # numpy's integers are no ints
        if not isinstance(whole, Integral) or not is_number(whole):
            raise ConfigurationError(f"seed= is {seed!r}: give an int.")
        for name, asked in (("drop", drop), ("duplicate", duplicate), ("delay", delay)):
            if not is_number(asked) or not 0 <= asked <= 1:
                raise ConfigurationError(f"{name}= is {asked!r}: give a probability, from 0 to 1.")
        for asked, allowed, fault in (
            (drop, delivery.loses, "drop"),
            (duplicate, delivery.duplicates, "duplicate"),
        ):
            if asked and not allowed:
                raise ConfigurationError(f"a link of delivery {delivery.name} promises not to {fault} messages.")
        self.link = link
        self.delivery = delivery
        self._draw = random.Random(int(seed))
        self._drop, self._duplicate, self._delay = drop, duplicate, delay
        self._held: list[_Held] = []
        self._waker = Waker()
        self._begun = False
        self._cut = False
        self._dead = False
        self._closed = False

    @property
    def peer(self) -> str:
        """Who is at the other end."""
        return self.link.peer

    def cut(self) -> None:
        """Break the link here. The other end learns of it from its own wrapped link."""
        self._cut = True
        self._held.clear()
        self.link.close()
        self._waker.fire()

    def release(self) -> None:
        """Send all that is held back, if the other end can still receive it."""
        held, self._held = self._held, []
        with contextlib.suppress(TransportError):
            for each in held:
                self.link.send(each.message, each.payload)
            self.link.flush()

    def send(self, message: Message, payload: Buffer | None = None) -> None:
        """Send the message, with a random fault: see `Link.send`."""
        self._require_alive()
        first, self._begun = not self._begun, True
        if first:
            return self.link.send(message, payload)
        if self._draw.random() < self._drop:
            return None
        for _ in range(2 if self._draw.random() < self._duplicate else 1):
            waits = bool(self._held) and not self.delivery.reorders
            if waits or self._draw.random() < self._delay:
                self._held.append(_Held(message, _copy_payload(message, payload), self._draw.randint(1, 3)))
                self._waker.fire()
            else:
                self.link.send(message, payload)
        return None

    def flush(self) -> bool:
        """Write what is queued, and what has been held back long enough: see `Link.flush`."""
        self._require_alive()
        self._send_due()
        return self.link.flush() and not self._held

    def _send_due(self) -> None:
        """Send what was held back long enough; in order where the delivery promises order."""
        self._waker.clear()
        for held in list(self._held):
            held.calls -= 1
            if held.calls <= 0 and (self.delivery.reorders or held is self._held[0]):
                self._held.remove(held)
                self.link.send(held.message, held.payload)
        if self._held:
            self._waker.fire()

    def receive(self) -> list[Received]:
        """See `Link.receive`."""
        self._require_whole()
        try:
            return self.link.receive()
        except TransportError:
            self._dead = True
            raise

    def waitables(self) -> list[int]:
        """The link's waitables, and one that is readable while something is held back: see `Link.waitables`."""
        if self._closed:
            return []
        return [self._waker.fileno(), *self.link.waitables()]

    def wants_write(self) -> int | None:
        """See `Link.wants_write`."""
        return None if self._closed else self.link.wants_write()

    def watch(self, pid: int, started: int) -> None:
        """See `Link.watch`."""
        self.link.watch(pid, started)

    def close(self) -> None:
        """Close the link. Messages held back are sent first, unless the link may lose them: see `Link.close`."""
        if not self._closed and not self.delivery.loses:
            self.release()
        self._closed = True
        self._held.clear()
        self.link.close()
        self._waker.close()

    def _require_whole(self) -> None:
        if self._closed:
            raise TransportError(f"The link to {self.peer} is closed.")
        if self._cut:
            raise TransportError(f"The link to {self.peer} was cut.")

    def _require_alive(self) -> None:
        self._require_whole()
        if self._dead:
            raise TransportError(f"The link to {self.peer} is dead.")


def _copy_payload(message: Message, payload: Buffer | None) -> Buffer | None:
    """A copy of the payload: a message held back pins no buffer."""
    if payload is None or not isinstance(message, Update):
        return None
    copy = Buffer(message.nbytes)
    copy.view[: message.nbytes] = payload.view[: message.nbytes]
    return copy
