"""Links over duplex `multiprocessing` connections, with large payloads in shared memory.

Both ends list the segments that the worker maps, without messages: frames of a link arrive in order, so both lists
change in step and drop the oldest segment when they are full. A worker that could not map a segment refuses the update
in it; the trainer then passes its descriptor again with the next version in that segment.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict, deque
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final, Protocol

from msgspec.structs import replace

from weightsync.errors import ConfigurationError, ProtocolError, TransportError
from weightsync.protocol import codec
from weightsync.protocol._tables import Delivery
from weightsync.protocol.messages import Ack, Hello, Message, Part, Refusal, SlotRef, Update
from weightsync.transports.base import (
    CarriesDeltas,
    Payloads,
    Received,
    Remarks,
    SharesMemory,
    Steady,
    TakesParts,
    TellsWhatIsRead,
    Withdraws,
)
from weightsync.transports.buffers import INLINE_BELOW_NBYTES, Buffer, NoRoom, Pins, Segment
from weightsync.transports.device import CarriesDevices, DeviceBuffer, DeviceSlot, OnDevice, Opener, ReachableDevices
from weightsync.transports.mapping import Mapping
from weightsync.transports.pipe.connection import Channel
from weightsync.transports.pipe.framing import Frame, OutgoingFrame, framed, framed_updates
from weightsync.transports.pipe.mailbox import discard, unmet_reason
from weightsync.transports.pipe.user_messages import UserMessages

logger = logging.getLogger("weightsync")


class PipeLink(TellsWhatIsRead, SharesMemory, Remarks, CarriesDevices, CarriesDeltas, TakesParts, Steady, Withdraws):
    """A link over one end of ``multiprocessing.Pipe(duplex=True)``. See `Link` for its contract.

    Links of several models may share one connection object, which is closed with the last of them. Until then only
    the links read and write it: the user's own messages go through `user`.

    Args:
        connection: this process's end. It is never made non-blocking.
        opener: opens slots on a device; None if this end cannot.

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
        opener: Opener | None = None,
    ) -> None:
        self._peer = peer
        self._remark = ""
        self._payloads = payloads
        self._channel = Channel.of(connection)
        self._box = self._channel.register(model_id, peer)
        self.outlet = self._channel.outlet
        self._named = NamedSegments()
        self._mapped = MappedSegments(opener)
        self._reach = ReachableDevices(peer)
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
            raise self._closed_error()
        if not isinstance(message, Update) or not message.nbytes:
            self._channel.write(self._peer, OutgoingFrame(framed(message)))
        elif payload is None or payload.nbytes < message.nbytes:
            raise ConfigurationError(f"Version {message.version} was sent without its {message.nbytes} bytes.")
        elif payload.mappable and self.shares(payload, message.nbytes):
            self._send_shared(message, payload)
        else:
            self._send_inline(message, payload)

    def shares(self, payload: Buffer, nbytes: int) -> bool:
        """Whether the worker maps the payload's memory: see `SharesMemory.shares`."""
        if isinstance(payload, DeviceBuffer):
            if self._reaches(payload):
                return True
            payload.stage()
        wanted = self._payloads is Payloads.SHARED and nbytes >= INLINE_BELOW_NBYTES
        return wanted and payload.segment is not None and self._channel.passes_descriptors

    def _reaches(self, payload: DeviceBuffer) -> bool:
        return payload.slot.memory.identity in self.reached

    def _send_inline(self, message: Update, payload: Buffer) -> None:
        token = object()
        done = partial(payload.pins.discard, token)
        frame = OutgoingFrame(framed_updates.control(message), payload.view[: message.nbytes], done=done)
        payload.pins.add(token)
        self._pins.hold(message, None)
        self._channel.write(self._peer, frame)

    def _send_shared(self, message: Update, payload: Buffer) -> None:
        on_device = isinstance(payload, DeviceBuffer) and self._reaches(payload)
        slot: Segment | DeviceSlot | None = payload.slot if on_device else payload.segment  # type: ignore[attr-defined]
        assert slot is not None
        descriptors = self._named.missing(slot)
        control = framed_updates.control(message, slot, len(descriptors))
        frame = OutgoingFrame(control, descriptors=descriptors, keep=payload)
        self._named.name(slot, message)
        # Held even if the link turns out to be dead: an earlier frame may have shared the same version.
        self._pins.hold(message, payload)
        if isinstance(slot, DeviceSlot):
            self._reach.used(message, slot, self._pins.acked)
        self._channel.write(self._peer, frame)

    def takes_parts(self, payload: Buffer, nbytes: int, hashed: bool) -> bool:
        """Whether the worker maps the segment already, and can hash it while it is filled: see `TakesParts`.

        A worker that has not read what was sent before gets no parts, so that they never pile up.
        """
        segment = payload.segment
        if not hashed or segment is None or isinstance(payload, DeviceBuffer) or not self.outlet.idle:
            return False
        return self.shares(payload, nbytes) and not self._named.missing(segment)

    def send_part(self, part: Part, payload: Buffer) -> None:
        """Name a range of the segment: see `TakesParts`."""
        if self._closed:
            raise self._closed_error()
        assert payload.segment is not None
        if self._named.missing(payload.segment):  # versions that other threads have sent pushed it out of the list
            return
        self._channel.write(self._peer, OutgoingFrame(framed(replace(part, segment=payload.segment.number))))

    def flush(self) -> bool:
        """Write as much as possible of what is queued: see `Link.flush`."""
        if self._closed:
            raise self._closed_error()
        return self._channel.write(self._peer)

    def receive(self) -> list[Received]:
        """All whole messages that have arrived, up to a goodbye: see `Link.receive`."""
        if self._closed:
            raise self._closed_error()
        if self._broken is not None:
            raise self._broken
        frames = self._channel.collect(self._box)
        if not frames:
            return []
        received: list[Received] = []
        unread = deque(frames)
        try:
            while unread:
                frame = unread.popleft()
                message, self._remark = frame.message, ""
                if isinstance(message, Update) and message.slot is not None:
                    received.append(self._open(frame, message.slot))
                    continue
                if isinstance(message, Ack):
                    self._pins.answered(message)
                elif isinstance(message, Part):
                    received.extend(self._read_ahead(message))
                    continue
                elif isinstance(message, Hello | Refusal) and self._is_remark(message):
                    continue
                received.append(Received(message, frame.payload, None, frame.untaken))
        except (ProtocolError, TransportError) as error:
            self._broken = error
            discard(unread)
            if not received:
                raise
            # Earlier messages are delivered now and the error at the next call, so the wait before that must end.
            self._box.signal()
        return received

    @property
    def remark(self) -> str:
        """What others than the worker reported about this link: see `Remarks`."""
        return self._remark

    def _is_remark(self, message: Hello | Refusal) -> bool:
        """Process a remark of the worker. Returns whether the message is one, and not for the driver."""
        if isinstance(message, Refusal):
            self._remark = unmet_reason(message)
            if self._remark:
                details = self._box.model_id, self._peer, self._remark
                logger.warning("model %r: %s did not accept the handshake: %s", *details)
                return True
            self._pins.answered(message)
            self._named.answered(message)
        self._reach.answered(message)
        return False

    def _open(self, frame: Frame, slot: SlotRef) -> Received:
        """The message of a frame whose payload is in a segment."""
        message, nbytes = frame.message, frame.message.nbytes if isinstance(frame.message, Update) else 0
        try:
            mapping = self._mapped.find(slot, frame.descriptors, frame.untaken)
        except NoRoom as error:
            return Received(message, untaken=str(error))
        if mapping.nbytes < nbytes:
            raise codec.malformed(f"{nbytes} bytes in a segment of {mapping.nbytes}", b"")
        if not isinstance(mapping, Mapping):
            return Received(message, slot=mapping, on_device=mapping)
        return Received(message, mapping.lend(nbytes), mapping)

    def _read_ahead(self, part: Part) -> list[Received]:
        """A range of a segment that is still being filled; nothing, if this process has no room for the segment."""
        mapping = self._mapped.known(part.segment)
        if not isinstance(mapping, Mapping):
            return []
        if mapping.nbytes < part.nbytes:
            raise codec.malformed(f"{part.nbytes} bytes in a segment of {mapping.nbytes}", b"")
        return [Received(part, mapping.read_ahead(part.payload_id, part.nbytes))]

    @property
    def opens(self) -> bool:
        """Whether this end can open slots on a device: see `CarriesDevices`."""
        return self._mapped.opener is not None and self._channel.passes_descriptors

    @property
    def reached(self) -> frozenset[bytes]:
        """The devices whose slots the other end can open: see `CarriesDevices`."""
        shares = self._payloads is Payloads.SHARED and self._channel.passes_descriptors
        return self._reach.devices if shares else frozenset()

    def copied_to_device(self) -> None:
        """Segments are copied to a device: see `CarriesDevices`."""
        self._mapped.pinnable = True

    @property
    def carries_deltas(self) -> bool:
        """Whether no payload lies in shared memory: see `CarriesDeltas`."""
        return self._payloads is Payloads.INLINE

    def waitables(self) -> list[int]:
        """Descriptors that become readable when there is something to receive: see `Link.waitables`."""
        if self._closed:
            return []
        if self._channel.connection.closed:
            self._box.signal()  # `receive` reports it
        return [*self._channel.waitables(), self._box.waker.fd]

    def wants_write(self) -> int | None:
        """The descriptor to watch for room to write: see `Link.wants_write`."""
        return None if self._closed or self.outlet.idle else self._channel.wants_write()

    def all_read(self) -> bool | None:
        """Whether the peer has read everything that was sent over this connection: see `TellsWhatIsRead`."""
        return None if self._closed else self._channel.all_read()

    def watch(self, pid: int, started: int) -> None:
        """Watch the peer's process: see `Link.watch`."""
        if pid and not self._closed:
            self._channel.watch(pid, started, self._box)

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

    def withdraw(self) -> None:
        """Close the link, and leave the connection open: see `Withdraws.withdraw`."""
        self._closed = True
        self._channel.withdraw(self._box)

    def _closed_error(self) -> TransportError:
        return TransportError(f"The link to {self._peer} is closed.")


