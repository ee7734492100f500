"""The receiving end of one sender's calls as a link. Calls may come from any thread and in any order."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from weightsync.errors import ConfigurationError, ProtocolError, TransportError
from weightsync.protocol import codec
from weightsync.protocol._tables import Delivery
from weightsync.protocol.messages import Ack, Bye, Message, Refusal, Update
from weightsync.transports.base import Received
from weightsync.transports.buffers import Buffer
from weightsync.transports.calls.client import ClosedByPeer
from weightsync.transports.calls.same_host import MappedPlaces, SegmentPlace
from weightsync.transports.process import forget_after_fork
from weightsync.transports.wakeup import WakeableLink

#: Frames of answers, each encoded by `codec.encode`.
Frames = list[bytes]
#: How many answered calls are remembered, in case they are repeated.
_REMEMBERED: Final = 8
#: How far a call may be ahead of earlier ones that are still in flight.
MAX_AHEAD: Final = 1024
#: How many messages may wait for the receiver to read them, and the bytes of their payloads. One may be larger.
MAX_UNREAD: Final = 1024
MAX_UNREAD_NBYTES: Final = 2**30


@dataclass(frozen=True, slots=True)
class Parcel:
    """The contents of one call."""

    #: The name of the sender's link: the same for all its calls, and used by no other link.
    link: str
    #: The number of the call on that link, counted from 0.
    number: int
    #: The message, encoded by `codec.encode`.
    frame: bytes
    #: An update's payload.
    payload: memoryview | None = None
    #: Where the payload is, if the call does not carry it.
    place: SegmentPlace | None = None


class CallServerLink(WakeableLink):
    """One sender's calls as a link. See `weightsync.transports.base.Link` for its contract.

    Calls may come from any thread and in any order. They are delivered in the order in which they were begun. The
    oldest unanswered call carries the next answer. A call that is repeated by its transport gets the same answer
    again.

    Args:
        unreachable: says why no call can arrive here any more; empty while they can.
    """

    delivery = Delivery.ORDERED

    def __init__(self, peer: str, unreachable: Callable[[], str] = str) -> None:
        super().__init__(peer)
        self._unreachable = unreachable
        self._lock = threading.Lock()
        self._early: dict[int, Received | ProtocolError | None] = {}
        self._next = 0
        self._arrived: deque[Received | ProtocolError] = deque()
        self._unread_nbytes = 0
        #: Set when the limit was exceeded: nothing more is kept.
        self._overflow_error: ProtocolError | None = None
        self._open: dict[int, Future[Frames]] = {}
        self._answered: OrderedDict[int, Frames] = OrderedDict()
        self._goodbye_sent = False
        self._undelivered: Frames = []
        self._hung_up = False
        self._places = MappedPlaces()
        forget_after_fork(self)

    def locate_payload(self, content: Received | ProtocolError, place: SegmentPlace) -> Received | ProtocolError:
        """A call's content with the payload that lies there. An error is returned, as by `opened`."""
        if isinstance(content, ProtocolError) or not isinstance(content.message, Update) or not content.message.nbytes:
            return content
        with self._lock:
            if self._closed:  # the mapping would outlive the link, and keep the trainer's memory
                return content
            try:
                return self._places.received(content.message, place)
            except ProtocolError as error:
                return error

    def bring(self, number: int, received: Received | ProtocolError | None) -> Future[Frames]:
        """Process a call. The future is done once there is an answer for it, or the link is closed.

        The first call after the link was closed returns the last messages, if they were not delivered yet.

        Args:
            received: its content: see `opened`. None: it has arrived before.

        Raises:
            ProtocolError: the frame is malformed, or the limit of unread messages is exceeded.
            ClosedByPeer: the link was closed here.
        """
        with self._lock:
            if self._closed and self._undelivered:
                last, self._undelivered = self._undelivered, []
                return _completed(last)
            if self._closed:
                raise ClosedByPeer(f"The link to {self._peer} is closed.")
            if number in self._open:
                return self._open[number]
            if number in self._answered or number < self._next:
                return _completed(self._answered.get(number, []))
            if number >= self._next + MAX_AHEAD:
                raise codec.malformed(f"Call {number} arrived while call {self._next} is awaited", b"")
            self._require_room()
            answer = self._open[number] = Future()
            self._early[number] = received
            self._unread_nbytes += _nbytes(received)
            self._deliver()
            ready = self._take_oldest_answer() if self._undelivered or self._hung_up else None
        _complete(ready)
        self._waker.fire()
        if isinstance(received, ProtocolError):
            raise received
        return answer

    def _require_room(self) -> None:
        count = len(self._early) + len(self._arrived)
        if self._overflow_error is None and (count >= MAX_UNREAD or self._unread_nbytes >= MAX_UNREAD_NBYTES):
            self._overflow_error = ProtocolError(
                f"{count} messages ({self._unread_nbytes} bytes) of {self._peer} are unread here, and another arrived: "
                "this link is closed. Call receive() more often."
            )
            self._arrived.append(self._overflow_error)
            self._waker.fire()
        if self._overflow_error is not None:
            raise self._overflow_error

    @property
    def unread_nbytes(self) -> int:
        """The bytes of unread payloads."""
        return self._unread_nbytes

    @property
    def is_closed(self) -> bool:
        """Whether the link was closed."""
        return self._closed

    def _deliver(self) -> None:
        while self._next in self._early:
            received = self._early.pop(self._next)
            self._next += 1
            if received is not None:
                self._arrived.append(received)

    def skip(self, number: int) -> None:
        """Skip a call that will never arrive, so that later calls no longer wait for it."""
        with self._lock:
            if number >= self._next and not self._closed:
                self._early.setdefault(number, None)
                self._deliver()
        self._waker.fire()

    def hang_up(self) -> None:
        """End all calls, also those that have not arrived yet: the sender waits for no answers any more."""
        with self._lock:
            self._hung_up = True
            ready = [self._take_answer(number) for number in sorted(self._open)]
        for each in ready:
            _complete(each)

    def awaits_turn(self, number: int) -> bool:
        """Whether a call that was begun before this one has not arrived yet."""
        with self._lock:
            return not self._closed and number >= self._next

    def release(self, number: int) -> None:
        """End a call now, with the answers that there are."""
        with self._lock:
            ready = self._take_answer(number) if number in self._open else None
        _complete(ready)

    def send(self, message: Message, payload: Buffer | None = None) -> None:
        """Answer the oldest unanswered call; if there is none, the next call: see `Link.send`."""
        if payload is not None:
            raise ConfigurationError("A receiver's answers carry no payload.")
        with self._lock:
            self._require_open()
            self._undelivered.append(codec.encode(message))
            self._goodbye_sent |= isinstance(message, Bye)
            ready = self._take_oldest_answer()
        _complete(ready)

    def _take_oldest_answer(self) -> tuple[Future[Frames], Frames] | None:
        if not self._open:
            return None
        return self._take_answer(min(self._open))

    def _take_answer(self, number: int) -> tuple[Future[Frames], Frames]:
        messages, self._undelivered = self._undelivered, []
        self._answered[number] = messages
        if len(self._answered) > _REMEMBERED:
            self._answered.popitem(last=False)
        return self._open.pop(number), messages

    def receive(self) -> list[Received]:
        """The messages of the calls: see `Link.receive`."""
        self._require_open()
        self._waker.clear()
        death = self._death()
        with self._lock:
            arrived = self._readable()
        if death:
            if not arrived:
                raise TransportError(f"{self._peer} has ended: {death}.")
            self._waker.fire()
        elif not arrived and (why := self._unreachable()):
            raise TransportError(why)
        return arrived

    def _readable(self) -> list[Received]:
        """The messages up to the first malformed one, which is reported once no other is before it."""
        readable: list[Received] = []
        while self._arrived:
            received = self._arrived[0]
            if isinstance(received, ProtocolError):
                if not readable:
                    raise received
                self._waker.fire()
                break
            readable.append(received)
            self._arrived.popleft()
            self._unread_nbytes -= _nbytes(received)
        return readable

    def close(self, reason: str = "the receiver closed this link before it answered.") -> None:
        """Close the link: see `Link.close`.

        Calls that wait for an answer return if a goodbye was sent, and fail if none was: a call that merely returned
        would leave its sender waiting for an answer that never comes.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            waiting = [self._open[number] for number in sorted(self._open)]
            self._open, self._early = {}, {}
            self._arrived.clear()
            self._places.clear()
            self._unread_nbytes = 0
        for call in waiting:
            if self._goodbye_sent:
                call.set_result([])
            else:
                call.set_exception(ClosedByPeer(reason))
        self._let_go()

    def forget(self) -> None:
        """In a forked child: count as closed, and do not answer."""
        super().forget()
        self._lock = threading.Lock()
        self._open = {}
        self._places.clear()


def opened(parcel: Parcel) -> Received | ProtocolError:
    """The content of a parcel. An error in it is returned, to be reported in its turn after earlier messages."""
    try:
        message = codec.decode(parcel.frame)
        if isinstance(message, Ack | Refusal):
            raise codec.malformed(f"A call carried a {type(message).__name__}, which no sender sends", parcel.frame)
        if not isinstance(message, Update) or not message.nbytes or parcel.place is not None:
            return Received(message)
        if parcel.payload is None or parcel.payload.nbytes < message.nbytes:
            raise codec.malformed(f"Version {message.version} arrived without its {message.nbytes} bytes", b"")
        return Received(message, parcel.payload[: message.nbytes])
    except ProtocolError as error:
        return error


def changed(answer: Future[Frames], change: Callable[[Frames], Frames]) -> Future[Frames]:
    """The answer, changed once it is there; an error stays as it is."""
    changed_answer: Future[Frames] = Future()

    def over(answered: Future[Frames]) -> None:
        error = answered.exception()
        if error is None:
            changed_answer.set_result(change(answered.result()))
        else:
            changed_answer.set_exception(error)

    answer.add_done_callback(over)
    return changed_answer


def _nbytes(received: Received | ProtocolError | None) -> int:
    return received.payload.nbytes if isinstance(received, Received) and received.payload is not None else 0


def _completed(frames: Frames) -> Future[Frames]:
    answer: Future[Frames] = Future()
    answer.set_result(frames)
    return answer


def _complete(ready: tuple[Future[Frames], Frames] | None) -> None:
    """Complete a future. Called outside every lock, since a callback of the future may call back into this module."""
    if ready is not None:
        ready[0].set_result(ready[1])
