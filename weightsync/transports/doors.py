"""The receiving end of links whose messages are calls: a door that senders knock at, and a link for each of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from weightsync import wire
from weightsync._tables import Delivery
from weightsync.errors import ConfigurationError, TransportError
from weightsync.messages import Message, Update
from weightsync.transports.base import Link, Received, Waker
from weightsync.transports.fork import forget_after_fork
from weightsync.transports.liveness import ProcessWatch
from weightsync.transports.memory import Buffer

#: Frames of answers, each as `wire.encode` makes it.
Frames = list[bytes]


@dataclass(frozen=True, slots=True)
class Parcel:
    """What one call brings."""

    #: Of the sender's link, the same for all its calls and never used by another.
    link: str
    #: Of the call on that link, from 0.
    number: int
    #: As `wire.encode` makes it.
    frame: bytes
    #: An update's payload.
    payload: memoryview | None = None


class DoorLink:
    """One sender's calls as a link. See `weightsync.transports.base.Link` for its contract.

    Calls may come from any thread, and in any order: they are delivered in the order in which they were begun. An
    answer goes out with the oldest call that has had none.
    """

    delivery = Delivery.ORDERED

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._lock = threading.Lock()
        self._early: dict[int, Received | None] = {}
        self._next = 0
        self._arrived: deque[Received] = deque()
        self._open: dict[int, Future[Frames]] = {}
        self._unsaid: Frames = []
        self._waker = Waker()
        self._watch: ProcessWatch | None = None
        self._closed = False
        self._hung_up = False
        forget_after_fork(self)

    @property
    def peer(self) -> str:
        """Who is at the other end, for messages to people."""
        return self._peer

    def bring(self, parcel: Parcel) -> Future[Frames]:
        """Take a call in; the future is done once there is an answer for it, or the link is closed.

        The first call after the link was closed is answered with what was said last, if nobody has heard that.

        Raises:
            ProtocolError: the frame is malformed.
            TransportError: the link was closed here.
        """
        message = wire.decode(parcel.frame)
        answer: Future[Frames] = Future()
        with self._lock:
            if self._closed and self._unsaid:
                last, self._unsaid = self._unsaid, []
                answer.set_result(last)
                return answer
            self._require_open()
            self._open[parcel.number] = answer
            self._early[parcel.number] = _received(message, parcel.payload)
            self._deliver()
            ready = self._ready() if self._unsaid or self._hung_up else None
        _answer(ready)
        self._waker.fire()
        return answer

    def _deliver(self) -> None:
        while self._next in self._early:
            received = self._early.pop(self._next)
            self._next += 1
            if received is not None:
                self._arrived.append(received)

    def skip(self, number: int) -> None:
        """A call that will never come: those behind it wait for it no longer."""
        with self._lock:
            if number >= self._next and not self._closed:
                self._early.setdefault(number, None)
                self._deliver()
        self._waker.fire()

    def hang_up(self) -> None:
        """The sender waits for no answer any more: calls go home as they are, those still on their way too."""
        with self._lock:
            self._hung_up = True
            waiting, self._open = list(self._open.values()), {}
        for call in waiting:
            call.set_result([])

    def awaits_turn(self, number: int) -> bool:
        """Whether a call that was begun before this one has not come yet."""
        with self._lock:
            return not self._closed and number >= self._next

    def release(self, number: int) -> None:
        """Let a call go home with what there is to say, if anything."""
        with self._lock:
            waiting = self._open.pop(number, None)
            said, self._unsaid = self._unsaid, []
        _answer(None if waiting is None else (waiting, said))

    def send(self, message: Message, payload: Buffer | None = None) -> None:
        """Answer the oldest call that has had none; without one, the next call: see `Link.send`."""
        if payload is not None:
            raise ConfigurationError("A receiver's answers carry no payload.")
        with self._lock:
            self._require_open()
            self._unsaid.append(wire.encode(message))
            ready = self._ready()
        _answer(ready)

    def _ready(self) -> tuple[Future[Frames], Frames] | None:
        if not self._open:
            return None
        said, self._unsaid = self._unsaid, []
        return self._open.pop(min(self._open)), said

    def flush(self) -> bool:
        """What is left to say waits for a call: nothing can be done about it here."""
        self._require_open()
        return True

    def receive(self) -> list[Received]:
        """What was brought: see `Link.receive`."""
        self._require_open()
        self._waker.clear()
        dead = self._watch is not None and self._watch.dead
        with self._lock:
            arrived = list(self._arrived)
            self._arrived.clear()
        if dead and self._watch is not None:
            if not arrived:
                raise TransportError(f"{self._peer} has ended: process {self._watch.pid} is dead.")
            self._waker.fire()
        return arrived

    def waitables(self) -> list[int]:
        """Readable once something was brought, or the peer is dead: see `Link.waitables`."""
        if self._closed:
            return []
        watched = [self._watch.fileno()] if self._watch is not None and self._watch.fileno() >= 0 else []
        return [self._waker.fileno(), *watched]

    def wants_write(self) -> int | None:
        """Nothing is ever written here."""
        return None

    def watch(self, pid: int, started: int) -> None:
        """Notice the death of the peer's process: see `Link.watch`."""
        if not pid or self._closed or (self._watch is not None and self._watch.names(pid, started)):
            return
        if self._watch is not None:
            self._watch.close()
        self._watch = ProcessWatch(pid, started)
        if self._watch.dead:
            self._waker.fire()

    def close(self) -> None:
        """Give the link up: see `Link.close`. Calls that wait for an answer go home with what there is to say."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            waiting = [self._open[number] for number in sorted(self._open)]
            said = self._unsaid
            if waiting:
                self._unsaid = []
            self._open, self._early = {}, {}
        for index, call in enumerate(waiting):
            call.set_result(said if index == 0 else [])
        self._waker.close()
        if self._watch is not None:
            self._watch.close()

    def forget(self) -> None:
        """In a forked child: be closed, and answer nobody."""
        self._lock = threading.Lock()
        self._closed = True
        self._open = {}

    def _require_open(self) -> None:
        if self._closed:
            raise TransportError(f"The link to {self._peer} is closed.")


def _received(message: Message, payload: memoryview | None) -> Received:
    if isinstance(message, Update) and message.nbytes:
        if payload is None or payload.nbytes < message.nbytes:
            raise wire.malformed(f"Version {message.version} came without its {message.nbytes} bytes", b"")
        return Received(message, payload[: message.nbytes])
    return Received(message)


def _answer(ready: tuple[Future[Frames], Frames] | None) -> None:
    """Outside every lock: what a future wakes may come back here."""
    if ready is not None:
        ready[0].set_result(ready[1])


class Door:
    """Where the calls for one model arrive in this process. Calls that come before anybody listens wait behind it."""

    def __init__(self, model_id: str) -> None:
        self.model_id = model_id
        self._lock = threading.Lock()
        self._links: dict[str, DoorLink] = {}
        self._unmet: list[DoorLink] = []
        self._accept: Callable[[Link], None] | None = None

    def knock(self, parcel: Parcel) -> Future[Frames]:
        """Take a call in, from whichever thread: see `DoorLink.bring`."""
        with self._lock:
            link = self._links.get(parcel.link)
            accept = None
            if link is None:
                link = self._links[parcel.link] = DoorLink("the sender")
                accept = self._accept
                if accept is None:
                    self._unmet.append(link)
        answer = link.bring(parcel)
        if accept is not None:
            accept(link)
        return answer

    def release(self, parcel: Parcel) -> None:
        """Let a call go home without waiting any longer."""
        with self._lock:
            link = self._links.get(parcel.link)
        if link is not None:
            link.release(parcel.number)

    def hang_up(self, parcel: Parcel) -> None:
        """Take a link's last call in: none of its calls waits for an answer any more, whether or not anybody listens.

        Raises:
            ProtocolError, TransportError: as `knock`; its calls go home all the same.
        """
        try:
            self.knock(parcel)
        finally:
            with self._lock:
                link = self._links[parcel.link]
            link.hang_up()

    def knows(self, link: str) -> bool:
        """Whether a call of that link has come before."""
        with self._lock:
            return link in self._links

    def awaits_turn(self, parcel: Parcel) -> bool:
        """Whether a call waits for others of its link, begun before it, that have not come yet."""
        with self._lock:
            link = self._links.get(parcel.link)
        return link is not None and link.awaits_turn(parcel.number)

    def skip(self, parcel: Parcel, numbers: Sequence[int]) -> None:
        """Those calls of the parcel's link will never come: see `DoorLink.skip`."""
        with self._lock:
            link = self._links.get(parcel.link)
        if link is not None:
            for number in numbers:
                link.skip(number)

    def drop(self, parcel: Parcel) -> None:
        """Close the link that a parcel came by."""
        with self._lock:
            link = self._links.get(parcel.link)
        if link is not None:
            link.close()

    @property
    def listening(self) -> bool:
        """Whether somebody listens."""
        with self._lock:
            return self._accept is not None

    def open(self, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Have ``accept`` called with each sender's link, those that have come already included.

        Returns:
            What ends it.

        Raises:
            ConfigurationError: somebody listens already.
        """
        with self._lock:
            if self._accept is not None:
                raise ConfigurationError(f"Model {self.model_id!r} has a receiver in this process: close that first.")
            self._accept = accept
            unmet, self._unmet = self._unmet, []
        for link in unmet:
            accept(link)
        return self._shut

    def _shut(self) -> None:
        with self._lock:
            self._accept = None


def decoded(frames: Sequence[bytes]) -> list[Message]:
    """The answers that a call brought home.

    Raises:
        ProtocolError: a frame is malformed.
    """
    return [wire.decode(frame) for frame in frames]
