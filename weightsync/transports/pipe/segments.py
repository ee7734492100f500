"""The segments that a worker maps, as both ends of a link list them.

Both keep the same list without messages: frames of a link arrive in order, so both lists change in step and drop the
oldest segment when they are full. A worker that could not map a segment refuses the update in it; the trainer then
passes its descriptor again with the next version in that segment.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Final

from weightsync.protocol import codec
from weightsync.protocol.messages import Message, Refusal, SlotRef, Update
from weightsync.transports.buffers import Mapping, NoRoom, Segment

#: Two alternate in a steady run; a third is there for a worker that is behind.
MAX_SEGMENTS: Final = 4


class Named:
    """The trainer's list: the segments that this link has named last."""

    def __init__(self) -> None:
        #: For each segment's number, the key of the version that it was named for last.
        self._keys: OrderedDict[int, tuple[int, int]] = OrderedDict()
        #: Segments whose descriptors must be passed again, since the worker may not have mapped them.
        self._again: set[int] = set()

    def missing(self, segment: Segment) -> tuple[int, ...]:
        """The descriptors to pass with the next frame that names ``segment``."""
        passed = segment.number in self._keys and segment.number not in self._again
        return () if passed else (segment.fd,)

    def name(self, segment: Segment, update: Update) -> None:
        """Record that a frame names this segment."""
        self._keys[segment.number] = update.incarnation, update.version
        self._keys.move_to_end(segment.number)
        self._again.discard(segment.number)
        if len(self._keys) > MAX_SEGMENTS:
            self._again.discard(self._keys.popitem(last=False)[0])

    def answered(self, message: Message) -> None:
        """Process an answer: the worker may have refused a version because it could not map its segment."""
        if isinstance(message, Refusal):
            key = message.incarnation, message.version
            self._again.update(number for number, named_for in self._keys.items() if named_for == key)


class Mapped:
    """The worker's list: the segments that it maps. Tensors keep a mapping alive after it has left the list."""

    def __init__(self) -> None:
        #: The mapping of each segment, or why there was no room for it.
        self._mappings: OrderedDict[int, Mapping | str] = OrderedDict()

    def find(self, slot: SlotRef, descriptors: tuple[int, ...], untaken: str = "") -> Mapping:
        """The mapping of a segment, made now if its descriptor came with the frame.

        Args:
            slot: names the segment.
            descriptors: the descriptors that came with the frame.
            untaken: why a passed descriptor could not be taken; empty: none was lost.

        Raises:
            ProtocolError: the peer never passed that segment.
            NoRoom: there is no room to map it now, or there was none when its descriptor came.
            TransportError: it cannot be mapped.
        """
        try:
            if untaken or descriptors:
                self._take(slot.segment, descriptors, untaken)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        found = self._mappings.get(slot.segment)
        if found is None:
            raise codec.malformed(f"The peer names segment {slot.segment}, which it never passed", b"")
        self._mappings.move_to_end(slot.segment)
        if len(self._mappings) > MAX_SEGMENTS:
            self._mappings.popitem(last=False)
        if isinstance(found, str):
            raise NoRoom(found)
        return found

    def _take(self, segment: int, descriptors: tuple[int, ...], untaken: str) -> None:
        try:
            made: Mapping | str = untaken or Mapping(descriptors[0])
        except NoRoom as error:
            made = str(error)
        # Passed again after a refusal, it may be another segment than the one mapped so far: the new one counts.
        if isinstance(made, Mapping) or not isinstance(self._mappings.get(segment), Mapping):
            self._mappings[segment] = made

    def clear(self) -> None:
        """Drop all mappings, except those that something still uses."""
        self._mappings.clear()
