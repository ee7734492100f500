"""Frames read from a fake socket: in pieces, with ancillary data, with lost descriptors."""

from __future__ import annotations

import array
import multiprocessing
import os
import socket
import struct
from typing import Any

import pytest
from msgspec.structs import replace

from weightsync import ProtocolError
from weightsync.protocol import codec
from weightsync.protocol.codec import MAGIC
from weightsync.protocol.messages import Ack, NoBase, SlotRef, Update
from weightsync.transports.base import Received
from weightsync.transports.buffers import NoRoom, Segment
from weightsync.transports.pipe import framing
from weightsync.transports.pipe.framing import (
    _CHUNK_NBYTES,
    PREAMBLE,
    Frame,
    Inflow,
    Outflow,
    OutgoingFrame,
    UserMessage,
    _Filling,
    may_be_frame_start,
)
from weightsync.transports.pipe.link import MappedSegments, PipeLink

UPDATE = Update(model_id="m", incarnation=1, version=1, layout_digest=b"", nbytes=8)
ACK = Ack(model_id="m", incarnation=1, version=1)
SLOT = SlotRef(segment=1, seal=b"s" * 16)


def frame_of(control: bytes) -> bytes:
    """The bytes of a frame on the wire."""
    framed = PREAMBLE + control
    return struct.pack("!i", len(framed)) + framed


class OneReadSocket:
    """A fake socket with one read of the given bytes, ancillary data and flags."""

    def __init__(self, data: bytes, ancillary: Any = (), flags: int = 0) -> None:
        self._reads = [(data, list(ancillary), flags)]

    def recvmsg_into(self, rooms: list[memoryview], *_: Any) -> tuple[int, Any, int, None]:
        data, ancillary, flags = self._reads.pop(0)
        rooms[0][: len(data)] = data
        return len(data), ancillary, flags, None


