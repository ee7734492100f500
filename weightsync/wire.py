"""The words of the protocol as bytes: a versioned fixed header, then fields with explicit lengths. No pickle.

    offset  size  header field (big-endian)
         0     4  magic, ``b"WSYN"``
         4     2  protocol version
         6     1  kind of message
         7     1  number of file descriptors that travel with the frame
         8     1  size of the digest: 0 or 16
         9     3  zero
        12     4  size of the body
        16     8  size of the payload that follows the body
        24    16  incarnation
        40     8  version
        48    16  digest (of an update's payload, or of what an ack confirms)
        64     8  xxh3-64 of the 64 bytes above and the body

The body is a sequence of fields, each a 4-byte length and that many bytes: first the model's id, then the
fields of the kind of message in the order of its dataclass. Header and body together are the *control part*;
a flipped bit anywhere in it is noticed. The payload is not covered: it has its digest.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import xxhash

from weightsync._tables import PROTOCOL_VERSION, RefusalKind
from weightsync.errors import ConfigurationError, ProtocolError
from weightsync.messages import Ack, Bye, Hello, Message, Refusal, SlotRef, Update

MAGIC: Final = b"WSYN"
HEADER_NBYTES: Final = 72
#: A layout of a hundred thousand tensors takes about 10 MiB; what claims more than this is refused unread.
MAX_BODY_NBYTES: Final = 256 * 2**20
#: What `ProtocolError.unread` keeps of a malformed frame.
MAX_UNREAD_NBYTES: Final = 64 * 1024

_HEADER: Final = struct.Struct("!4sHBBB3xIQ16sQ16s")
_CHECKSUM: Final = struct.Struct("!Q")
_LENGTH: Final = struct.Struct("!I")
_SECONDS: Final = struct.Struct("!d")
_DIGEST_SIZES: Final = (0, 16)
_REFUSALS: Final = tuple(RefusalKind)

Readable = bytes | bytearray | memoryview


class Kind(IntEnum):
    """What a frame says it is."""

    HELLO = 1
    UPDATE = 2
    ACK = 3
    REFUSAL = 4
    BYE = 5


class Head(NamedTuple):
    """A header, not yet checked against its body."""

    kind: int
    descriptors: int
    digest_nbytes: int
    body_nbytes: int
    payload_nbytes: int
    incarnation: int
    version: int
    digest: bytes

    @property
    def control_nbytes(self) -> int:
        """Size of header and body."""
        return HEADER_NBYTES + self.body_nbytes


def inline_nbytes(message: Message) -> int:
    """The size of the payload that follows ``message`` in its frame; 0 if it has none, or in a slot."""
    return message.nbytes if isinstance(message, Update) and message.slot is None else 0


def encode(message: Message, descriptors: int = 0) -> bytes:
    """The control part of ``message``; its payload, if it travels inline, is to follow.

    Args:
        message: what to say.
        descriptors: how many file descriptors travel with the frame.

    Raises:
        ConfigurationError: a field does not fit the wire (a digest that is not 16 bytes, a number out of
            range, a layout above 256 MiB). Nothing was written.
    """
    try:
        return _encode(message, descriptors)
    except (struct.error, OverflowError, UnicodeEncodeError, ValueError) as error:
        raise ConfigurationError(
            f"A {type(message).__name__} of model {message.model_id!r} does not fit the wire: {error}."
        ) from error


def _encode(message: Message, descriptors: int) -> bytes:
    kind, digest, fields = _fields_of(message)
    body = b"".join([_sized(message.model_id.encode()), *map(_sized, fields)])
    if len(body) > MAX_BODY_NBYTES or len(digest) not in _DIGEST_SIZES:
        raise ValueError(f"its body takes {len(body)} bytes, its digest {len(digest)}")
    version = 0 if isinstance(message, Bye) else message.version
    header = _HEADER.pack(
        MAGIC,
        PROTOCOL_VERSION,
        kind,
        descriptors,
        len(digest),
        len(body),
        inline_nbytes(message),
        _wide(message.incarnation),
        version,
        digest,
    )
    return b"".join((header, _CHECKSUM.pack(xxhash.xxh3_64_intdigest(header + body)), body))


def _fields_of(message: Message) -> tuple[Kind, bytes, Sequence[bytes]]:
    match message:
        case Update():
            slot = b"" if message.slot is None else _number(message.slot.segment)
            fields = (message.layout_digest, message.layout, _number(message.nbytes), message.extras, slot)
            return Kind.UPDATE, message.digest, fields
        case Ack():
            return Kind.ACK, message.digest, (_SECONDS.pack(message.seconds),)
        case Hello():
            watched = (_number(message.pid), _number(message.started), _wide(message.fence))
            return Kind.HELLO, b"", (message.layout_digest, message.layout, *watched)
        case Refusal():
            said = (_prose(message.reason), _prose(message.remote_traceback), _wide(message.fence))
            return Kind.REFUSAL, b"", (bytes([_REFUSALS.index(message.kind)]), *said)
        case Bye():
            return Kind.BYE, b"", (_prose(message.reason),)


def _prose(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


def _sized(field: bytes) -> bytes:
    return _LENGTH.pack(len(field)) + field


def _number(value: int) -> bytes:
    return value.to_bytes(8, "big")


def _wide(value: int) -> bytes:
    return value.to_bytes(16, "big")


def peek(data: Readable) -> Head:
    """Read a header alone, so that the rest of its frame can be awaited.

    Raises:
        ProtocolError: not a header of ours, of another protocol version, or of a body beyond all bounds.
    """
    if len(data) < HEADER_NBYTES:
        raise malformed(f"A frame ends after {len(data)} bytes of its header's {HEADER_NBYTES}", data)
    magic, protocol, kind, descriptors, digest_nbytes, body, payload, incarnation, version, digest = (
        _HEADER.unpack_from(data)
    )
    if magic != MAGIC:
        raise malformed("A frame does not start as ours do", data)
    if protocol != PROTOCOL_VERSION:
        raise malformed(
            f"The peer speaks protocol version {protocol}, this process version {PROTOCOL_VERSION}: "
            "install the same release of weightsync at both ends",
            data,
        )
    if body > MAX_BODY_NBYTES:
        raise malformed(f"A frame claims a body of {body} bytes", data)
    wide = int.from_bytes(incarnation, "big")
    return Head(kind, descriptors, digest_nbytes, body, payload, wide, version, digest[:digest_nbytes])


def decode(data: Readable) -> Message:
    """Read a control part, whole and nothing else.

    Raises:
        ProtocolError: it is truncated, too long, corrupted, not ours, or of another protocol version (which
            the error names); ``.unread`` holds its bytes.
    """
    head = peek(data)
    if head.control_nbytes != len(data):
        raise malformed(f"A frame of {head.control_nbytes} bytes came with {len(data)}", data)
    with memoryview(data) as view:
        checksum = xxhash.xxh3_64(view[: _HEADER.size])
        checksum.update(view[HEADER_NBYTES:])
        if checksum.intdigest() != _CHECKSUM.unpack_from(view, _HEADER.size)[0]:
            raise malformed("A frame was corrupted on its way: its checksum does not fit", data)
        try:
            message = _decode(head, _split(view[HEADER_NBYTES:]))
        except (struct.error, LookupError, ValueError) as error:
            raise malformed(f"A frame's fields are malformed: {error}", data) from error
    if head.payload_nbytes != inline_nbytes(message):
        raise malformed(f"A frame announces {head.payload_nbytes} bytes, its message others", data)
    return message


def malformed(what: str, data: Readable) -> ProtocolError:
    """The error for bytes that are ours to read but make no sense."""
    return ProtocolError(f"{what}.", unread=bytes(data[:MAX_UNREAD_NBYTES]))


def _split(body: memoryview) -> list[bytes]:
    fields = []
    position = 0
    while position < len(body):
        (nbytes,) = _LENGTH.unpack_from(body, position)
        position += _LENGTH.size
        if position + nbytes > len(body):
            raise ValueError(f"a field of {nbytes} bytes passes the end")
        fields.append(bytes(body[position : position + nbytes]))
        position += nbytes
    return fields


def _decode(head: Head, fields: list[bytes]) -> Message:
    if head.digest_nbytes not in _DIGEST_SIZES:
        raise ValueError(f"a digest of {head.digest_nbytes} bytes")
    name, *rest = fields
    return _READERS[Kind(head.kind)](head, name.decode(), rest)


def _read_hello(head: Head, model_id: str, fields: list[bytes]) -> Hello:
    layout_digest, layout, pid, started, fence = fields
    return Hello(
        model_id=model_id,
        incarnation=head.incarnation,
        version=head.version,
        layout_digest=layout_digest,
        layout=layout,
        pid=_int(pid, 8),
        started=_int(started, 8),
        fence=_int(fence, 16),
    )


def _read_update(head: Head, model_id: str, fields: list[bytes]) -> Update:
    layout_digest, layout, nbytes, extras, slot = fields
    return Update(
        model_id=model_id,
        incarnation=head.incarnation,
        version=head.version,
        layout_digest=layout_digest,
        layout=layout,
        digest=head.digest,
        nbytes=_int(nbytes, 8),
        extras=extras,
        slot=SlotRef(segment=_int(slot, 8)) if slot else None,
    )


def _read_ack(head: Head, model_id: str, fields: list[bytes]) -> Ack:
    (seconds,) = fields
    (value,) = _SECONDS.unpack(seconds)
    return Ack(
        model_id=model_id,
        incarnation=head.incarnation,
        version=head.version,
        digest=head.digest,
        seconds=value,
    )


def _read_refusal(head: Head, model_id: str, fields: list[bytes]) -> Refusal:
    kind, reason, remote_traceback, fence = fields
    return Refusal(
        model_id=model_id,
        incarnation=head.incarnation,
        version=head.version,
        kind=_REFUSALS[_int(kind, 1)],
        reason=reason.decode(),
        remote_traceback=remote_traceback.decode(),
        fence=_int(fence, 16),
    )


def _read_bye(head: Head, model_id: str, fields: list[bytes]) -> Bye:
    (reason,) = fields
    return Bye(model_id=model_id, incarnation=head.incarnation, reason=reason.decode())


def _int(field: bytes, size: int) -> int:
    if len(field) != size:
        raise ValueError(f"a number of {len(field)} bytes where {size} are wanted")
    return int.from_bytes(field, "big")


_READERS: Final[dict[Kind, Callable[[Head, str, list[bytes]], Message]]] = {
    Kind.HELLO: _read_hello,
    Kind.UPDATE: _read_update,
    Kind.ACK: _read_ack,
    Kind.REFUSAL: _read_refusal,
    Kind.BYE: _read_bye,
}