#: Two alternate in a steady run; a third is there for a worker that is behind.
MAX_SEGMENTS: Final = 4


class NumberedSlot(Protocol):
    """A slot that links name: a segment, or memory of a device."""

    @property
    def number(self) -> int:
        """The number by which links name the slot."""

    @property
    def fd(self) -> int:
        """The descriptor by which another process opens it."""


class NamedSegments:
    """The trainer's list: the segments that this link has named last."""

    def __init__(self) -> None:
        #: For each segment's number, the key of the version that it was named for last.
        self._keys: OrderedDict[int, tuple[int, int]] = OrderedDict()
        #: Segments whose descriptors must be passed again, since the worker may not have mapped them.
        self._to_pass_again: set[int] = set()

    def missing(self, segment: NumberedSlot) -> tuple[int, ...]:
        """The descriptors to pass with the next frame that names ``segment``."""
        passed = segment.number in self._keys and segment.number not in self._to_pass_again
        return () if passed else (segment.fd,)

    def name(self, segment: NumberedSlot, update: Update) -> None:
        """Record that a frame names this segment."""
        self._keys[segment.number] = update.incarnation, update.version
        self._keys.move_to_end(segment.number)
        self._to_pass_again.discard(segment.number)
        if len(self._keys) > MAX_SEGMENTS:
            self._to_pass_again.discard(self._keys.popitem(last=False)[0])

    def answered(self, refusal: Refusal) -> None:
        """Process a refusal: the worker may have refused a version because it could not map its segment."""
        key = refusal.incarnation, refusal.version
        self._to_pass_again.update(number for number, named_for in self._keys.items() if named_for == key)


