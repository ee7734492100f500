"""A network inside one process that a test controls: what on it is late, lost, doubled, cut or dead."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from dataclasses import dataclass
from enum import Enum

from weightsync._tables import Delivery
from weightsync.errors import ConfigurationError, TransportError
from weightsync.transports.base import Received, Waker


class Side(Enum):
    """An end of a pair."""

    FIRST = "first"
    SECOND = "second"

    @property
    def other(self) -> Side:
        """The other end."""
        return Side.SECOND if self is Side.FIRST else Side.FIRST


class Pace(Enum):
    """When what was sent arrives."""

    #: At once, in order.
    PROMPT = "prompt"
    #: When the test says so.
    HELD = "held"


@dataclass(frozen=True, slots=True)
class Parcel:
    """A message in flight."""

    number: int
    to: Side
    received: Received


class Network:
    """What lies between the two ends of a pair, and what happens to it.

    It keeps to what its delivery promises: a test that asks for more disorder gets a ConfigurationError.

    Args:
        delivery: what it promises.
        pace: when what was sent arrives.
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
        """What was sent and has not arrived, oldest first."""
        return tuple(self._flying)

    def deliverable(self) -> tuple[Parcel, ...]:
        """What may arrive next: anything, or each side's oldest where order is promised."""
        if self.delivery.reorders:
            return self.in_flight
        oldest: dict[Side, Parcel] = {}
        for parcel in self._flying:
            oldest.setdefault(parcel.to, parcel)
        return tuple(oldest.values())

    def deliver(self, parcel: Parcel) -> None:
        """Let it arrive."""
        with self.lock:
            self._require(parcel in self.deliverable(), "order")
            self._flying.remove(parcel)
            self._inboxes[parcel.to].append(parcel.received)
            self._wake(parcel.to)

    def deliver_all(self) -> None:
        """Let everything in flight arrive, oldest first."""
        with self.lock:
            while self._flying:
                self.deliver(self._flying[0])

    def drop(self, parcel: Parcel) -> None:
        """Lose it, and let the link live on."""
        self._require(self.delivery.loses, "to lose nothing")
        self._flying.remove(parcel)

    def duplicate(self, parcel: Parcel) -> Parcel:
        """A second one of it in flight."""
        self._require(self.delivery.duplicates, "to double nothing")
        twin = Parcel(next(self._numbers), parcel.to, parcel.received)
        self._flying.append(twin)
        return twin

    def _require(self, allowed: bool, promised: str) -> None:
        if not allowed:
            raise ConfigurationError(f"A network of delivery {self.delivery.name} promised {promised}.")

    def cut(self) -> None:
        """The link breaks though both ends live: what is in flight is lost; both notice if they can."""
        with self.lock:
            self._flying.clear()
            for side in Side:
                self._end(side, "was cut")

    def crash(self, side: Side) -> None:
        """The process at that side is dead: what is in flight is lost; the other end notices if it can."""
        with self.lock:
            self._flying.clear()
            self._crashed.add(side)
            self._inboxes[side].clear()
            self._end(side.other, "has ended: its process is dead")

    def crashed(self, side: Side) -> bool:
        """Whether the process at that side is dead."""
        return side in self._crashed

    def post(self, to: Side, received: Received) -> None:
        """Take a message on its way. For the links."""
        with self.lock:
            self.require_alive(to.other)
            if to in self._crashed:
                return
            parcel = Parcel(next(self._numbers), to, received)
            self._flying.append(parcel)
            if self.pace is Pace.PROMPT:
                self.deliver(parcel)

    def take(self, side: Side) -> list[Received]:
        """What has arrived at that side. For the links."""
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
        """That side closes its link; what it sent may still arrive. For the links."""
        with self.lock:
            if side in self._wakers:
                self._wakers.pop(side).close()
            if side in self._crashed:
                return
            self._flying = [parcel for parcel in self._flying if parcel.to is not side]
            self._inboxes[side].clear()
            self._end(side.other, "was closed by the other end")

    def waker(self, side: Side) -> Waker:
        """Fired when something arrives at that side. For the links."""
        with self.lock:
            if side not in self._wakers:
                self._wakers[side] = Waker()
                if self._inboxes[side] or side in self._ended:
                    self._wake(side)
            return self._wakers[side]

    def require_alive(self, side: Side) -> None:
        """Raise TransportError if that side's end is dead or broken. For the links."""
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
