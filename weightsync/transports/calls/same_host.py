"""Payloads that a worker on the trainer's host maps from the trainer's memory, on links whose messages are calls.

Such a call names the payload's place: the trainer's process, and the descriptor of the segment there. The worker opens
it through ``/proc`` and maps it private, as over pipes, where the kernel passes the descriptor. The worker's answers
unpin segments (see `weightsync.transports.buffers.Pins`). A worker says with its handshake's answer that it can reach
the trainer's memory. Links with a key carry their payloads: what is authenticated must not change afterwards.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple, Self
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from weightsync.errors import TransportError
from weightsync.protocol import codec
from weightsync.protocol.messages import Ack, Hello, Message, Refusal, Update
from weightsync.transports.base import Received
from weightsync.transports.buffers import Buffer, NoRoom, Pins, Segment
from weightsync.transports.mapping import Mapping
from weightsync.transports.pipe.link import MAX_SEGMENTS
from weightsync.transports.process import own_host, own_identity, read_start, started_at

#: A frame beside a handshake's answer: this worker can map the trainer's segments.
REACHES: Final = b"WSYM"
#: The link's target in /proc of a descriptor of a `Segment`.
_TARGET: Final = "/memfd:weightsync (deleted)"


class SegmentPlace(NamedTuple):
    """Where a segment is. It travels as a plain tuple."""

    pid: int
    #: When that process started, in clock ticks since boot.
    started: int
    descriptor: int
    inode: int

    @classmethod
    def of(cls, segment: Segment) -> Self:
        """The place of one of this process's segments."""
        return cls(*own_identity(), segment.fd, os.fstat(segment.fd).st_ino)

    @classmethod
    def read(cls, value: object) -> Self:
        """Decode the place that a call carried. Raises ProtocolError: it is not a valid place."""
        if not isinstance(value, tuple) or len(value) != 4 or not all(type(each) is int for each in value):
            raise codec.malformed("A call named an invalid place in memory", b"")
        return cls(*value)

    def map(self) -> Mapping:
        """Map the segment.

        Raises:
            NoRoom: this process has no descriptor or memory left for it.
            TransportError: it is not there any more, or may not be read.
        """
        path = f"/proc/{self.pid}/fd/{self.descriptor}"
        try:
            there = read_start(self.pid) == self.started and os.readlink(path) == _TARGET
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if there else -1
        except OSError as error:
            raise NoRoom(f"The memory of process {self.pid} cannot be opened: {error.strerror}.") from error
        if descriptor < 0:
            raise TransportError(f"Process {self.pid} no longer has the memory that its call named.")
        try:
            if os.fstat(descriptor).st_ino != self.inode:
                raise TransportError(f"Process {self.pid} has other memory in the place that its call named.")
            return Mapping(descriptor)
        finally:
            os.close(descriptor)


def reaches(hello: Hello) -> bool:
    """Whether this process can map the segments of the trainer that sent this handshake."""
    if not hello.pid or hello.host != own_host() or started_at(hello.pid) != hello.started:
        return False
    return os.access(f"/proc/{hello.pid}/fd", os.R_OK | os.X_OK)


class SharedPayloads:
    """The trainer's end of one link: which payloads the worker maps, and may still be reading.

    Calls end in any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pins = Pins()
        self._reached = False
        self._shares = False
        #: Of payloads that are to be sent: the seal that each gets, and whether the worker maps it. One thread may pack
        #: the next version while another sends the one before.
        self._promises: WeakKeyDictionary[Buffer, tuple[bytes, bool]] = WeakKeyDictionary()

    def shares(self, payload: Buffer) -> bool:
        """Whether the worker maps a payload. The answer stays the same until `place` is called with it."""
        if payload.segment is None:
            return False
        with self._lock:
            seal, decided = payload.segment.next_seal, self._promises.get(payload)
            if decided is None or decided[0] != seal:
                decided = self._promises[payload] = seal, self._shares
            return decided[1]

    def place(self, update: Update, payload: Buffer | None) -> tuple[Update, SegmentPlace | None]:
        """The update with its slot, and the place of its payload, which is pinned from now on.

        The update unchanged and None if `shares` did not promise that the worker maps it: the call must carry it.
        """
        if payload is None or payload.segment is None:
            return update, None
        with self._lock:
            if self._promises.pop(payload, None) != (payload.segment.next_seal, True):
                return update, None
            self._pins.hold(update, payload)
            return replace(update, slot=payload.segment.ref), SegmentPlace.of(payload.segment)

    def strip_mark(self, frames: Sequence[bytes]) -> Sequence[bytes]:
        """The frames of a call's result, without the worker's remark that it reaches our memory."""
        if not isinstance(frames, list | tuple) or REACHES not in frames:
            return frames
        with self._lock:
            self._reached = self._shares = True
        return [frame for frame in frames if frame != REACHES]

    def heard(self, messages: Sequence[Message]) -> None:
        """Take a call's answers. After a refusal payloads are carried, until the worker has acked one."""
        with self._lock:
            for message in messages:
                self._pins.answered(message)
                if isinstance(message, Ack):
                    self._shares = self._reached
                elif isinstance(message, Refusal):
                    self._shares = False

    def close(self) -> None:
        """The worker can no longer be asked: memory that it may be reading is never written again."""
        with self._lock:
            self._shares = self._reached = False
            self._promises.clear()
            self._pins.retire()


class MappedPlaces:
    """The worker's end of one link: the segments that it maps. Tensors keep a mapping alive after it has gone."""

    def __init__(self) -> None:
        self._mappings: OrderedDict[SegmentPlace, Mapping] = OrderedDict()

    def received(self, update: Update, place: SegmentPlace) -> Received:
        """An update with its payload where it lies; without it, and with the reason, if that cannot be mapped.

        Raises ProtocolError: the segment is too small for the update.
        """
        try:
            mapping = self._mappings.pop(place, None) or place.map()
        except TransportError as error:
            return Received(update, untaken=str(error))
        self._mappings[place] = mapping
        if len(self._mappings) > MAX_SEGMENTS:
            self._mappings.popitem(last=False)
        if mapping.nbytes < update.nbytes:
            raise codec.malformed(f"{update.nbytes} bytes in a segment of {mapping.nbytes}", b"")
        return Received(update, mapping.view[: update.nbytes], mapping)

    def clear(self) -> None:
        """Drop all mappings, except those that something still uses."""
        self._mappings.clear()
