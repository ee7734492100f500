"""Links inside one process, over a network on which a test delays, loses and duplicates messages, and cuts links."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from dataclasses import dataclass
from enum import Enum

from weightsync.errors import ConfigurationError, TransportError
from weightsync.protocol import codec
from weightsync.protocol._tables import Delivery
from weightsync.protocol.messages import Message, Update
from weightsync.transports.base import Payloads, Received, Waker
from weightsync.transports.buffers import Buffer, Pins


class Side(Enum):
    """One end of a pair of links."""

    FIRST = "first"
    SECOND = "second"

    @property
    def other(self) -> Side:
        """The other end."""
        return Side.SECOND if self is Side.FIRST else Side.FIRST


class Pace(Enum):
    """When a sent message arrives."""

    #: Immediately and in order.
    PROMPT = "prompt"
    #: When the test delivers it.
    HELD = "held"


@dataclass(frozen=True, slots=True)
class Parcel:
    """A message in flight."""

    number: int
    to: Side
    received: Received


class Network:
    """The network between the two ends of a pair of links, and the faults that a test causes on it.

    The network keeps what its delivery guarantees: asking for any other fault raises ConfigurationError.

    Args:
        delivery: what the network may do to messages.
        pace: when a sent message arrives.
    """

    def __init__(self, delivery: Delivery, pace: Pace = Pace.PROMPT) -> None:
        self.delivery = delivery
        self.pace = pace
        self.lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._flying: list[Parcel] = []
        self._inboxes: dict[Side, deque[Received]] = {side: deque() for side in Side}
        self._wakers: dict[Side, Waker] = {}
        self._crashed: set[Side] = set()
        self._ended: dict[Side, str] = {}

    @property
    def in_flight(self) -> tuple[Parcel, ...]:
        """The messages that were sent and have not arrived, oldest first."""
        return tuple(self._flying)

    def deliverable(self) -> tuple[Parcel, ...]:
        """The messages that may arrive next: all in flight, or only the oldest to each side if the link keeps order."""
        if self.delivery.reorders:
            return self.in_flight
        oldest: dict[Side, Parcel] = {}
        for parcel in self._flying:
            oldest.setdefault(parcel.to, parcel)
        return tuple(oldest.values())

    def deliver(self, parcel: Parcel) -> None:
        """Deliver a message."""
        with self.lock:
            self._require(parcel in self.deliverable(), "order")
            self._flying.remove(parcel)
            self._inboxes[parcel.to].append(parcel.received)
            self._wake(parcel.to)

    def deliver_all(self) -> None:
        """Deliver everything in flight, oldest first."""
        with self.lock:
            while self._flying:
                self.deliver(self._flying[0])

    def drop(self, parcel: Parcel) -> None:
        """Lose a message without breaking the link."""
        self._require(self.delivery.loses, "to lose nothing")
        self._flying.remove(parcel)

    def duplicate(self, parcel: Parcel) -> Parcel:
        """Put a copy of a message in flight."""
        self._require(self.delivery.duplicates, "to duplicate nothing")
        twin = Parcel(next(self._numbers), parcel.to, parcel.received)
        self._flying.append(twin)
        return twin

    def _require(self, allowed: bool, promised: str) -> None:
        if not allowed:
            raise ConfigurationError(f"A network of delivery {self.delivery.name} promised {promised}.")

    def cut(self) -> None:
        """Break the link: messages in flight are lost. Both ends live on, and notice if the delivery loses nothing."""
        with self.lock:
            self._flying.clear()
            for side in Side:
                self._end(side, "was cut")

    def crash(self, side: Side) -> None:
        """Kill the process at this side: messages in flight are lost. The other end notices if nothing may get lost."""
        with self.lock:
            self._flying.clear()
            self._crashed.add(side)
            self._inboxes[side].clear()
            self._end(side.other, "has ended: its process is dead")

    def crashed(self, side: Side) -> bool:
        """Whether the process at this side is dead."""
        return side in self._crashed

    def post(self, to: Side, received: Received) -> None:
        """Put a message in flight. Called by the links."""
        with self.lock:
            self.require_alive(to.other)
            if to in self._crashed:
                return
            parcel = Parcel(next(self._numbers), to, received)
            self._flying.append(parcel)
            if self.pace is Pace.PROMPT:
                self.deliver(parcel)

    def take(self, side: Side) -> list[Received]:
        """Take the messages that have arrived at this side. Called by the links."""
        with self.lock:
            if side in self._wakers:
                self._wakers[side].clear()
            inbox = self._inboxes[side]
            if not inbox and not any(parcel.to is side for parcel in self._flying):
                self.require_alive(side)
            arrived = list(inbox)
            inbox.clear()
            if side in self._ended:
                self._wake(side)
            return arrived

    def leave(self, side: Side) -> None:
        """Close the link at this side. Messages that it has sent may still arrive. Called by the links."""
        with self.lock:
            if side in self._wakers:
                self._wakers.pop(side).close()
            if side in self._crashed:
                return
            self._flying = [parcel for parcel in self._flying if parcel.to is not side]
            self._inboxes[side].clear()
            self._end(side.other, "was closed by the other end")

    def waker(self, side: Side) -> Waker:
        """The waker that fires when a message arrives at this side, or the link ends. Called by the links."""
        with self.lock:
            if side not in self._wakers:
                self._wakers[side] = Waker()
                if self._inboxes[side] or side in self._ended:
                    self._wake(side)
            return self._wakers[side]

    def require_alive(self, side: Side) -> None:
        """Raise TransportError if the process at this side is dead or its link is broken. Called by the links."""
        if side in self._crashed:
            raise TransportError("This end's process is dead.")
        if side in self._ended:
            raise TransportError(f"The link {self._ended[side]}.")

    def _end(self, side: Side, how: str) -> None:
        if not self.delivery.loses:
            self._ended.setdefault(side, how)
            self._wake(side)

    def _wake(self, side: Side) -> None:
        if side in self._wakers:
            self._wakers[side].fire()


class LocalLink:
    """One end of a `local_pair`. `weightsync.transports.base.Link` states the contract."""

    def __init__(self, network: Network, side: Side, payloads: Payloads) -> None:
        self.network = network
        self.side = side
        self.delivery = network.delivery
        self._payloads = payloads
        self._pins = Pins()
        self._closed = False

    @property
    def peer(self) -> str:
        """The description of the other end."""
        return f"the {self.side.other.value} end"

    def send(self, message: Message, payload: Buffer | None = None) -> None:
        """Put a message in flight, after encoding and decoding it: see `Link.send`."""
        self._require_open()
        carried = codec.decode(codec.encode(message))
        if not isinstance(message, Update) or not message.nbytes:
            return self.network.post(self.side.other, Received(carried))
        if payload is None or payload.nbytes < message.nbytes:
            raise ConfigurationError(f"Version {message.version} comes without its {message.nbytes} bytes.")
        view = payload.view[: message.nbytes]
        if self._payloads is Payloads.INLINE:
            view = memoryview(bytearray(view))
        self._pins.hold(message, payload if self._payloads is Payloads.SHARED else None)
        self.network.post(self.side.other, Received(carried, view))

    def flush(self) -> bool:
        """Return True, since every message is sent at once."""
        self._require_open()
        return True

    def receive(self) -> list[Received]:
        """Return the messages that have arrived: see `Link.receive`."""
        self._require_open()
        arrived = self.network.take(self.side)
        for received in arrived:
            self._pins.answered(received.message)
        return arrived

    def waitables(self) -> list[int]:
        """The descriptor of this side's waker, which is created on the first call. Empty once the link is closed."""
        return [] if self._closed else [self.network.waker(self.side).fileno()]

    def wants_write(self) -> int | None:
        """Return None, since no message is ever queued."""
        return None

    def watch(self, pid: int, started: int) -> None:
        """Do nothing, since the network reports a death."""

    def close(self) -> None:
        """Close the link: see `Link.close`."""
        if self._closed:
            return
        self._closed = True
        if self.network.crashed(self.side.other):
            self._pins.release()
        else:
            self._pins.retire()
        self.network.leave(self.side)

    def _require_open(self) -> None:
        if self._closed:
            raise TransportError("The link is closed.")


def local_pair(
    delivery: Delivery = Delivery.ORDERED,
    *,
    pace: Pace = Pace.PROMPT,
    payloads: Payloads = Payloads.INLINE,
) -> tuple[LocalLink, LocalLink]:
    """Two links that are connected to each other.

    Args:
        delivery: what the network between them may do to messages, and so which faults a test can cause.
        pace: when a sent message arrives.
        payloads: INLINE copies a payload when it is sent. SHARED gives the receiver the sender's own buffer.

    Returns:
        The first and the second end. ``.network`` of either end controls the network between them.
    """
    network = Network(delivery, pace)
    return LocalLink(network, Side.FIRST, payloads), LocalLink(network, Side.SECOND, payloads)
