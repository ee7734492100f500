"""What the wire does not carry, and what it does not read, is told with the numbers that are wrong."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from typing import Any

import pytest
import xxhash

from weightsync.errors import ConfigurationError, ProtocolError
from weightsync.protocol import codec
from weightsync.protocol.messages import Ack, Bye, Hello, Message, SlotRef, Update

HELLO = Hello(model_id="policy", incarnation=5, pid=7)
UPDATE = Update(model_id="policy", incarnation=5, version=1, layout_digest=b"", digest=b"\1" * 16, nbytes=12)
ACK = Ack(model_id="policy", incarnation=5, version=1)


def sealed(message: Message, changes: dict[int, bytes]) -> bytes:
    """A frame with other bytes in these places, whose checksum fits."""
    data = bytearray(codec.encode(message))
    for position, piece in changes.items():
        data[position : position + len(piece)] = piece
    data[8:16] = struct.pack("!Q", xxhash.xxh3_64_intdigest(bytes(data[16:])))
    return bytes(data)


def unread(data: Any, told: str) -> ProtocolError:
    """The error of reading this, which says what is wrong."""
    with pytest.raises(ProtocolError, match=f"^{re.escape(told)}") as caught:
        codec.decode(data)
    return caught.value


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (replace(HELLO, pid=2**31), "a process id of 2147483648"),
        (replace(HELLO, pid=-1), "a process id of -1"),
        (replace(UPDATE, version=0), "version 0, which means none"),
        (replace(ACK, version=0), "version 0, which means none"),
        (replace(UPDATE, nbytes=2**63), f"a payload of {2**63} bytes"),
        (replace(UPDATE, nbytes=-1), "a payload of -1 bytes"),
        (replace(ACK, seconds=float("nan")), "a duration of nan s"),
        (replace(ACK, seconds=float("inf")), "a duration of inf s"),
        (replace(ACK, seconds=-0.5), "a duration of -0.5 s"),
        (replace(UPDATE, digest=b"short"), "its body takes 36 bytes, its digest 5"),
    ],
)
def test_a_number_that_means_nothing_is_not_sent_and_is_named(message: Message, told: str) -> None:
    kind = type(message).__name__
    with pytest.raises(ConfigurationError) as caught:
        codec.encode(message)

    assert str(caught.value) == f"A {kind} of model 'policy' does not fit the wire: {told}."


@pytest.mark.parametrize(
    "message",
    [
        replace(HELLO, pid=2**31 - 1),
        replace(UPDATE, nbytes=0),
        replace(UPDATE, nbytes=2**63 - 1),
        replace(UPDATE, slot=SlotRef(segment=1)),
        ACK,
    ],
)
def test_the_first_and_the_last_number_that_mean_something_travel(message: Message) -> None:
    assert codec.decode(codec.encode(message)) == message


def test_the_largest_body_is_sent_and_no_larger_one(monkeypatch: pytest.MonkeyPatch) -> None:
    message = Bye(model_id="policy", incarnation=5)
    needed = len(codec.encode(message)) - codec.HEADER_NBYTES
    monkeypatch.setattr(codec, "MAX_BODY_NBYTES", needed)
    codec.encode(message)
    monkeypatch.setattr(codec, "MAX_BODY_NBYTES", needed - 1)
    with pytest.raises(ConfigurationError, match=rf"its body takes {needed} bytes, its digest 0\."):
        codec.encode(message)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (sealed(UPDATE, {18: b"\7"}), "a digest of 7 bytes"),
        (sealed(UPDATE, {19: b"\1"}), "a digest of 16 bytes"),
        (sealed(UPDATE, {codec.HEADER_NBYTES: b"\0\7"}), "fields of 7 bytes in 6"),
        (sealed(UPDATE, {codec.HEADER_NBYTES + 21: b"\2"}), "2 slots"),
        (sealed(ACK, {48: bytes(8)}), "version 0, which means none"),
        (sealed(HELLO, {codec.HEADER_NBYTES + 9: struct.pack("!Q", 2**31)}), "a process id of 2147483648"),
    ],
)
def test_fields_that_mean_nothing_are_not_read_and_are_named(data: bytes, told: str) -> None:
    error = unread(data, f"A frame's fields are malformed: {told}.")

    assert error.unread == data
    assert isinstance(error.__cause__, ValueError)


def test_a_frame_that_is_not_whole_or_not_as_it_was_sent_is_distinguished() -> None:
    data = codec.encode(UPDATE)
    changed = data[:-1] + bytes([data[-1] ^ 1])

    longer = unread(data + b"!", f"A frame of {len(data)} bytes came with {len(data) + 1}.")
    assert longer.unread == data + b"!"
    assert unread(changed, "A frame was corrupted on its way: its checksum does not fit.").unread == changed
    other = sealed(UPDATE, {24: struct.pack("!Q", 13)})
    assert unread(other, "A frame announces 13 bytes, its message others.").unread == other
    assert unread("text", "A str came where a frame belongs.").unread == b""
