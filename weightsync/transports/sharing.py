"""Which segments a worker already maps, kept alike at both ends of a link without a word between them.

Frames of a link arrive in order. So the trainer's list of the segments it has named and the worker's list of
those it maps change in step, and both drop the one named longest ago when a list is full. A worker that could not map
one refuses what lies there; then the trainer passes that segment's descriptor again with the next version there.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Final

from weightsync import wire
from weightsync.messages import Message, Refusal, SlotRef, Update
from weightsync.transports.memory import Mapping, NoRoom, Segment

#: Two alternate in a steady run, and a third is there while a worker is behind.
MAX_SEGMENTS: Final = 4


class Named:
    """The trainer's side: the segments that this link has named last."""

    def __init__(self) -> None:
        #: The number of each to the key of the version that it was named for last.
        self._keys: OrderedDict[int, tuple[int, int]] = OrderedDict()
        #: Those whose descriptors are to be passed again, since the worker may not map them.
        self._again: set[int] = set()

    def missing(self, segment: Segment) -> tuple[int, ...]:
        """The descriptors that must travel with the frame that names ``segment`` next."""
        passed = segment.number in self._keys and segment.number not in self._again
        return () if passed else (segment.fd,)

    def name(self, segment: Segment, update: Update) -> None:
        """A frame that names it is on its way."""
        self._keys[segment.number] = update.incarnation, update.version
        self._keys.move_to_end(segment.number)
        self._again.discard(segment.number)
        if len(self._keys) > MAX_SEGMENTS:
            self._again.discard(self._keys.popitem(last=False)[0])

    def answered(self, message: Message) -> None:
        """Learn from what the worker says: it may have refused a version because it could not map its segment."""
        if isinstance(message, Refusal):
            key = message.incarnation, message.version
            self._again.update(number for number, named_for in self._keys.items() if named_for == key)


class Mapped:
    """The worker's side: the segments it maps. Tensors keep a mapping alive that is no longer listed."""

    def __init__(self) -> None:
        #: The mapping of each, or why there was no room for it.
        self._mappings: OrderedDict[int, Mapping | str] = OrderedDict()

    def find(self, slot: SlotRef, descriptors: tuple[int, ...], untaken: str = "") -> Mapping:
        """The mapping of a segment, made now if its descriptor came with the frame.

        Args:
            slot: names the segment.
            descriptors: those that came with the frame.
            untaken: why its descriptor did not come, though it was passed; empty: it was not.

        Raises:
            ProtocolError: the peer never passed that segment.
            NoRoom: it cannot be mapped just now, or could not be when its descriptor came.
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
            raise wire.malformed(f"The peer names segment {slot.segment}, which it never passed", b"")
        self._mappings.move_to_end(slot.segment)
        if len(self._mappings) > MAX_SEGMENTS:
            self._mappings.popitem(last=False)
        if isinstance(found, str):
            raise NoRoom(found)
        return found

    def _take(self, segment: int, descriptors: tuple[int, ...], untaken: str) -> None:
        if isinstance(self._mappings.get(segment), Mapping):
            return  # passed again, after a refusal that had nothing to do with it
        try:
            self._mappings[segment] = untaken or Mapping(descriptors[0])
        except NoRoom as error:
            self._mappings[segment] = str(error)

    def clear(self) -> None:
        """Map none any more, but for those that something still looks at."""
        self._mappings.clear()
