"""Which segments a worker already maps, kept alike at both ends of a link without a word between them.

Frames of a link arrive in order. So the trainer's list of the segments it has named and the worker's list of
those it maps change in step, and both drop the one named longest ago when a list is full.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Final

from weightsync import wire
from weightsync.messages import SlotRef
from weightsync.transports.memory import Mapping, Segment

#: Two alternate in a steady run, and a third is there while a worker is behind.
MAX_SEGMENTS: Final = 4


class Named:
    """The trainer's side: the segments whose descriptors this link has passed and the worker still maps."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[int, None] = OrderedDict()

    def missing(self, segment: Segment) -> tuple[int, ...]:
        """The descriptors that must travel with the frame that names ``segment`` next."""
        return () if segment.number in self._numbers else (segment.fd,)

    def name(self, segment: Segment) -> None:
        """A frame that names it is on its way."""
        self._numbers[segment.number] = None
        self._numbers.move_to_end(segment.number)
        if len(self._numbers) > MAX_SEGMENTS:
            self._numbers.popitem(last=False)


class Mapped:
    """The worker's side: the segments it maps. Tensors keep a mapping alive that is no longer listed."""

    def __init__(self) -> None:
        self._mappings: OrderedDict[int, Mapping] = OrderedDict()

    def find(self, slot: SlotRef, descriptors: tuple[int, ...]) -> Mapping:
        """The mapping of a segment, made now if its descriptor came with the frame.

        Raises:
            ProtocolError: the peer never passed that segment.
            TransportError: it cannot be mapped.
        """
        if descriptors:
            try:
                self._mappings[slot.segment] = Mapping(descriptors[0])
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        if slot.segment not in self._mappings:
            raise wire.malformed(f"The peer names segment {slot.segment}, which it never passed", b"")
        self._mappings.move_to_end(slot.segment)
        if len(self._mappings) > MAX_SEGMENTS:
            self._mappings.popitem(last=False)
        return self._mappings[slot.segment]

    def clear(self) -> None:
        """Map none any more, but for those that something still looks at."""
        self._mappings.clear()
