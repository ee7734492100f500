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
The payload has its own digest. The fixed part of an update ends with the seal of the slot that its payload lies in.
If a worker forwarded a version to its own workers, its ack carries their report.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, Final, NamedTuple, NoReturn

import xxhash

from weightsync.errors import ConfigurationError, ProtocolError
from weightsync.options import WireDtype
from weightsync.protocol._tables import PROTOCOL_VERSION, RefusalKind
from weightsync.protocol.messages import Ack, Bye, Ending, Hello, Message, Refusal, SlotRef, Update, WeightsForm
from weightsync.protocol.report import Evidence, Outcome, OutcomeKind, SyncReport

#: How deep reports may nest. Both ends refuse more, so that neither exhausts its stack.
MAX_DEPTH: Final = 32

_SECONDS: Final = ("pack_s", "connect_s", "transfer_s", "apply_s")
#: The exclusive upper bounds of these numbers on the wire.
_INCARNATIONS: Final = 2**128
_NUMBERS: Final = 2**64
_LONGEST: Final = sys.float_info.max


def encode_report(report: SyncReport | None) -> bytes:
    """Encode a report as JSON; None is encoded as no bytes.

    Raises:
        ValueError: it is nested too deep.
    """
    return b"" if report is None else json.dumps(_told(report, 1)).encode()


def decode_report(data: bytes) -> SyncReport | None:
    """Decode what `encode_report` returned.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: the bytes are not a valid report.
    """
    if not data:
        return None
    try:
        told = json.loads(data.decode(), parse_constant=_no_number)
    except RecursionError as error:
        raise ValueError("a report is nested too deep") from error
    return _read(told, 1)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"a report has {text} in place of a number")


def _require_shallow(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"reports are nested more than {MAX_DEPTH} deep")


def _told(report: SyncReport, depth: int) -> dict[str, Any]:
    _require_shallow(depth)
    return {
        "model_id": report.model_id,
        "version": report.version,
        "incarnation": report.incarnation,
        "nbytes": report.nbytes,
        "outcomes": _all(report.outcomes, depth),
        "superseded": {str(worker): list(versions) for worker, versions in report.superseded.items()},
        "not_caught_up": _all(report.not_caught_up, depth),
        "left": {str(worker): goodbye for worker, goodbye in report.left.items()},
        **{name: getattr(report, name) for name in _SECONDS},
        **({} if report.wire_dtype is None else {"wire_dtype": report.wire_dtype.value}),
    }


def _all(outcomes: Mapping[int, Outcome], depth: int) -> dict[str, Any]:
    return {str(worker): _outcome(outcome, depth) for worker, outcome in outcomes.items()}


def _outcome(outcome: Outcome, depth: int) -> dict[str, Any]:
    return {
        "kind": outcome.kind.value,
        "reason": outcome.reason,
        "remote_traceback": outcome.remote_traceback,
        "evidence": outcome.evidence.value,
        "fence": outcome.fence,
        "seconds": outcome.seconds,
        "nested": None if outcome.nested is None else _told(outcome.nested, depth + 1),
    }


def _read(told: dict[str, Any], depth: int) -> SyncReport:
    _require_shallow(depth)
    return SyncReport(
        model_id=_text(told["model_id"]),
        version=None if told["version"] is None else _number(told["version"], _NUMBERS),
        incarnation=_number(told["incarnation"], _INCARNATIONS),
        nbytes=_number(told["nbytes"], _NUMBERS),
        wire_dtype=WireDtype(told["wire_dtype"]) if "wire_dtype" in told else None,
        outcomes=_read_all(told["outcomes"], depth),
        superseded={
            _worker(worker): tuple(_number(version, _NUMBERS) for version in versions)
            for worker, versions in told["superseded"].items()
        },
        not_caught_up=_read_all(told["not_caught_up"], depth),
        left={_worker(worker): _text(goodbye) for worker, goodbye in told["left"].items()},
        pack_s=_seconds(told["pack_s"]),
        connect_s=_seconds(told["connect_s"]),
        transfer_s=_seconds(told["transfer_s"]),
        apply_s=_seconds(told["apply_s"]),
    )


def _read_all(told: dict[str, Any], depth: int) -> dict[int, Outcome]:
    return {_worker(worker): _read_outcome(outcome, depth) for worker, outcome in told.items()}


