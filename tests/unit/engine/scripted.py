"""Scripted links, which receive messages that a test gives them and record what is sent, and fleets of such links."""

from __future__ import annotations

from collections import deque
from typing import Any

from weightsync.engine.packer import Packed
from weightsync.engine.sender_driver import SenderDriver
from weightsync.options import Verify
from weightsync.protocol import sender as pure
from weightsync.protocol._tables import Delivery, RefusalKind
from weightsync.protocol.messages import Ack, Hello, Message, Refusal, Update, WeightsForm
from weightsync.transports.base import Received, Remarks, TellsWhatIsRead
from weightsync.transports.buffers import Buffer
from weightsync.weights.layout import Layout

LAYOUT = Layout([("a", "float32", (2,))])
OTHER = Layout([("b", "float64", (3,))])
EPOCH = 5
DIGEST = b"\1" * 16


class Scripted:
    """A link without a peer.

    Args:
        delivery: the delivery that the link promises.
    """

    peer = "somebody"

    def __init__(self, delivery: Delivery = Delivery.ORDERED) -> None:
        self.delivery = delivery
        self.said: list[Message] = []
        self.payloads: list[Any] = []
        self.heard: deque[Received] = deque()
        #: The errors that methods raise, by method name.
        self.raises: dict[str, BaseException] = {}
        #: How many messages `send` takes before it raises, if `raises` names it.
        self.takes_at_most = 0
        #: The result of `flush`: whether all messages have left.
        self.gone = True
        self.flushed = 0
        self.closed = 0
        self.watched: list[tuple[int, int]] = []

    def receives(self, message: Message, **what: Any) -> None:
        """Make the link return this message on its next read."""
        self.heard.append(Received(message, **what))

    def takes(self) -> list[Message]:
        """The messages sent since the last call."""
        said, self.said = self.said, []
        return said

    def send(self, message: Message, payload: Any = None) -> None:
        if len(self.said) >= self.takes_at_most:
            self._may("send")
        self.said.append(message)
        self.payloads.append(payload)

    def flush(self) -> bool:
        self.flushed += 1
        self._may("flush")
        return self.gone

    def receive(self) -> list[Received]:
        found = list(self.heard)
        self.heard.clear()
        if not found:
            self._may("receive")
        return found

    def watch(self, pid: int, started: int) -> None:
        self._may("watch")
        self.watched.append((pid, started))

    def waitables(self) -> list[int]:
        return []

    def wants_write(self) -> int | None:
        return None

    def close(self) -> None:
        self.closed += 1

    def _may(self, method: str) -> None:
        if method in self.raises:
            raise self.raises[method]


class Telling(Scripted, TellsWhatIsRead, Remarks):
    """A link that tells whether its worker has read everything, and why the worker does not answer."""

    read: bool | None = True
    remark = "it is asleep"

    def all_read(self) -> bool | None:
        return self.read


def packed(layout: Layout = LAYOUT, digest: bytes = DIGEST) -> Packed:
    verify = Verify.DIGEST if digest else Verify.LAYOUT
    return Packed(layout, Buffer(layout.nbytes), b"extras", digest, WeightsForm.NESTED, verify)


def ack(version: int, digest: bytes = DIGEST, incarnation: int = EPOCH) -> Ack:
    return Ack(model_id="policy", incarnation=incarnation, version=version, digest=digest)


def refusal(version: int, kind: RefusalKind = RefusalKind.REFUSED) -> Refusal:
    return Refusal(model_id="policy", incarnation=EPOCH, version=version, kind=kind, reason="no")


def hello(**fields: Any) -> Hello:
    return Hello(model_id="policy", incarnation=EPOCH, **fields)


class Fleet:
    """A connected sender driver and its links, with shorthands for what tests do with them."""

    def __init__(self, *links: Any) -> None:
        self.driver = SenderDriver("policy")
        self.links = links
        for worker, link in enumerate(links):
            self.driver.join(worker, link)
        self.driver.take(pure.Connect(EPOCH))
        for link in links:
            link.takes()

    def sends(self, what: Packed | None = None, targets: tuple[int, ...] | None = None) -> Packed:
        """Dispatch a version. Returns the packed weights."""
        sent = packed() if what is None else what
        self.driver.dispatch(pure.Send(targets), sent)
        return sent

    def gives_up(self, times: int, targets: tuple[int, ...] | None = None) -> None:
        """Dispatch this many versions, and abandon each."""
        for _ in range(times):
            self.driver.dispatch(pure.SendAsync(targets), packed())
            self.driver.take(pure.Abandon())

    def receives(self, worker: int, *messages: Any) -> None:
        """Make a worker's link return these messages, and handle them."""
        for message in messages:
            self.links[worker].receives(message)
        self.driver.pump()

    def link_state(self, worker: int = 0) -> pure.LinkState:
        return self.driver.data.workers[worker].link_state

    def reason(self, worker: int = 0) -> str:
        return self.driver.data.workers[worker].reason


def versions(link: Scripted) -> list[int]:
    """The versions of the updates that were sent over this link since the last `takes`."""
    return [message.version for message in link.said if isinstance(message, Update)]


def plain() -> Fleet:
    return Fleet(Scripted())


def both() -> Fleet:
    return Fleet(Scripted(), Scripted())
