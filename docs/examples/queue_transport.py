"""Your own transport: both ends in one process, joined by two queues. The conformance kit checks it."""

from collections import deque
from dataclasses import dataclass, field

from weightsync import Delivery, TransportError
from weightsync.protocol.messages import Message, Update
from weightsync.testing import Ends, check_transport
from weightsync.transports.base import Received, Waker
from weightsync.transports.buffers import Buffer


@dataclass
class Inbox:
    """What has been sent to one end."""

    arrived: deque[Received] = field(default_factory=deque)
    waker: Waker = field(default_factory=Waker)
    over: bool = False  # the other end was given up


class QueueLink:
    """One end. Its methods are those of `weightsync.transports.base.Link`."""

    delivery = Delivery.ORDERED
    peer = "the other end"

    def __init__(self, mine: Inbox, theirs: Inbox) -> None:
        self._mine, self._theirs = mine, theirs
        self._closed = False

    def send(self, message: Message, payload: Buffer | None = None) -> None:
        self._require(not self._closed and not self._mine.over)
        carried = None
        if isinstance(message, Update) and message.nbytes:
            assert payload is not None
            # Copied at once, so it need not be pinned.
            carried = memoryview(bytearray(payload.view[: message.nbytes]))
        self._theirs.arrived.append(Received(message, carried))
        self._theirs.waker.fire()

    def flush(self) -> bool:
        self._require(not self._closed and not self._mine.over)
        return True  # nothing is ever queued on this side

    def receive(self) -> list[Received]:
        self._require(not self._closed)
        self._mine.waker.clear()
        received = list(self._mine.arrived)
        self._mine.arrived.clear()
        if self._mine.over:
            self._require(bool(received))  # first what was readable, then the end ...
            self._mine.waker.fire()  # ... of which the next call tells
        return received

    def waitables(self) -> list[int]:
        return [] if self._closed else [self._mine.waker.fileno()]

    def wants_write(self) -> int | None:
        return None

    def watch(self, pid: int, started: int) -> None:
        """Both ends are in one process: there is nobody to watch."""

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._mine.waker.close()
            self._theirs.over = True
            self._theirs.waker.fire()

    def _require(self, alive: bool) -> None:
        if not alive:
            raise TransportError("The link is closed.")


def connect(model_id: str) -> Ends:
    """The factory: a fresh connection at each call."""
    one, other = Inbox(), Inbox()

    def cut() -> None:
        for inbox in (one, other):
            inbox.over = True
            inbox.waker.fire()

    return Ends(QueueLink(one, other), QueueLink(other, one), cut=cut)


if __name__ == "__main__":
    print(check_transport(connect, unreachable={"several models": "each connection carries one model"}))