def _read_outcome(told: dict[str, Any], depth: int) -> Outcome:
    return Outcome(
        kind=OutcomeKind(told["kind"]),
        reason=_text(told["reason"]),
        remote_traceback=_text(told["remote_traceback"]),
        evidence=Evidence(told["evidence"]),
        fence=_number(told["fence"], _INCARNATIONS),
        seconds=_seconds(told["seconds"]),
        nested=None if told["nested"] is None else _read(told["nested"], depth + 1),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a report has a {type(value).__name__} in place of text")
    return value


def _number(value: Any, bound: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < bound:
        raise ValueError("a report has a number that is out of range")
    return value


def _worker(key: str) -> int:
    return _number(int(key), _NUMBERS)


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LONGEST:
        raise ValueError("a report has an invalid duration")
    return float(value)


MAGIC: Final = b"WSYN"
HEADER_NBYTES: Final = 72
#: A layout of a hundred thousand tensors takes about 10 MiB. A larger claimed size is refused without reading the body.
MAX_BODY_NBYTES: Final = 256 * 2**20
#: How many bytes of a malformed frame `ProtocolError.unread` keeps.
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
    """Decode a header alone, so that the caller knows how much of the frame to read.

    Raises:
        ProtocolError: it is not a weightsync header, has another protocol version, or claims too large a body.
    """
    if len(data) < HEADER_NBYTES:
        _require_ours(data)
        raise malformed(f"A frame ends after {len(data)} of its header's {HEADER_NBYTES} bytes", data)
    head = Head._make(_HEADER.unpack_from(data))
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


__all__ = [
    "HEADER_NBYTES",
    "MAGIC",
    "MAX_BODY_NBYTES",
    "MAX_UNREAD_NBYTES",
    "Head",
    "Readable",
    "decode",
    "decode_with",
    "encode",
    "inline_nbytes",
    "malformed",
    "peek",
]

_HELLO: Final = struct.Struct("!HHIBQQ16sQ")
_UPDATE: Final = struct.Struct("!HHIIQBBQ16s")
_ACK: Final = struct.Struct("!HIdB")
_REFUSAL: Final = struct.Struct("!HBBII16s")
_BYE: Final = struct.Struct("!HBI")
_DIGEST_SIZES: Final = (0, 16)
_REFUSALS: Final = tuple(RefusalKind)
_EVIDENCE: Final = tuple(Evidence)
_FORMS: Final = tuple(WeightsForm)
_ENDINGS: Final = tuple(Ending)
#: Process ids are signed 32-bit numbers. System calls fail in various ways for other values.
_MAX_PID: Final = 2**31 - 1
#: Sizes of memory are signed 64-bit numbers.
_MAX_NBYTES: Final = 2**63 - 1


def inline_nbytes(message: Message) -> int:
    """The size of the payload that follows ``message`` in its frame; 0 if there is none, or if it lies in a slot."""
    return message.nbytes if isinstance(message, Update) and message.slot is None else 0


def encode(message: Message, descriptors: int = 0) -> bytes:
    """Encode the control part of ``message``. The caller appends the payload, if it travels inline.

    Args:
        message: the message.
        descriptors: how many file descriptors travel with the frame.

    Raises:
        ConfigurationError: a field cannot be encoded (a digest that is not 16 bytes, a number out of range, a layout
            above 256 MiB). Nothing was written.
    """
    try:
        return _encode(message, descriptors)
    except (struct.error, OverflowError, ValueError) as error:
        raise ConfigurationError(
            f"A {type(message).__name__} of model {message.model_id!r} cannot be encoded: {error}."
        ) from error


def _encode(message: Message, descriptors: int) -> bytes:
    _require_ranges(message)
    kind, version, digest, body = _body_of(message, message.model_id.encode())
    if len(body) > MAX_BODY_NBYTES or len(digest) not in _DIGEST_SIZES:
        raise ValueError(f"its body takes {len(body)} bytes and its digest {len(digest)}")
    inline = message.nbytes if isinstance(message, Update) and message.slot is None else 0
    numbers = kind, descriptors, len(digest), 0, len(body), inline
    covered = COVERED.pack(*numbers, message.incarnation.to_bytes(16, "big"), version, digest) + body
    return START.pack(MAGIC, PROTOCOL_VERSION, 0, xxhash.xxh3_64_intdigest(covered)) + covered


def _body_of(message: Message, name: bytes) -> tuple[int, int, bytes, bytes]:
    """Return the kind, version, digest and encoded body."""
    match message:
        case Update():
            fields = name, message.layout_digest, message.layout, message.extras
            slot = (0, 0, b"") if message.slot is None else (1, message.slot.segment, message.slot.seal)
            fixed = _UPDATE.pack(*map(len, fields), message.nbytes, _FORMS.index(message.form), *slot)
            return 2, message.version, message.digest, b"".join((fixed, *fields))
        case Ack():
            nested = b"" if message.nested is None else encode_report(message.nested)
            numbers = len(name), len(nested), message.seconds, _EVIDENCE.index(message.evidence)
            return 3, message.version, message.digest, b"".join((_ACK.pack(*numbers), name, nested))
        case Hello():
            told = name, message.layout_digest, message.layout, message.host
            fixed = _HELLO.pack(*map(len, told), message.pid, message.started, _wide(message.fence), message.link)
            return 1, message.version, b"", b"".join((fixed, *told))
        case Refusal():
            said = _prose(message.reason), _prose(message.remote_traceback)
            kind = _REFUSALS.index(message.kind), _EVIDENCE.index(message.evidence)
            fixed = _REFUSAL.pack(len(name), *kind, *map(len, said), _wide(message.fence))
            return 4, message.version, b"", b"".join((fixed, name, *said))
        case Bye():
            reason = _prose(message.reason)
            fixed = _BYE.pack(len(name), _ENDINGS.index(message.ending), len(reason))
            return 5, 0, b"", b"".join((fixed, name, reason))


def _require_ranges(message: Message) -> None:
    """Refuse numbers that fit their field but are not valid.

    Raises:
        ValueError: a number is not valid.
    """
    match message:
        case Hello() if not 0 <= message.pid <= _MAX_PID:
            raise ValueError(f"process id {message.pid} is out of range")
        case Update() | Ack() if message.version < 1:
            raise ValueError(f"version {message.version} is below 1")
        case Update() if not 0 <= message.nbytes <= _MAX_NBYTES:
            raise ValueError(f"a payload size of {message.nbytes} bytes is out of range")
        case Ack() if not isfinite(message.seconds) or message.seconds < 0:
            raise ValueError(f"a duration of {message.seconds} s is not valid")


def _prose(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


def _wide(value: int) -> bytes:
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
        _require_ranges(message)
    except (struct.error, LookupError, ValueError, TypeError, AttributeError) as error:
        raise malformed(f"A frame's fields are malformed: {error}", data) from error
    if head.payload_nbytes != inline_nbytes(message):
        raise malformed(f"A frame's header says {head.payload_nbytes} bytes of payload, but its message does not", data)
    return message


def _cut(body: bytes, position: int, *sizes: int) -> list[bytes]:
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
    named, digested, laid_out, hosted, pid, started, fence, link = _HELLO.unpack_from(body)
    name, layout_digest, layout, host = _cut(body, _HELLO.size, named, digested, laid_out, hosted)
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
    )


def _read_update(head: Head, body: bytes) -> Update:
    named, digested, laid_out, extra, nbytes, form, placed, segment, seal = _UPDATE.unpack_from(body)
    name, layout_digest, layout, extras = _cut(body, _UPDATE.size, named, digested, laid_out, extra)
    if placed > 1:
        raise ValueError(f"{placed} slots, at most 1 is possible")
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
        slot=SlotRef(segment=segment, seal=seal) if placed else None,
    )


def _read_ack(head: Head, body: bytes) -> Ack:
    named, nested, seconds, evidence = _ACK.unpack_from(body)
    name, report = _cut(body, _ACK.size, named, nested)
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
    named, kind, evidence, reasoned, traced, fence = _REFUSAL.unpack_from(body)
    name, reason, remote_traceback = _cut(body, _REFUSAL.size, named, reasoned, traced)
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
    named, ending, reasoned = _BYE.unpack_from(body)
    name, reason = _cut(body, _BYE.size, named, reasoned)
    return Bye(
        model_id=name.decode(),
        incarnation=int.from_bytes(head.incarnation, "big"),
        reason=reason.decode(),
        ending=_ENDINGS[ending],
    )


_READERS: Final[dict[int, Callable[[Head, bytes], Message]]] = {
    1: _read_hello,
    2: _read_update,
    3: _read_ack,
    4: _read_refusal,
    5: _read_bye,
}
