"""Errors about messages that cannot be encoded or decoded name the wrong numbers."""

from __future__ import annotations

import re
import struct
from typing import Any

import pytest
from edits import with_checksum
from msgspec.structs import replace

from weightsync.errors import ConfigurationError, ProtocolError
from weightsync.protocol import codec
from weightsync.protocol.messages import Ack, BaseRef, Bye, Hello, Message, Part, SlotRef, Update

HELLO = Hello(model_id="policy", incarnation=5, pid=7)
UPDATE = Update(model_id="policy", incarnation=5, version=1, layout_digest=b"", digest=b"\1" * 16, nbytes=12)
ACK = Ack(model_id="policy", incarnation=5, version=1)
PART = Part(model_id="policy", incarnation=5, payload_id=b"\1" * 16, nbytes=12, start=4, end=8)
IN_PARTS = replace(UPDATE, payload_id=PART.payload_id)
NOT_IN_PARTS = "a payload that came in parts is empty, is in a slot, or has a base"


def patched(message: Message, changes: dict[int, bytes]) -> bytes:
    """An encoded message with other bytes at these positions, and with a checksum that fits."""
    data = bytearray(codec.encode(message))
    for position, piece in changes.items():
        data[position : position + len(piece)] = piece
    return with_checksum(bytes(data))


def unread(data: Any, text: str) -> ProtocolError:
    """The error of decoding this data, which must start with the text."""
    with pytest.raises(ProtocolError, match=f"^{re.escape(text)}") as caught:
        codec.decode(data)
    return caught.value


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (replace(HELLO, pid=2**31), "process id 2147483648 is out of range"),
        (replace(HELLO, pid=-1), "process id -1 is out of range"),
        (replace(UPDATE, version=0), "version 0 is below 1"),
        (replace(ACK, version=0), "version 0 is below 1"),
        (replace(UPDATE, nbytes=2**63), f"a payload size of {2**63} bytes is out of range"),
        (replace(UPDATE, nbytes=-1), "a payload size of -1 bytes is out of range"),
        (replace(ACK, seconds=float("nan")), "a duration of nan s is not valid"),
        (replace(ACK, seconds=float("inf")), "a duration of inf s is not valid"),
        (replace(ACK, seconds=-0.5), "a duration of -0.5 s is not valid"),
        (replace(UPDATE, digest=b"short"), "its body takes 61 bytes and its digest 5"),
        (replace(IN_PARTS, nbytes=0), NOT_IN_PARTS),
        (replace(IN_PARTS, slot=SlotRef(segment=1)), NOT_IN_PARTS),
        (replace(IN_PARTS, base=BaseRef(version=0)), NOT_IN_PARTS),
        (replace(IN_PARTS, payload_id=b"\1" * 15), "15 bytes do not name a payload"),
        (replace(IN_PARTS, payload_id=bytes(16)), "16 bytes do not name a payload"),
        (replace(PART, payload_id=b"\1" * 17), "17 bytes do not name a payload"),
        (replace(PART, payload_id=bytes(16)), "16 bytes do not name a payload"),
        (replace(PART, start=-1), "bytes -1 to 8 are no part of 12"),
        (replace(PART, start=8), "bytes 8 to 8 are no part of 12"),
        (replace(PART, end=13), "bytes 4 to 13 are no part of 12"),
        (replace(PART, nbytes=2**63), f"bytes 4 to 8 are no part of {2**63}"),
    ],
)
def test_messages_with_invalid_fields_cannot_be_encoded_and_the_field_is_named(message: Message, text: str) -> None:
    kind = type(message).__name__
    with pytest.raises(ConfigurationError) as caught:
        codec.encode(message)

    assert str(caught.value) == f"A {kind} of model 'policy' cannot be encoded: {text}."


@pytest.mark.parametrize(
    "message",
    [
        replace(HELLO, pid=2**31 - 1),
        replace(UPDATE, nbytes=0),
        replace(UPDATE, nbytes=2**63 - 1),
        replace(UPDATE, slot=SlotRef(segment=1)),
        ACK,
        IN_PARTS,
        replace(PART, start=0, end=12),
        replace(PART, nbytes=2**63 - 1, hashed=True, segment=3),
    ],
)
def test_the_smallest_and_largest_valid_values_are_encoded_and_decoded(message: Message) -> None:
    assert codec.decode(codec.encode(message)) == message


def test_a_body_of_the_maximum_size_is_encoded_and_a_larger_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    message = Bye(model_id="policy", incarnation=5)
    needed = len(codec.encode(message)) - codec.HEADER_NBYTES
    monkeypatch.setattr(codec, "MAX_BODY_NBYTES", needed)
    codec.encode(message)
    monkeypatch.setattr(codec, "MAX_BODY_NBYTES", needed - 1)
    with pytest.raises(ConfigurationError, match=rf"its body takes {needed} bytes and its digest 0\."):
        codec.encode(message)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (patched(UPDATE, {18: b"\7"}), "digest size 7 with padding 0 is not valid"),
        (patched(UPDATE, {19: b"\1"}), "digest size 16 with padding 1 is not valid"),
        (patched(UPDATE, {codec.HEADER_NBYTES: b"\0\7"}), "its fields take 7 bytes, but 6 are there"),
        (patched(UPDATE, {codec.HEADER_NBYTES + 22: b"\4"}), "payload placement 4 is not valid"),
        (patched(UPDATE, {codec.HEADER_NBYTES + 54: b"\1"}), "payload placement 0 is not valid"),
        (patched(ACK, {48: bytes(8)}), "version 0 is below 1"),
        (patched(PART, {codec.HEADER_NBYTES + 48: b"\2"}), "2 is not a truth value"),
        (patched(PART, {24: struct.pack("!Q", 5)}), "its header names another size of its payload"),
        (patched(replace(PART, segment=3), {24: struct.pack("!Q", 4)}), "its header names another size of its payload"),
        (patched(HELLO, {codec.HEADER_NBYTES + 11: struct.pack("!Q", 2**31)}), "process id 2147483648 is out of range"),
    ],
)
def test_frames_with_invalid_fields_cannot_be_decoded_and_the_field_is_named(data: bytes, text: str) -> None:
    error = unread(data, f"A frame's fields are malformed: {text}.")

    assert error.unread == data
    assert isinstance(error.__cause__, ValueError)


def test_truncated_corrupted_and_inconsistent_frames_have_distinct_errors() -> None:
    data = codec.encode(UPDATE)
    changed = data[:-1] + bytes([data[-1] ^ 1])

    longer = unread(data + b"!", f"A frame has {len(data) + 1} bytes, but its header says {len(data)}.")
    assert longer.unread == data + b"!"
    assert unread(changed, "A frame was corrupted in transit: its checksum is wrong.").unread == changed
    other = patched(UPDATE, {24: struct.pack("!Q", 13)})
    assert (
        unread(other, "A frame's fields are malformed: its header names another size of its payload.").unread == other
    )
    assert unread("text", "A str arrived in place of a frame.").unread == b""
