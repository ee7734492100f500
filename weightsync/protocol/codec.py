"""Encoding of messages: a fixed header, then a body with explicit lengths. No pickle.

The header has a version and a checksum. Both are checked before anything else is decoded:

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
    56    16  digest (of an update's payload and extra state, or of what an ack confirms)

The body starts with a fixed part for each kind of message: the lengths of its fields, the model's id first, then its
numbers. The fields follow. Header and body together are the *control part*; the checksum detects any flipped bit in it.
The payload has its own digest. The fixed part of an update ends with its slot: the seal, and the size on a device.
If a sender traces its sends, the trace context follows the fields of its updates, to the end of the body.
If a worker forwarded a version to its own workers, its ack carries their report.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from math import isfinite
from typing import Final

import xxhash
from msgspec import Struct

from weightsync.errors import ConfigurationError, ProtocolError
from weightsync.protocol._tables import PROTOCOL_VERSION, RefusalKind
from weightsync.protocol.messages import (
    IDENTITY_NBYTES,
    Ack,
    BaseRef,
    Bye,
    Ending,
    Hello,
    Message,
    NoBase,
    Part,
    Refusal,
    SlotRef,
    Update,
    WeightsForm,
)
from weightsync.protocol.report import Evidence
from weightsync.protocol.report_codec import decode_report, encode_report

MAGIC: Final = b"WSYN"
HEADER_NBYTES: Final = 72
#: A layout of a hundred thousand tensors takes about 10 MiB. A larger claimed size is refused without reading the body.
MAX_BODY_NBYTES: Final = 256 * 2**20
#: The longest name of a model, in UTF-8.
MAX_NAME_NBYTES: Final = 2**16 - 1
#: How many bytes of a malformed frame `ProtocolError.unread` keeps.
MAX_UNREAD_NBYTES: Final = 64 * 1024

_HEADER: Final = struct.Struct("!4sHHQBBBBIQ16sQ16s")
#: Magic and protocol version.
_FIRST: Final = struct.Struct("!4sH")
#: The header up to its checksum, and the rest, which the checksum covers together with the body.
START: Final = struct.Struct("!4sHHQ")
COVERED: Final = struct.Struct("!BBBBIQ16sQ16s")

Readable = bytes | bytearray | memoryview


class Head(Struct, frozen=True):
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
    """Decode a header alone, so that the caller knows how much of the frame to read.

    Raises ProtocolError: it is not a weightsync header, has another protocol version, or claims too large a body.
    """
    if len(data) < HEADER_NBYTES:
        _require_ours(data)
        raise malformed(f"A frame ends after {len(data)} of its header's {HEADER_NBYTES} bytes", data)
    head = Head(*_HEADER.unpack_from(data))
    if head.magic != MAGIC or head.protocol != PROTOCOL_VERSION or head.zero:
        _require_ours(data)
        raise malformed("A header is malformed", data)
    if head.body_nbytes > MAX_BODY_NBYTES:
        raise malformed(f"A frame claims a body of {head.body_nbytes} bytes", data)
    return head


def _require_ours(data: Readable) -> None:
    """Check magic and version, which come first in every version of the protocol."""
    if len(data) < _FIRST.size:
        return
    magic, protocol = _FIRST.unpack_from(data)
    if magic != MAGIC:
        raise malformed("A frame does not start with the weightsync magic", data)
    if protocol != PROTOCOL_VERSION:
        raise malformed(
            f"The peer speaks protocol version {protocol}, this process speaks version {PROTOCOL_VERSION}: "
            "install the same release of weightsync at both ends",
            data,
        )


def malformed(what: str, data: Readable) -> ProtocolError:
    """Build the error for bytes that cannot be decoded."""
    return ProtocolError(f"{what}.", unread=bytes(data[:MAX_UNREAD_NBYTES]))


_HELLO: Final = struct.Struct("!HHIBHQQ16sQ")
_UPDATE: Final = struct.Struct("!HHIIBQBBQ16sQ")
_ACK: Final = struct.Struct("!HIdB")
_REFUSAL: Final = struct.Struct("!HBBII16s")
_BYE: Final = struct.Struct("!HBI")
_PART: Final = struct.Struct("!16sQQQQB")
_DIGEST_SIZES: Final = (0, 16)
#: The sizes of a list of devices.
_DEVICES_SIZES: Final = range(0, 64 * IDENTITY_NBYTES + 1, IDENTITY_NBYTES)
_REFUSALS: Final = tuple(RefusalKind)
_EVIDENCE: Final = tuple(Evidence)
_FORMS: Final = tuple(WeightsForm)
_ENDINGS: Final = tuple(Ending)
#: Process ids are signed 32-bit numbers. System calls fail in various ways for other values.
_MAX_PID: Final = 2**31 - 1
#: In the place of a slot's fields, for a payload that travels.
_NO_SLOT: Final = SlotRef(segment=0)
#: Where a payload is: it follows; it lies in a slot; it follows, and the place of the slot's fields has its base; it
#: came in parts, and there is the id that they have.
_INLINE, _IN_SLOT, _BASED, _IN_PARTS = range(4)
_FOLLOWING: Final = (_INLINE, _BASED)
_PAYLOAD_ID_NBYTES: Final = 16
_OTHER_PAYLOAD: Final = "its header names another size of its payload"
#: A W3C traceparent; after a newline, a tracestate of at most 512 characters, which is what others must pass on.
_TRACE_CONTEXT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(\n[\x20-\x7e]{1,512})?")
MAX_TRACE_CONTEXT_NBYTES: Final = 568
#: Sizes of memory are signed 64-bit numbers.
_MAX_NBYTES: Final = 2**63 - 1


def encode(message: Message, descriptors: int = 0, slot: SlotRef | None = None) -> bytes:
    """Encode the control part of ``message``. The caller appends the payload, if it travels inline.

    Args:
        slot: where an update's payload lies; None: where the message says.

    Raises:
        ConfigurationError: a field cannot be encoded (a digest that is not 16 bytes, a number out of range, a layout
            above 256 MiB). Nothing was written.
    """
    if isinstance(message, Update) and slot is None:
        slot = message.slot
    try:
        _require_ranges(message, slot)
        version, digest, inline, body = _body_of(message, message.model_id.encode(), slot)
        if len(body) > MAX_BODY_NBYTES or len(digest) not in _DIGEST_SIZES:
            raise ValueError(f"its body takes {len(body)} bytes and its digest {len(digest)}")
        numbers = _NUMBERS[type(message)], descriptors, len(digest), 0, len(body), inline
        covered = COVERED.pack(*numbers, message.incarnation.to_bytes(16, "big"), version, digest) + body
        return START.pack(MAGIC, PROTOCOL_VERSION, 0, xxhash.xxh3_64_intdigest(covered)) + covered
    except (struct.error, OverflowError, ValueError) as error:
        raise ConfigurationError(
            f"A {type(message).__name__} of model {message.model_id!r} cannot be encoded: {error}."
        ) from error


def _body_of(message: Message, name: bytes, slot: SlotRef | None) -> tuple[int, bytes, int, bytes]:
    """Return the version and digest, the size of the payload that follows, and the encoded body."""
    match message:
        case Update():
            base, slot, placed = message.base, slot or _NO_SLOT, _INLINE if slot is None else _IN_SLOT
            fields = name, message.layout_digest, message.layout, message.extras, slot.device
            where = placed, slot.segment, slot.seal, slot.nbytes
            if base is not None:
                where = _BASED, base.version, base.digest or bytes(16), 0
            elif message.payload_id:
                where = _IN_PARTS, 0, message.payload_id, 0
            inline = message.nbytes if where[0] in _FOLLOWING else 0
            fixed = _UPDATE.pack(*map(len, fields), message.nbytes, _FORMS.index(message.form), *where)
            body = b"".join((fixed, *fields, message.trace_context.encode()))
            return message.version, message.digest, inline, body
        case Ack():
            nested = b"" if message.nested is None else encode_report(message.nested)
            numbers = len(name), len(nested), message.seconds, _EVIDENCE.index(message.evidence)
            return message.version, message.digest, 0, b"".join((_ACK.pack(*numbers), name, nested))
        case Hello():
            fields = name, message.layout_digest, message.layout, message.host, message.devices
            fixed = _HELLO.pack(
                *map(len, fields), message.pid, message.started, _encode_wide(message.fence), message.link
            )
            return message.version, b"", 0, b"".join((fixed, *fields))
        case Refusal():
            said = _encode_text(message.reason), _encode_text(message.remote_traceback)
            kind = _REFUSALS.index(message.kind), _EVIDENCE.index(message.evidence)
            fixed = _REFUSAL.pack(len(name), *kind, *map(len, said), _encode_wide(message.fence))
            return message.version, b"", 0, b"".join((fixed, name, *said))
        case Bye():
            reason = _encode_text(message.reason)
            fixed = _BYE.pack(len(name), _ENDINGS.index(message.ending), len(reason))
            return 0, b"", 0, b"".join((fixed, name, reason))
        case NoBase():
            return message.version, b"", 0, name
        case Part():
            span, inline = (message.nbytes, message.start, message.end), message.end - message.start
            fixed = _PART.pack(message.payload_id, *span, message.segment, message.hashed)
            return 0, b"", 0 if message.segment else inline, fixed + name


def _require_ranges(message: Message, slot: SlotRef | None) -> None:
    """Refuse numbers that fit their field but are not valid. Raises ValueError: a number is not valid."""
    match message:
        case Hello() if not 0 <= message.pid <= _MAX_PID:
            raise ValueError(f"process id {message.pid} is out of range")
        case Update() | Ack() | NoBase() if message.version < 1:
            raise ValueError(f"version {message.version} is below 1")
        case Update() if not 0 <= message.nbytes <= _MAX_NBYTES:
            raise ValueError(f"a payload size of {message.nbytes} bytes is out of range")
        case Update() if message.trace_context and not is_trace_context(message.trace_context):
            raise ValueError("what it carries is no trace context")
        case Update() if message.payload_id:
            _require_parts(message, slot)
        case Update() if message.base is not None:
            _require_base(message.base, message, slot)
        case Update() if slot is not None and (slot.device or slot.nbytes):
            _require_slot(slot, message.nbytes)
        case Hello() if len(message.devices) not in _DEVICES_SIZES:
            raise ValueError(f"{len(message.devices)} bytes do not name devices")
        case Part() if len(message.payload_id) != _PAYLOAD_ID_NBYTES or not any(message.payload_id):
            raise ValueError(f"{len(message.payload_id)} bytes do not name a payload")
        case Part() if not 0 <= message.start < message.end <= message.nbytes <= _MAX_NBYTES:
            raise ValueError(f"bytes {message.start} to {message.end} are no part of {message.nbytes}")
        case Ack() if not isfinite(message.seconds) or message.seconds < 0:
            raise ValueError(f"a duration of {message.seconds} s is not valid")


def is_trace_context(text: str) -> bool:
    """Whether an update can carry a trace context: a ``traceparent``, alone or with a ``tracestate``."""
    return _TRACE_CONTEXT.fullmatch(text) is not None


def _require_slot(slot: SlotRef, nbytes: int) -> None:
    """Refuse a slot that cannot be one, with ValueError: on a device, its size is named and the payload fits."""
    if len(slot.device) not in (0, IDENTITY_NBYTES):
        raise ValueError(f"{len(slot.device)} bytes do not name a device")
    if slot.nbytes and not slot.device:
        raise ValueError(f"a slot of the host says that it has {slot.nbytes} bytes")
    if slot.device and not nbytes <= slot.nbytes <= _MAX_NBYTES:
        raise ValueError(f"a slot of {slot.nbytes} bytes does not hold {nbytes}")


def _require_base(base: BaseRef, update: Update, slot: SlotRef | None) -> None:
    """Refuse a base that cannot be one, with ValueError: it is older and has a digest, and the payload travels."""
    if slot is not None:
        raise ValueError("a payload in a slot has a base")
    if not 0 <= base.version < update.version or len(base.digest) != (16 if base.version else 0):
        raise ValueError(f"version {base.version} with {len(base.digest)} bytes of digest is no base")


def _require_parts(update: Update, slot: SlotRef | None) -> None:
    """Refuse what cannot have come in parts, with ValueError: a delta, and what lies in a slot."""
    if slot is not None or update.base is not None or not update.nbytes:
        raise ValueError("a payload that came in parts is empty, is in a slot, or has a base")
    if len(update.payload_id) != _PAYLOAD_ID_NBYTES or not any(update.payload_id):
        raise ValueError(f"{len(update.payload_id)} bytes do not name a payload")


def _encode_text(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


def _encode_wide(value: int) -> bytes:
    return value.to_bytes(16, "big")


def decode(data: Readable) -> Message:
    """Decode one complete control part.

    Raises:
        ProtocolError: it is truncated, too long, corrupted, not from weightsync, or of another protocol version (which
            the error names); ``.unread`` holds its bytes.
    """
    # A remote call may pass an argument of any type.
    if not isinstance(data, bytes | bytearray | memoryview):
        raise malformed(f"A {type(data).__name__} arrived in place of a frame", b"")
    return decode_with(peek(data), data)


def decode_with(head: Head, data: Readable) -> Message:
    """Like `decode`, with a header that was decoded before."""
    if HEADER_NBYTES + head.body_nbytes != len(data):
        raise malformed(f"A frame has {len(data)} bytes, but its header says {head.control_nbytes}", data)
    covered = bytes(data[START.size :])
    if xxhash.xxh3_64_intdigest(covered) != head.checksum:
        raise malformed("A frame was corrupted in transit: its checksum is wrong", data)
    try:
        if head.digest_nbytes not in _DIGEST_SIZES or head.pad:
            raise ValueError(f"digest size {head.digest_nbytes} with padding {head.pad} is not valid")
        message = _READERS[head.kind](head, covered[COVERED.size :])
        slot = message.slot if isinstance(message, Update) else None
        _require_ranges(message, slot)
    except (struct.error, LookupError, ValueError, TypeError, AttributeError) as error:
        raise malformed(f"A frame's fields are malformed: {error}", data) from error
    if head.payload_nbytes and not isinstance(message, Update | Part):
        raise malformed(f"A {type(message).__name__} says that {head.payload_nbytes} bytes of payload follow", data)
    return message


def _split_fields(body: bytes, position: int, *sizes: int) -> list[bytes]:
    """Split the fields that follow the fixed part; they must fill the body."""
    if position + sum(sizes) != len(body):
        raise ValueError(f"its fields take {sum(sizes)} bytes, but {len(body) - position} are there")
    fields = []
    for size in sizes:
        fields.append(body[position : position + size])
        position += size
    return fields


def _int(field: bytes) -> int:
    return int.from_bytes(field, "big")


def _read_hello(head: Head, body: bytes) -> Hello:
    name_size, digest_size, layout_size, host_size, devices_size, pid, started, fence, link = _HELLO.unpack_from(body)
    name, layout_digest, layout, host, devices = _split_fields(
        body, _HELLO.size, name_size, digest_size, layout_size, host_size, devices_size
    )
    return Hello(
        model_id=name.decode(),
        incarnation=int.from_bytes(head.incarnation, "big"),
        version=head.version,
        layout_digest=layout_digest,
        layout=layout,
        host=host,
        pid=pid,
        started=started,
        fence=_int(fence),
        link=link,
        devices=devices,
    )


def _read_update(head: Head, body: bytes) -> Update:
    *sizes, nbytes, form, placed, segment, seal, slot_nbytes = _UPDATE.unpack_from(body)
    # An update of a sender that traces nothing ends here.
    trace_size = min(max(0, len(body) - _UPDATE.size - sum(sizes)), MAX_TRACE_CONTEXT_NBYTES)
    name, layout_digest, layout, extras, device, trace_context = _split_fields(body, _UPDATE.size, *sizes, trace_size)
    if placed > _IN_PARTS or (placed != _IN_SLOT and (device or slot_nbytes)) or (placed == _IN_PARTS and segment):
        raise ValueError(f"payload placement {placed} is not valid")
    if head.payload_nbytes != (nbytes if placed in _FOLLOWING else 0):
        raise ValueError(_OTHER_PAYLOAD)
    based = BaseRef(version=segment, digest=seal if segment else b"") if placed == _BASED else None
    return Update(
        model_id=name.decode(),
        incarnation=int.from_bytes(head.incarnation, "big"),
        version=head.version,
        layout_digest=layout_digest,
        layout=layout,
        digest=head.digest[: head.digest_nbytes],
        nbytes=nbytes,
        extras=extras,
        form=_FORMS[form],
        slot=SlotRef(segment=segment, seal=seal, device=device, nbytes=slot_nbytes) if placed == _IN_SLOT else None,
        trace_context=trace_context.decode("ascii"),
        base=based,
        payload_id=seal if placed == _IN_PARTS else b"",
    )


def _read_ack(head: Head, body: bytes) -> Ack:
    name_size, report_size, seconds, evidence = _ACK.unpack_from(body)
    name, report = _split_fields(body, _ACK.size, name_size, report_size) if report_size else (body[_ACK.size :], b"")
    if len(name) != name_size:
        raise ValueError(f"its name takes {name_size} bytes, but {len(name)} are there")
    return Ack(
        model_id=name.decode(),
        incarnation=int.from_bytes(head.incarnation, "big"),
        version=head.version,
        digest=head.digest[: head.digest_nbytes],
        seconds=seconds,
        evidence=_EVIDENCE[evidence],
        nested=decode_report(report) if report else None,
    )


def _read_refusal(head: Head, body: bytes) -> Refusal:
    name_size, kind, evidence, reason_size, traceback_size, fence = _REFUSAL.unpack_from(body)
    name, reason, remote_traceback = _split_fields(body, _REFUSAL.size, name_size, reason_size, traceback_size)
    return Refusal(
        model_id=name.decode(),
        incarnation=int.from_bytes(head.incarnation, "big"),
        version=head.version,
        kind=_REFUSALS[kind],
        reason=reason.decode(),
        remote_traceback=remote_traceback.decode(),
        fence=_int(fence),
        evidence=_EVIDENCE[evidence],
    )


def _read_bye(head: Head, body: bytes) -> Bye:
    name_size, ending, reason_size = _BYE.unpack_from(body)
    name, reason = _split_fields(body, _BYE.size, name_size, reason_size)
    return Bye(
        model_id=name.decode(),
        incarnation=int.from_bytes(head.incarnation, "big"),
        reason=reason.decode(),
        ending=_ENDINGS[ending],
    )


def _read_no_base(head: Head, body: bytes) -> NoBase:
    return NoBase(model_id=body.decode(), incarnation=int.from_bytes(head.incarnation, "big"), version=head.version)


def _read_part(head: Head, body: bytes) -> Part:
    payload_id, nbytes, start, end, segment, hashed = _PART.unpack_from(body)
    if hashed > 1:
        raise ValueError(f"{hashed} is not a truth value")
    if head.payload_nbytes != (0 if segment else end - start):
        raise ValueError(_OTHER_PAYLOAD)
    return Part(
        model_id=body[_PART.size :].decode(),
        incarnation=int.from_bytes(head.incarnation, "big"),
        payload_id=payload_id,
        nbytes=nbytes,
        start=start,
        end=end,
        segment=segment,
        hashed=bool(hashed),
    )


#: The number of each kind of message in the header, and what decodes the body.
_KINDS: Final[dict[type[Message], tuple[int, Callable[[Head, bytes], Message]]]] = {
    Hello: (1, _read_hello),
    Update: (2, _read_update),
    Ack: (3, _read_ack),
    Refusal: (4, _read_refusal),
    Bye: (5, _read_bye),
    NoBase: (6, _read_no_base),
    Part: (7, _read_part),
}
_NUMBERS: Final = {kind: number for kind, (number, _) in _KINDS.items()}
_READERS: Final = dict(_KINDS.values())


def slot_digest(seal: bytes, incarnation: int, version: int, layout_digest: bytes, extras: bytes) -> bytes:
    """What an ack names if its update was in a slot and carried no digest: the slot as it was filled, and the update.

    The xxh3-128 of the seal, the incarnation (16 bytes) and the version (8), big-endian, the layout's digest, and the
    encoded extra state.
    """
    which = incarnation.to_bytes(16, "big") + version.to_bytes(8, "big")
    return xxhash.xxh3_128_digest(b"".join((seal, which, layout_digest, extras)))
