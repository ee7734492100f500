"""Links over duplex `multiprocessing` connections, with large payloads in shared memory."""

from __future__ import annotations

import logging
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from weightsync.errors import ConfigurationError, ProtocolError, TransportError
from weightsync.protocol import codec
from weightsync.protocol._tables import Delivery
from weightsync.protocol.messages import Ack, Message, Refusal, SlotRef, Update
from weightsync.transports.base import Payloads, Received, Remarks, SharesMemory, TellsWhatIsRead
from weightsync.transports.buffers import INLINE_BELOW_NBYTES, Buffer, NoRoom, Pins
from weightsync.transports.pipe.connection import Channel
from weightsync.transports.pipe.framing import Frame, Outgoing, framed, framed_update
from weightsync.transports.pipe.mailbox import discard, unmet_reason
from weightsync.transports.pipe.segments import Mapped, Named
from weightsync.transports.pipe.user_messages import UserMessages

logger = logging.getLogger("weightsync")


class PipeLink(TellsWhatIsRead, SharesMemory, Remarks):
    """A link over one end of ``multiprocessing.Pipe(duplex=True)``. See `Link` for its contract.

    Links of several models may share one connection object, which is closed with the last of them. Until then only
    the links read and write it: the user's own messages go through `user`.

    Args:
        connection: this process's end. It is never made non-blocking.
        model_id: only messages of this model go through the link.
        peer: the name of the other end, for messages to people.
        payloads: how large payloads travel.

    Raises:
        ConfigurationError: the connection is closed, one-way or not a socket, or has a link for that model.
        TransportError: no file descriptor is left.
    """

    delivery = Delivery.ORDERED

    def __init__(
        self,
        connection: Connection[Any, Any],
        model_id: str,
        *,
        peer: str = "the peer",
        payloads: Payloads = Payloads.SHARED,
    ) -> None:
        self._peer = peer
        self._remark = ""
        self._payloads = payloads
        self._channel = Channel.of(connection)
        self._box = self._channel.register(model_id, peer)
        self._named = Named()
        self._mapped = Mapped()
        self._pins = Pins()
        self._broken: ProtocolError | TransportError | None = None
        self._closed = False

    @property
    def peer(self) -> str:
        """The name of the other end, for messages to people."""
        return self._peer

    @property
    def user(self) -> UserMessages:
        """The user's own messages on this connection."""
        return UserMessages(self._channel)

    def send(self, message: Message, payload: Buffer | None = None) -> None:
        """Queue a message and write what fits now: see `Link.send`."""
        if self._closed:
            raise self._no_longer()
        if not isinstance(message, Update) or not message.nbytes:
            self._channel.put(Outgoing(framed(message)), self._peer)
        elif payload is None or payload.nbytes < message.nbytes:
            raise ConfigurationError(f"Version {message.version} was sent without its {message.nbytes} bytes.")
        elif self.shares(payload, message.nbytes):
            self._send_shared(message, payload)
        else:
            self._send_inline(message, payload)

    def shares(self, payload: Buffer, nbytes: int) -> bool:
        """Whether the worker maps the payload's memory: see `SharesMemory.shares`."""
        wanted = self._payloads is Payloads.SHARED and nbytes >= INLINE_BELOW_NBYTES
        return wanted and payload.segment is not None and self._channel.passes_descriptors

    def _send_inline(self, message: Update, payload: Buffer) -> None:
        token = object()
        done = partial(payload.unpin, token)
        frame = Outgoing(framed_update(message), payload.view[: message.nbytes], done=done)
        payload.pin(token)
        self._pins.hold(message, None)
        self._channel.put(frame, self._peer)

    def _send_shared(self, message: Update, payload: Buffer) -> None:
        segment = payload.segment
        assert segment is not None
        descriptors = self._named.missing(segment)
        slot = SlotRef(segment=segment.number, seal=segment.sealed())
        frame = Outgoing(framed_update(message, slot, len(descriptors)), descriptors=descriptors, keep=payload)
        self._named.name(segment, message)
        # Held even if the link turns out to be dead: an earlier frame may have shared the same version.
        self._pins.hold(message, payload)
        self._channel.put(frame, self._peer)

    def flush(self) -> bool:
        """Write as much as possible of what is queued: see `Link.flush`."""
        if self._closed:
            raise self._no_longer()
        return self._channel.flush(self._peer)

    def receive(self) -> list[Received]:
        """All whole messages that have arrived: see `Link.receive`."""
        if self._closed:
            raise self._no_longer()
        if self._broken is not None:
            raise self._broken
        frames = self._channel.collect(self._box)
        if not frames:
            return []
        received: list[Received] = []
        frames = [frame for frame in frames if not self._is_remark(frame.message)]
        try:
            for frame in frames:
                message = frame.message
                slot = message.slot if isinstance(message, Update) else None
                received.append(
                    Received(message, frame.payload, untaken=frame.untaken) if slot is None else self._open(frame, slot)
                )
                if isinstance(message, Ack | Refusal):
                    self._pins.answered(message)
                    self._named.answered(message)
        except (ProtocolError, TransportError) as error:
            self._broken = error
            discard(frames[len(received) + 1 :])
            if not received:
                raise
            # Earlier messages are delivered now and the error at the next call, so the wait before that must end.
            self._box.signal()
        return received

    @property
    def remark(self) -> str:
        """What others than the worker reported about this link: see `Remarks`."""
        return self._remark

    def _is_remark(self, message: Message) -> bool:
        reason = unmet_reason(message) if isinstance(message, Refusal) else ""
        if reason:
            logger.warning("model %r: %s did not accept the handshake: %s", self._box.model_id, self._peer, reason)
        self._remark = reason
        return bool(reason)

    def _open(self, frame: Frame, slot: SlotRef) -> Received:
        """The message of a frame whose payload is in a segment."""
        message, nbytes = frame.message, frame.message.nbytes if isinstance(frame.message, Update) else 0
        try:
            mapping = self._mapped.find(slot, frame.descriptors, frame.untaken)
        except NoRoom as error:
            return Received(message, untaken=str(error))
        if mapping.nbytes < nbytes:
            raise codec.malformed(f"{nbytes} bytes in a segment of {mapping.nbytes}", b"")
        return Received(message, mapping.view[:nbytes], mapping)

    def waitables(self) -> list[int]:
        """Descriptors that become readable when there is something to receive: see `Link.waitables`."""
        if self._closed:
            return []
        if self._channel.connection.closed:
            self._box.signal()  # `receive` says so
        return [*self._channel.waitables(), self._box.waker.fd]

    def wants_write(self) -> int | None:
        """The descriptor to watch for room to write: see `Link.wants_write`."""
        return None if self._closed or not self._channel.queue else self._channel.wants_write()

    def all_read(self) -> bool | None:
        """Whether the peer has read everything that was sent over this connection: see `TellsWhatIsRead`."""
        return None if self._closed else self._channel.all_read()

    def watch(self, pid: int, started: int) -> None:
        """Watch the peer's process: see `Link.watch`."""
        if pid and not self._closed:
            self._channel.watch(pid, started)

    def close(self) -> None:
        """Close the link: see `Link.close`. The connection is closed with its last link."""
        if self._closed:
            return
        self._closed = True
        if self._channel.peer_is_dead:
            self._pins.release()
        else:
            self._pins.retire()
        self._mapped.clear()
        self._channel.leave(self._box)

    def _no_longer(self) -> TransportError:
        return TransportError(f"The link to {self._peer} is closed.")
