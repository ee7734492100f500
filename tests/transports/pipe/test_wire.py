"""The wire format: encoded messages are decoded unchanged, and everything else is rejected."""

from __future__ import annotations

import json
import struct

import pytest
import wire_strategies as strategies
from edits import with_checksum
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from weightsync.errors import ConfigurationError, ProtocolError
from weightsync.protocol import codec, report_codec
from weightsync.protocol._tables import PROTOCOL_VERSION, RefusalKind
from weightsync.protocol.messages import Ack, BaseRef, Bye, Hello, Part, Refusal, SlotRef, Update
from weightsync.protocol.report import Evidence, Outcome, OutcomeKind, SyncReport

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


@given(strategies.messages)
def test_every_message_is_decoded_as_it_was_encoded(message):
    assert message == codec.decode(codec.encode(message))


REPORT = SyncReport(
    model_id="policy",
    version=3,
    incarnation=2**90,
    outcomes={
        0: Outcome(kind=OutcomeKind.APPLIED, evidence=Evidence.CALL, apply_s=0.5),
        1: Outcome(kind=OutcomeKind.LOST, reason="died", remote_traceback="Traceback", fence=2**91),
    },
    nbytes=12,
    pack_s=0.1,
    connect_s=0.2,
    transfer_s=0.3,
    apply_s=float(2**1000),
    superseded={0: (1, 2)},
    not_caught_up={2: Outcome(kind=OutcomeKind.REFUSED, reason="no")},
    left={3: "done", 4: ""},
)


def nested(depth: int) -> SyncReport:
    """Reports nested in outcomes, to this depth."""
    report = REPORT
    for _ in range(depth - 1):
        report = replace(REPORT, not_caught_up={7: Outcome(kind=OutcomeKind.APPLIED, nested=report)})
    return report


@pytest.mark.parametrize("depth", [1, 2, report_codec.MAX_DEPTH])
def test_a_report_is_decoded_with_every_field(depth):
    assert report_codec.decode_report(report_codec.encode_report(nested(depth))) == nested(depth)


def test_an_absent_report_is_decoded_as_none():
    assert report_codec.encode_report(None) == b""
    assert report_codec.decode_report(b"") is None


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("model_id", 7, "has a int in place of text"),
        ("nbytes", 2**64, "has a number"),
        ("nbytes", -1, "has a number"),
        ("pack_s", -0.5, "has an invalid duration"),
        ("apply_s", float("nan"), "has NaN in place of a number"),
        ("apply_s", float("inf"), "has Infinity in place of a number"),
    ],
)
def test_a_report_with_an_invalid_field_is_refused_with_the_reason(field, value, reason):
    record = {**json.loads(report_codec.encode_report(REPORT)), field: value}

    with pytest.raises(ValueError, match=reason):
        report_codec.decode_report(json.dumps(record).encode())


@given(strategies.messages, st.integers(0, 8))
def test_the_header_states_the_sizes_and_descriptors_that_follow(message, descriptors):
    data = codec.encode(message, descriptors)
    head = codec.peek(data[: codec.HEADER_NBYTES])

    match message:
        case Update(slot=None, payload_id=b""):
            inline = message.nbytes
        case Part(segment=0):
            inline = message.end - message.start
        case _:
            inline = 0
    assert (len(data), inline, descriptors) == (
        head.control_nbytes,
        head.payload_nbytes,
        head.descriptors,
    )


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(data):
    with pytest.raises(ProtocolError) as caught:
        codec.decode(data)

    assert data == caught.value.unread


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
def test_truncated_and_overlong_messages_are_refused(message):
    data = codec.encode(message)
    for size in range(len(data)):
        with pytest.raises(ProtocolError):
            codec.decode(data[:size])
    with pytest.raises(ProtocolError):
        codec.decode(data + b"\0")


def test_another_protocol_version_is_refused_with_its_number():
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
        codec.peek(with_checksum(bytes(data)))


def test_a_header_is_read_without_its_body_up_to_the_largest_body_size():
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
def test_an_invalid_header_is_refused_with_the_reason(data, said):
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
def test_encoding_unencodable_values_raises_configuration_error(misfit):
    with pytest.raises(ConfigurationError, match="cannot be encoded"):
        codec.encode(replace(EXAMPLES[1], **misfit))


ON_DEVICE = replace(EXAMPLES[2], slot=SlotRef(segment=3, device=b"d" * 16, nbytes=12))


def on_device(**fields):
    return replace(ON_DEVICE, slot=replace(ON_DEVICE.slot, **fields))


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (replace(EXAMPLES[0], pid=2**31), f"process id {2**31} is out of range"),
        (replace(EXAMPLES[1], nbytes=2**63), f"a payload size of {2**63} bytes is out of range"),
        (replace(EXAMPLES[0], devices=b"d" * 15), "15 bytes do not name devices"),
        (replace(EXAMPLES[0], devices=b"d" * (65 * 16)), "1040 bytes do not name devices"),
        (on_device(device=b"d" * 15), "15 bytes do not name a device"),
        (on_device(device=b""), "a slot of the host says that it has 12 bytes"),
        (on_device(nbytes=11), "a slot of 11 bytes does not hold 12"),
        (on_device(nbytes=2**63), f"a slot of {2**63} bytes does not hold 12"),
    ],
    ids=[
        "a process",
        "a payload",
        "a part of a device",
        "too many devices",
        "no device",
        "of the host",
        "too small",
        "too large",
    ],
)
def test_out_of_range_numbers_and_invalid_devices_are_refused_at_both_ends(message, said, monkeypatch):
    with pytest.raises(ConfigurationError, match=said):
        codec.encode(message)
    with monkeypatch.context() as unchecked:
        unchecked.setattr(codec, "_require_ranges", lambda *_: None)
        data = codec.encode(message)
    with pytest.raises(ProtocolError, match=said):
        codec.decode(data)


@pytest.mark.parametrize(
    "message",
    [ON_DEVICE, replace(EXAMPLES[0], pid=2**31 - 1, devices=b"d" * 16), replace(EXAMPLES[1], nbytes=2**63 - 1)],
    ids=["a slot", "a process", "a payload"],
)
def test_the_largest_valid_values_are_decoded_as_encoded(message):
    assert codec.decode(codec.encode(message)) == message


def test_a_traceback_that_is_not_valid_unicode_is_sent_escaped():
    refusal = replace(EXAMPLES[4], remote_traceback="file \udcff.py")

    assert codec.decode(codec.encode(refusal)).remote_traceback == "file \\udcff.py"


def test_a_protocol_error_keeps_a_bounded_number_of_unread_bytes():
    with pytest.raises(ProtocolError) as caught:
        codec.decode(bytes(10**6))

    assert len(caught.value.unread) == codec.MAX_UNREAD_NBYTES


@pytest.mark.parametrize(
    ("base", "slot", "why"),
    [
        (BaseRef(), SlotRef(segment=3), "a payload in a slot has a base"),
        (BaseRef(version=3, digest=b"e" * 16), SlotRef(segment=3), "a payload in a slot has a base"),
        (BaseRef(version=4, digest=b"e" * 16), None, "is no base"),
        (BaseRef(version=3), None, "version 3 with 0 bytes of digest is no base"),
        (BaseRef(digest=b"e" * 16), None, "version 0 with 16 bytes of digest is no base"),
    ],
)
def test_a_delta_in_a_slot_or_with_an_invalid_base_is_refused(base, slot, why):
    with pytest.raises(ConfigurationError, match=why):
        codec.encode(replace(EXAMPLES[1], base=base), 0, slot)