class MappedSegments:
    """The worker's list: the segments that it maps. Tensors keep a mapping alive after it has left the list.

    Args:
        opener: opens slots that lie on a device; None if this end cannot open any.
    """

    def __init__(self, opener: Opener | None = None) -> None:
        self.opener = opener
        #: Whether segments are to be mapped so that they can be pinned: they are copied to a device.
        self.pinnable = False
        #: The mapping of each segment, or why there was no room for it.
        self._mappings: OrderedDict[int, Mapping | OnDevice | str] = OrderedDict()

    def find(self, slot: SlotRef, descriptors: tuple[int, ...], untaken: str = "") -> Mapping | OnDevice:
        """The mapping of a segment, made now if its descriptor came with the frame.

        Args:
            untaken: why a passed descriptor could not be taken; empty if none was lost.

        Raises:
            ProtocolError: the peer never passed that segment.
            NoRoom: there is no room to map it now, or there was none when its descriptor came.
            TransportError: it cannot be mapped.
        """
        try:
            if untaken or descriptors:
                self._map_slot(slot, descriptors, untaken)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        mapping = self.known(slot.segment)
        self._mappings.move_to_end(slot.segment)
        if len(self._mappings) > MAX_SEGMENTS:
            self._mappings.popitem(last=False)
        if isinstance(mapping, str):
            raise NoRoom(mapping)
        return mapping

    def known(self, segment: int) -> Mapping | OnDevice | str:
        """The mapping of a segment, or why there was no room for it. The order of the list stays as it is.

        Raises ProtocolError: the peer never passed that segment.
        """
        found = self._mappings.get(segment)
        if found is None:
            raise codec.malformed(f"The peer names segment {segment}, which it never passed", b"")
        return found

    def _map_slot(self, slot: SlotRef, descriptors: tuple[int, ...], untaken: str) -> None:
        try:
            mapping_or_reason = untaken or self._open_slot(slot, descriptors[0])
        except NoRoom as error:
            mapping_or_reason = str(error)
        # Passed again after a refusal, it may be another segment than the one mapped so far: the new one counts.
        if not isinstance(mapping_or_reason, str) or isinstance(self._mappings.get(slot.segment, ""), str):
            self._mappings[slot.segment] = mapping_or_reason

    def _open_slot(self, slot: SlotRef, descriptor: int) -> Mapping | OnDevice:
        if not slot.device:
            return Mapping(descriptor, self.pinnable)
        if self.opener is None:
            raise codec.malformed("The peer names a slot on a device, and this end said that it opens none", b"")
        return self.opener(slot, descriptor)

    def clear(self) -> None:
        """Drop all mappings, except those that something still uses."""
        self._mappings.clear()
