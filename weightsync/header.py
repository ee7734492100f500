"""The header that each frame starts with: fixed, versioned, checked before anything behind it is believed.

offset  size  header field (big-endian)
     0     4  magic, ``b"WSYN"``
     4     2  protocol version
     6     2  zero
     8     8  xxh3-64 of all that follows
    16     1  kind of message
    17     1  number of file descriptors that travel with the frame
    18     1  size of the digest: 0 or 16
    19     1  zero
    20     4  size of the body
    24     8  size of the payload that follows the body
    32    16  incarnation
    48     8  version
    56    16  digest (of an update's payload, or of what an ack confirms)
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from weightsync._tables import PROTOCOL_VERSION
from weightsync.errors import ProtocolError

MAGIC: Final = b"WSYN"
HEADER_NBYTES: Final = 72
#: A layout of a hundred thousand tensors takes about 10 MiB; what claims more than this is refused unread.
MAX_BODY_NBYTES: Final = 256 * 2**20
#: What `ProtocolError.unread` keeps of a malformed frame.
MAX_UNREAD_NBYTES: Final = 64 * 1024

_HEADER: Final = struct.Struct("!4sHHQBBBBIQ16sQ16s")
_FIRST: Final = struct.Struct("!4sH")
START: Final = struct.Struct("!4sHHQ")
COVERED: Final = struct.Struct("!BBBBIQ16sQ16s")

Readable = bytes | bytearray | memoryview


class Head(NamedTuple):
    """A header, not yet checked against its body."""

    magic: bytes
    protocol: int
    zero: int
    checksum: int
    kind: int
    descriptors: int
    digest_nbytes: int
    pad: int
    body_nbytes: int
    payload_nbytes: int
    incarnation: bytes
    version: int
    digest: bytes

    @property
    def control_nbytes(self) -> int:
        """Size of header and body."""
        return HEADER_NBYTES + self.body_nbytes


def peek(data: Readable) -> Head:
    """Read a header alone, so that the rest of its frame can be awaited.

    Raises:
        ProtocolError: not a header of ours, of another protocol version, or of a body beyond all bounds.
    """
    if len(data) < HEADER_NBYTES:
        _require_ours(data)
        raise malformed(f"A frame ends after {len(data)} bytes of its header's {HEADER_NBYTES}", data)
    head = Head._make(_HEADER.unpack_from(data))
    if head.magic != MAGIC or head.protocol != PROTOCOL_VERSION or head.zero:
        _require_ours(data)
        raise malformed("A header is malformed", data)
    if head.body_nbytes > MAX_BODY_NBYTES:
        raise malformed(f"A frame claims a body of {head.body_nbytes} bytes", data)
    return head


def _require_ours(data: Readable) -> None:
    """Magic and version come first in every version of the protocol, whatever follows them."""
    if len(data) < _FIRST.size:
        return
    magic, protocol = _FIRST.unpack_from(data)
    if magic != MAGIC:
        raise malformed("A frame does not start as ours do", data)
    if protocol != PROTOCOL_VERSION:
        raise malformed(
            f"The peer speaks protocol version {protocol}, this process version {PROTOCOL_VERSION}: "
            "install the same release of weightsync at both ends",
            data,
        )


def malformed(what: str, data: Readable) -> ProtocolError:
    """The error for bytes that are ours to read but make no sense."""
    return ProtocolError(f"{what}.", unread=bytes(data[:MAX_UNREAD_NBYTES]))