class Pieces:
    """A fake socket that returns one of these pieces at each read."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = list(pieces)

    def recvmsg_into(self, rooms: list[memoryview], *_: Any) -> tuple[int, Any, int, None]:
        data = self._pieces.pop(0)
        rooms[0][: len(data)] = data
        return len(data), [], 0, None


def read_in_pieces(*pieces: bytes) -> list[Any]:
    """Read the pieces one by one. Returns the frames that each read completed."""
    inflow, found = Inflow(Pieces(*pieces)), []  # type: ignore[arg-type]
    for _ in pieces:
        inflow.read()
        found.append(list(iter(inflow.next, None)))
    return found


def long(content: bytes) -> bytes:
    """A frame with a length of eight bytes, as `multiprocessing` writes large frames."""
    return struct.pack("!iQ", -1, len(content)) + content


def read(data: bytes, ancillary: Any = (), flags: int = 0) -> Inflow:
    inflow = Inflow(OneReadSocket(data, ancillary, flags))  # type: ignore[arg-type]
    inflow.read()
    return inflow


def rights(descriptors: list[int], behind: bytes = b"") -> tuple[int, int, bytes]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes() + behind


def test_an_update_whose_descriptor_the_kernel_dropped_is_untaken_and_the_next_is_read() -> None:
    inflow = read(frame_of(codec.encode(UPDATE, 1, SLOT)) + frame_of(codec.encode(ACK)), flags=socket.MSG_CTRUNC)

    first, second = inflow.next(), inflow.next()
    assert isinstance(first, Frame)
    assert (first.descriptors, first.payload) == ((), None)
    assert first.untaken.startswith("The descriptor of the peer's shared memory could not be taken: ")
    assert second == Frame(ACK, None, ())


@pytest.mark.parametrize("content", [b"", PREAMBLE[:3], MAGIC[:1], b"x", b"y" * 100])
def test_a_user_message_with_an_8_byte_length_is_returned_after_its_last_byte(content: bytes) -> None:
    frame = long(content)

    assert read_in_pieces(frame) == [[UserMessage(bytearray(content))]]
    assert read_in_pieces(frame[:4], frame[4:-1], frame[-1:])[-1] == [UserMessage(bytearray(content))]


def test_a_weightsync_frame_shorter_than_a_header_is_refused_at_once() -> None:
    with pytest.raises(ProtocolError):
        read_in_pieces(long(PREAMBLE + b"x"))


def test_a_weightsync_frame_split_after_its_header_is_completed_by_its_body() -> None:
    control = codec.encode(ACK)
    frame = frame_of(control)
    start = len(frame) - len(control) + codec.HEADER_NBYTES

    assert read_in_pieces(frame[:start], frame[start:]) == [[], [Frame(ACK, None, ())]]


def test_a_weightsync_frame_without_a_body_is_complete_with_its_header() -> None:
    message = NoBase(model_id="", incarnation=1, version=1)
    control = codec.encode(message)
    assert len(control) == codec.HEADER_NBYTES

    for frame in (frame_of(control), long(PREAMBLE + control)):
        assert read_in_pieces(frame) == [[Frame(message, None, ())]]
        assert read_in_pieces(frame[:-1], frame[-1:]) == [[], [Frame(message, None, ())]]


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (codec.encode(UPDATE, 1, SLOT), "A frame arrived without its 1 descriptors"),
        (codec.encode(ACK, 1), "The peer passed 1 descriptors with a frame of Ack"),
        (codec.encode(UPDATE, 2, SLOT), "The peer passed 2 descriptors with a frame of Update"),
    ],
)
def test_a_frame_whose_descriptors_do_not_match_its_message_is_refused(frame: bytes, error: str) -> None:
    whole = frame_of(frame)
    for pieces in ((whole,), (whole[:-1], whole[-1:])):
        with pytest.raises(ProtocolError, match=error) as caught:
            read_in_pieces(*pieces)
        assert caught.value.unread[:4] == frame[:4]


def test_a_payload_without_memory_is_skipped_and_the_next_frame_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(nbytes: int) -> Any:
        raise NoRoom(f"no memory for {nbytes} bytes")

    monkeypatch.setattr(framing, "anonymous", full)
    update = replace(UPDATE, nbytes=_CHUNK_NBYTES)
    payload, behind = bytes(_CHUNK_NBYTES), frame_of(codec.encode(ACK))
    control = PREAMBLE + codec.encode(update)
    head = struct.pack("!i", len(control) + len(payload)) + control

    found = read_in_pieces(head, payload[:5], payload[5:], behind)
    skipped = Frame(update, None, (), f"no memory for {_CHUNK_NBYTES} bytes")
    assert found == [[], [], [skipped], [Frame(ACK, None, ())]]


def test_a_slot_in_memory_that_this_end_cannot_open_is_a_protocol_error() -> None:
    segment, mapped = Segment(16), MappedSegments()
    on_device = SlotRef(segment=1, seal=b"s" * 16, device=b"d" * 16, nbytes=16)
    for slot, descriptors, error in (
        (SLOT, (), "The peer names segment 1, which it never passed"),
        (on_device, (os.dup(segment.fd),), "The peer names a slot on a device, and this end said that it opens none"),
    ):
        with pytest.raises(ProtocolError, match=error) as caught:
            mapped.find(slot, descriptors)
        assert caught.value.unread == b""


def test_a_payload_that_is_larger_than_its_segment_is_malformed(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = multiprocessing.Pipe()
    link, segment = PipeLink(ours, "m"), Segment(7)
    update = codec.decode(codec.encode(UPDATE, 1, SLOT))
    monkeypatch.setattr(link._channel, "collect", lambda _: [Frame(update, None, (os.dup(segment.fd),))])
    with pytest.raises(ProtocolError, match="8 bytes in a segment of 7") as caught:
        link.receive()

    assert caught.value.unread == b""
    link.close()
    theirs.close()


def test_a_link_returns_the_reason_why_a_segment_could_not_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = multiprocessing.Pipe()
    link, update = PipeLink(ours, "m"), codec.decode(codec.encode(UPDATE, 0, SLOT))
    frames = [Frame(update, None, (), "too many open files"), Frame(ACK, None, ())]
    monkeypatch.setattr(link._channel, "collect", lambda _: frames)

    assert link.receive() == [Received(update, untaken="too many open files"), Received(ACK)]
    link.close()
    theirs.close()


def test_partial_descriptors_are_ignored_and_unclaimed_descriptors_are_bounded() -> None:
    opened = [os.dup(0) for _ in range(9)]
    other = socket.SOL_SOCKET, socket.SCM_RIGHTS + 1, b"1234"
    inflow = Inflow(OneReadSocket(b"x", [rights(opened[:8], b"xx"), other]))  # type: ignore[arg-type]
    inflow.read()
    assert list(inflow._descriptors) == opened[:8]
    inflow._socket = OneReadSocket(b"x", [rights(opened[8:])])  # type: ignore[assignment]
    with pytest.raises(ProtocolError, match="passed 9 descriptors that no frame of its own names"):
        inflow.read()
    inflow.close()


@pytest.mark.parametrize("pieces", [[50_000, 50_000, 30_000], [_CHUNK_NBYTES] * 3, [1, 129_998, 1]])
def test_bytes_are_collected_in_order_in_memory_that_grows_with_them(pieces: list[int]) -> None:
    source = memoryview(os.urandom(sum(pieces) + 5))
    filling, start = _Filling(sum(pieces)), 0
    for nbytes in pieces:
        assert filling.missing == sum(pieces) - start
        assert len(filling.grown) <= start + _CHUNK_NBYTES
        assert filling.take(source[start : start + nbytes]) == nbytes
        start += nbytes

    assert filling.take(source[start:]) == 0
    assert (bytes(filling.grown), filling.missing) == (bytes(source[:start]), 0)


def test_receive_memory_of_two_large_payloads_is_kept_and_reused_once_unreferenced() -> None:
    inflow = Inflow(OneReadSocket(b""))  # type: ignore[arg-type]
    held = [inflow._memory_for(_CHUNK_NBYTES) for _ in range(5)]
    assert len(inflow._receive_buffers._known) == 2
    held[4][:1] = b"x"
    del held[4]

    assert bytes(inflow._memory_for(_CHUNK_NBYTES)[:1]) == b"x"


@pytest.mark.parametrize(
    ("start", "may_be"),
    [
        (b"", True),
        (PREAMBLE[:3], True),
        (PREAMBLE[:-1], True),
        (PREAMBLE, False),
        (MAGIC[:1], True),
        (MAGIC[:-1], True),
        (MAGIC, False),
        (b"\x80\x04", False),
        (MAGIC[:1] + b"?", False),
    ],
)
def test_may_be_ours_is_true_only_for_an_incomplete_magic_or_preamble(start: bytes, may_be: bool) -> None:
    assert may_be_frame_start(start) is may_be


class FailingSocket:
    """A fake socket whose writes raise an error."""

    def __init__(self, error: OSError) -> None:
        self._error = error

    def sendmsg(self, *_: Any) -> int:
        raise self._error


@pytest.mark.parametrize(
    ("error", "number", "text"),
    [(OSError(32, "Broken pipe"), 32, "Broken pipe"), (OSError("in its own words"), 0, "in its own words")],
)
def test_a_failed_outflow_raises_the_same_error_on_every_later_write(error: OSError, number: int, text: str) -> None:
    outflow = Outflow(FailingSocket(error))  # type: ignore[arg-type]
    with pytest.raises(OSError, match=text) as first:
        outflow.write(OutgoingFrame(b"x"))
    assert first.value is error
    with pytest.raises(OSError, match=text) as second:
        outflow.write(OutgoingFrame(b"x"))

    assert (second.value.errno, second.value.strerror) == (number, text)
    assert (outflow.idle, list(outflow.queue)) == (False, [])


def test_all_read_of_a_closed_link_is_none() -> None:
    ours, theirs = multiprocessing.Pipe()
    closed, other = PipeLink(ours, "closed"), PipeLink(ours, "other")
    closed.close()
    assert (closed.all_read(), other.all_read()) == (None, True)
    other.close()
    theirs.close()
