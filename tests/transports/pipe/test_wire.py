"""The wire format: what is encoded comes back, and nothing else is understood."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import wire_strategies as strategies
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import ConfigurationError, ProtocolError
from weightsync.protocol import codec
from weightsync.protocol._tables import PROTOCOL_VERSION, RefusalKind
from weightsync.protocol.messages import Ack, Bye, Hello, Refusal, SlotRef, Update

EXAMPLES = [
    Hello(
        model_id="policy", incarnation=2**90, version=3, layout_digest=b"d" * 16, layout=b"{}", pid=7, started=9, link=3
    ),
    Update(model_id="policy", incarnation=2**90, version=4, layout_digest=b"d" * 16, digest=b"e" * 16, nbytes=12),
    Update(model_id="p", incarnation=1, version=4, layout_digest=b"", nbytes=12, extras=b"x", slot=SlotRef(segment=3)),
    Ack(model_id="policy", incarnation=2**90, version=4, digest=b"e" * 16, seconds=0.25),
    Refusal(model_id="policy", incarnation=5, version=4, kind=RefusalKind.STALE, reason="naïve", fence=2**99),
    Bye(model_id="policy", incarnation=5, reason="done"),
]


def sealed(data: bytes) -> bytes:
    """``data`` with the checksum that fits it."""
    return data[:8] + struct.pack("!Q", xxhash.xxh3_64_intdigest(data[16:])) + data[16:]


@given(strategies.messages)
def test_what_is_encoded_comes_back(message):
    assert message == codec.decode(codec.encode(message))


@given(strategies.messages, st.integers(0, 8))
def test_the_header_tells_what_follows(message, descriptors):
    data = codec.encode(message, descriptors)
    head = codec.peek(data[: codec.HEADER_NBYTES])

    assert (len(data), codec.inline_nbytes(message), descriptors) == (
        head.control_nbytes,
        head.payload_nbytes,
        head.descriptors,
    )


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(data):
    with pytest.raises(ProtocolError) as caught:
        codec.decode(data)

    assert data == caught.value.unread


@given(st.binary(min_size=56, max_size=200), st.sampled_from([1, 2, 3, 4, 5, 6]))
def test_arbitrary_fields_under_a_checksum_that_fits_are_refused_or_canonical(data, kind):
    body = data[56:]
    numbers = bytes([kind, data[1] % 2, (data[2] % 2) * 16, 0]) + struct.pack("!I", len(body)) + data[8:56]
    whole = sealed(codec.MAGIC + struct.pack("!HHQ", PROTOCOL_VERSION, 0, 0) + numbers + body)
    try:
        message = codec.decode(whole)
    except ProtocolError:
        return

    assert message == codec.decode(codec.encode(message)) or isinstance(message, Ack)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_every_flipped_bit_is_noticed(message):
    data = codec.encode(message)
    for position in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(ProtocolError):
            codec.decode(flipped)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_every_changed_byte_is_noticed(message):
    data = codec.encode(message)
    for position in range(len(data)):
        for value in (0, 1, 0x7F, 0x80, 0xFF, (data[position] + 1) % 256):
            changed = data[:position] + bytes([value]) + data[position + 1 :]
            if changed != data:
                with pytest.raises(ProtocolError):
                    codec.decode(changed)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_truncated_and_overlong_are_refused(message):
    data = codec.encode(message)
    for size in range(len(data)):
        with pytest.raises(ProtocolError):
            codec.decode(data[:size])
    with pytest.raises(ProtocolError):
        codec.decode(data + b"\0")


def test_another_protocol_version_is_refused_by_name():
    data = bytearray(codec.encode(EXAMPLES[0]))
    data[4:6] = struct.pack("!H", 2024)

    with pytest.raises(ProtocolError, match=rf"version 2024, this process speaks version {PROTOCOL_VERSION}"):
        codec.decode(data)
    with pytest.raises(ProtocolError, match="version 2024"):
        codec.decode(data[:8])


def test_an_absurd_length_is_refused_before_anything_is_allocated():
    data = bytearray(codec.encode(EXAMPLES[0]))
    data[20:24] = b"\xff\xff\xff\xff"

    with pytest.raises(ProtocolError, match="claims a body"):
        codec.peek(sealed(bytes(data)))


def test_a_header_alone_is_read_up_to_the_largest_body():
    data = codec.encode(EXAMPLES[0])
    largest = data[:20] + struct.pack("!I", codec.MAX_BODY_NBYTES) + data[24 : codec.HEADER_NBYTES]

    assert codec.peek(data) == codec.peek(data[: codec.HEADER_NBYTES])
    assert codec.MAX_BODY_NBYTES == codec.peek(largest).body_nbytes


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (struct.pack("!4sH", b"HTTP", PROTOCOL_VERSION), "does not start with the weightsync magic"),
        (struct.pack("!4sH", codec.MAGIC, PROTOCOL_VERSION), "ends after 6 of its header's 72 bytes"),
        (struct.pack("!4sHH64x", codec.MAGIC, PROTOCOL_VERSION, 1), "A header is malformed"),
    ],
    ids=["another magic", "short", "not zero"],
)
def test_what_is_no_header_is_refused_with_what_is_wrong(data, said):
    with pytest.raises(ProtocolError, match=said):
        codec.peek(data)


@pytest.mark.parametrize(
    "misfit",
    [
        {"digest": b"short"},
        {"version": 2**64},
        {"version": -1},
        {"incarnation": 2**128},
        {"incarnation": -1},
        {"nbytes": 2**64},
        {"model_id": "m" * 70_000},
        {"model_id": "\udc80"},
    ],
    ids=lambda misfit: next(iter(misfit)),
)
def test_what_does_not_fit_the_wire_is_a_configuration_error(misfit):
    with pytest.raises(ConfigurationError, match="cannot be encoded"):
        codec.encode(replace(EXAMPLES[1], **misfit))


def test_a_reason_that_is_no_unicode_still_travels():
    refusal = replace(EXAMPLES[4], remote_traceback="file \udcff.py")

    assert codec.decode(codec.encode(refusal)).remote_traceback == "file \\udcff.py"


def test_unread_keeps_a_bounded_part():
    with pytest.raises(ProtocolError) as caught:
        codec.decode(bytes(10**6))

    assert len(caught.value.unread) == codec.MAX_UNREAD_NBYTES
