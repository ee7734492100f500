"""Memory that payloads arrive in."""

from __future__ import annotations

import mmap
from typing import Final

from weightsync.transports.memory import anonymous

_SPARE: Final = 2


class Landings:
    """Memory for payloads: pages touched before, once nobody refers to them."""

    def __init__(self) -> None:
        self._known: list[mmap.mmap] = []

    def find(self, nbytes: int) -> memoryview:
        """Memory for a payload, writable, and valid as long as it is referred to.

        Raises:
            TransportError: there is not enough.
        """
        landing = next((known for known in self._known if len(known) >= nbytes and _unused(known)), None)
        if landing is None:
            landing = anonymous(nbytes)
            self._known = [*self._known, landing][-_SPARE:]
        return memoryview(landing)[:nbytes]


def _unused(memory: mmap.mmap) -> bool:
    """Whether no view of it is left: only then can it be resized, here to the size it has."""
    try:
        memory.resize(len(memory))
    except BufferError:
        return False
    return True
