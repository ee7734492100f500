"""What our frames on a pipe begin with, so that whoever reads the raw pipe is told so.

`Connection.recv` unpickles whatever it reads. The preamble is a whole pickle: it calls `weightsync.errors.raw_pipe`,
which raises. We never unpickle it ourselves: a frame that begins with these bytes is ours, and they are skipped.
"""

from __future__ import annotations

from typing import Final

from weightsync import wire
from weightsync.header import MAGIC, Readable
from weightsync.messages import Message

#: GLOBAL weightsync.errors.raw_pipe, EMPTY_TUPLE, REDUCE, STOP.
PREAMBLE: Final = b"cweightsync.errors\nraw_pipe\n)R."


def framed(message: Message, descriptors: int = 0) -> bytes:
    """A message's control part as it goes over a pipe."""
    return PREAMBLE + wire.encode(message, descriptors)


def start_of_ours(content: Readable) -> int | None:
    """Where the header lies in a frame of ours; None: the frame is the user's own.

    Frames without the preamble are ours too: an older release writes them, and is told which version it speaks.
    """
    if bytes(content[: len(PREAMBLE)]) == PREAMBLE:
        return len(PREAMBLE)
    return 0 if bytes(content[: len(MAGIC)]) == MAGIC else None


def may_be_ours(content: Readable) -> bool:
    """Whether what is here of a frame may yet turn out to be the start of one of ours."""
    start = bytes(content[: len(PREAMBLE)])
    return len(start) < len(PREAMBLE) and (
        PREAMBLE.startswith(start) or (len(start) < len(MAGIC) and MAGIC.startswith(start))
    )
