"""`StoreLink`: control messages as values in a store, payloads over a private process group."""

from __future__ import annotations

from typing import Final

from weightsync import wire
from weightsync._tables import Delivery
from weightsync.errors import ConfigurationError, TransportError
from weightsync.messages import Ack, Message, Update
from weightsync.transports.base import Received, Waker
from weightsync.transports.distributed.exchange import Exchange
from weightsync.transports.distributed.letters import Letter, Side
from weightsync.transports.distributed.store import StoreEnd
from weightsync.transports.fork import forget_after_fork
from weightsync.transports.liveness import ProcessWatch
from weightsync.transports.memory import Buffer

#: TorchRL's keys and words: written as hints for loops that wait on them, never read.
HINT: Final = "update_weights"
ACKED: Final = "updated"


class StoreLink:
    """A link over a store. See `weightsync.transports.base.Link` for its contract.

    Args:
        meeting: the store, and the worker's rank.
        name: of the link, the same at both ends and used for no other.
        side: which end this is.

    Raises:
        ConfigurationError: the backend is not to be had here.
    """

    delivery = Delivery.ORDERED

    def __init__(self, meeting: StoreEnd, name: str, side: Side) -> None:
        self._peer = side.peer
        self._rank = meeting.rank
        self._waker = Waker()
        self._watch: ProcessWatch | None = None
        self._closed = False
        self._exchange = Exchange(meeting, name, side, self._waker)
        forget_after_fork(self)

    @property
    def peer(self) -> str:
        """Who is at the other end, for messages to people."""
        return self._peer

    # ------------------------------------------------------------------------------- called by the driver

    def send(self, message: Message, payload: Buffer | None = None) -> None:
        """Queue a message for the writing thread: see `Link.send`."""
        self._require_open()
        if self._exchange.failed is not None:
            raise TransportError(str(self._exchange.failed)) from self._exchange.failed
        frame, carried = wire.encode(message), None
        if isinstance(message, Update) and message.nbytes:
            if payload is None or payload.nbytes < message.nbytes:
                raise ConfigurationError(f"Version {message.version} comes without its {message.nbytes} bytes.")
            carried = payload.view[: message.nbytes]
        token = object()
        if payload is not None:
            payload.pin(token)
        done = _nothing if payload is None else lambda: payload.unpin(token)
        self._exchange.post(Letter(frame, carried, self._hint(message), done))

    def _hint(self, message: Message) -> tuple[str, str] | None:
        if isinstance(message, Update):
            return f"NODE_{self._rank}_in", HINT
        return (f"NODE_{self._rank}_out", ACKED) if isinstance(message, Ack) else None

    def flush(self) -> bool:
        """What is queued is the writing thread's business: see `Link.flush`."""
        self._require_open()
        return True

    def receive(self) -> list[Received]:
        """Everything that has arrived whole: see `Link.receive`."""
        self._require_open()
        self._waker.clear()
        if self._watch is not None and not self._exchange.ending and self._watch.dead:
            self._exchange.end_reading(f"process {self._watch.pid} is dead")
        arrived, failed = self._exchange.collect()
        if failed is not None:
            if not arrived:
                raise failed
            # What came before is delivered now, the error at the next call: the wait before it must end.
            self._waker.fire()
        return arrived

    def waitables(self) -> list[int]:
        """Readable once something has arrived, or the peer is dead: see `Link.waitables`."""
        if self._closed:
            return []
        watched = self._watch is not None and not self._exchange.ending and self._watch.fileno() >= 0
        return [self._waker.fileno(), *([self._watch.fileno()] if watched and self._watch is not None else [])]

    def wants_write(self) -> int | None:
        """Nothing is ever written by the driver's thread."""
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
        """Give the link up: see `Link.close`. Control messages that are queued still leave; payloads do not."""
        if self._closed:
            return
        self._closed = True
        self._exchange.close()
        self._waker.close()
        if self._watch is not None:
            self._watch.close()

    def forget(self) -> None:
        """In a forked child: be closed."""
        self._closed = True
        self._exchange.forget()

    def _require_open(self) -> None:
        if self._closed:
            raise TransportError(f"The link to {self._peer} is closed.")


def _nothing() -> None:
    return None
