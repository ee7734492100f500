"""Links inside one process, over a network that a test controls."""

from __future__ import annotations

from weightsync import wire
from weightsync._tables import Delivery
from weightsync.errors import ConfigurationError, TransportError
from weightsync.messages import Message, Update
from weightsync.transports.base import Payloads, Received
from weightsync.transports.memory import Buffer
from weightsync.transports.network import Network, Pace, Side
from weightsync.transports.pins import Pins


class LocalLink:
    """One end of a `local_pair`. See `weightsync.transports.base.Link` for its contract."""

    def __init__(self, network: Network, side: Side, payloads: Payloads) -> None:
        self.network = network
        self.side = side
        self.delivery = network.delivery
        self._payloads = payloads
        self._pins = Pins()
        self._closed = False

    @property
    def peer(self) -> str:
        """Who is at the other end."""
        return f"the {self.side.other.value} end"

    def send(self, message: Message, payload: Buffer | None = None) -> None:
        """Put a message in flight, as the wire would carry it: see `Link.send`."""
        self._require_open()
        carried = wire.decode(wire.encode(message))
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
        """Everything leaves at once."""
        self._require_open()
        return True

    def receive(self) -> list[Received]:
        """What has arrived: see `Link.receive`."""
        self._require_open()
        arrived = self.network.take(self.side)
        for received in arrived:
            self._pins.answered(received.message)
        return arrived

    def waitables(self) -> list[int]:
        """One descriptor, made when first asked for."""
        return [] if self._closed else [self.network.waker(self.side).fileno()]

    def wants_write(self) -> int | None:
        """Nothing is ever queued."""
        return None

    def watch(self, pid: int, started: int) -> None:
        """Nothing to watch: the network tells."""

    def close(self) -> None:
        """Give the link up: see `Link.close`."""
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
    """Two links that are each other's peer.

    Args:
        delivery: what the network between them promises, and how it may misbehave.
        pace: when what was sent arrives.
        payloads: INLINE copies a payload when it is sent; SHARED shows the receiver the sender's own buffer.

    Returns:
        The first and the second end; ``.network`` of either controls what lies between.
    """
    network = Network(delivery, pace)
    return LocalLink(network, Side.FIRST, payloads), LocalLink(network, Side.SECOND, payloads)
