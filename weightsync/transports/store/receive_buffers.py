"""What has arrived: the memory for payloads, and messages with or without a payload in them."""

from __future__ import annotations

import mmap
from typing import Final

from weightsync.protocol import codec
from weightsync.protocol.messages import Message, Update
from weightsync.transports.buffers import anonymous
from weightsync.transports.store.mailbox import INLINE_NBYTES

_SPARE: Final = 2


def decoded(text: memoryview) -> tuple[Message, memoryview | None, int]:
    """A message, the payload in it, and the size of its payload, which follows it if it is large.

    Raises ProtocolError: it is malformed.
    """
    control = codec.peek(text).control_nbytes
    message, inline = codec.decode(text[:control]), text[control:]
    nbytes = message.nbytes if isinstance(message, Update) else 0
    if len(inline) != (nbytes if nbytes <= INLINE_NBYTES else 0):
        raise codec.malformed(f"{nbytes} bytes were announced, but {len(inline)} arrived", text)
    return message, inline if len(inline) else None, nbytes


class ReceiveBuffers:
    """Memory for payloads: pages used before, once nothing refers to them."""

    def __init__(self) -> None:
        self._known: list[mmap.mmap] = []

    def find(self, nbytes: int) -> memoryview:
        """Memory for a payload, writable, and valid as long as something refers to it.

        Raises TransportError: there is not enough.
        """
        buffer = next((known for known in self._known if len(known) >= nbytes and _unused(known)), None)
        if buffer is None:
            buffer = anonymous(nbytes)
            self._known = [*self._known, buffer][-_SPARE:]
        return memoryview(buffer)[:nbytes]


def _unused(memory: mmap.mmap) -> bool:
    """Whether no view of it is left: only then can it be resized, here to its own size."""
    try:
        memory.resize(len(memory))
    except BufferError:
        return False
    return True
