"""Links over a pipe, with both ends in one process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import multiprocessing
import os
import socket
import struct
import threading
import time

import pytest
import wire_strategies as strategies
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from pools import statistics

from weightsync.errors import ConfigurationError, ProtocolError, TransportError
from weightsync.protocol import codec
from weightsync.protocol._tables import PROTOCOL_VERSION, RefusalKind
from weightsync.protocol.messages import Ack, Bye, Hello, Part, Refusal, SlotRef, Update
from weightsync.transports.base import Payloads, Waker, wait
from weightsync.transports.buffers import INLINE_BELOW_NBYTES, Buffer, NoRoom, Pool, Segment, Storage
from weightsync.transports.pipe import link as pipe_link
from weightsync.transports.pipe.framing import PREAMBLE, Outflow, OutgoingFrame, _FramedUpdates
from weightsync.transports.pipe.link import PipeLink

HELLO = Hello(model_id="policy", incarnation=2**70, version=0, pid=0)


def ack(version: int, model_id: str = "policy") -> Ack:
    return Ack(model_id=model_id, incarnation=1, version=version)


def update(version: int, nbytes: int = 0, model_id: str = "policy") -> Update:
    return Update(model_id=model_id, incarnation=1, version=version, layout_digest=b"", nbytes=nbytes)


def filled(nbytes: int, storage: Storage = Storage.HEAP, seed: int = 1) -> Buffer:
    buffer = Buffer(nbytes, storage)
    pattern = bytes((seed * 31 + index * 7) % 256 for index in range(min(nbytes, 251)))
    buffer.view[:nbytes] = (pattern * (nbytes // max(len(pattern), 1) + 1))[:nbytes]
    return buffer


def narrow(connection) -> None:
    """Set the smallest send buffer, so that every frame is written in pieces."""
    with socket.socket(fileno=os.dup(connection.fileno())) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)


def exchange(sender: PipeLink, receiver: PipeLink, count: int) -> list:
    received = []
    while len(received) < count:
        sender.flush()
        received += receiver.receive()
    return received


def frame(message, payload: bytes = b"", preamble: bytes = PREAMBLE) -> bytes:
    control = preamble + codec.encode(message)
    return struct.pack("!i", len(control) + len(payload)) + control + payload


# ------------------------------------------------------------------------------------------- messages and payloads


def test_messages_arrive_in_order_in_both_directions(linked):
    first, second = linked()
    for version in range(1, 21):
        first.send(update(version))
        second.send(ack(version))

    assert [update(version) for version in range(1, 21)] == [r.message for r in second.receive()]
    assert [ack(version) for version in range(1, 21)] == [r.message for r in first.receive()]
    assert first.receive() + second.receive() == []


@pytest.mark.parametrize("nbytes", [1, 100, 65_535, 65_536, 65_537, 300_000])
@pytest.mark.parametrize("payloads", Payloads)
@pytest.mark.parametrize("storage", Storage)
def test_payloads_arrive_whole_and_writable(linked, nbytes, payloads, storage):
    first, second = linked(payloads=payloads)
    buffer = filled(nbytes, storage)
    first.send(update(1, nbytes), buffer)
    (received,) = exchange(first, second, 1)

    assert bytes(buffer.view[:nbytes]) == received.payload
    assert not received.payload.readonly
    shared = payloads is Payloads.SHARED and storage is Storage.SEGMENTS and nbytes >= 65_536
    assert shared == (received.message.slot is not None)
    assert shared == buffer.pinned


def part(segment: int, nbytes: int = INLINE_BELOW_NBYTES, payload_id: bytes = b"1" * 16) -> Part:
    ends = {"nbytes": nbytes, "start": 1, "end": 4, "segment": segment}
    return Part(model_id="policy", incarnation=1, payload_id=payload_id, hashed=True, **ends)


def test_a_part_is_read_from_the_shared_segment_not_from_the_workers_private_copy(linked):
    first, second = linked()
    buffer = filled(300_000, Storage.SEGMENTS)
    whole = part(0, 250_000)
    assert not first.takes_parts(buffer, 300_000, True)  # the worker has not mapped the segment yet
    first.send(update(1, 300_000), buffer)
    (served,) = exchange(first, second, 1)
    served.payload[:10] = bytes(10)  # makes a private copy of the page in the worker

    assert [first.takes_parts(buffer, 300_000, hashed) for hashed in (True, False)] == [True, False]
    assert not first.takes_parts(filled(300_000), 300_000, True)
    buffer.unseal()
    buffer.view[:5] = b"parts"
    first.send_part(whole, buffer)
    (received,) = exchange(first, second, 1)

    assert received.message == replace(whole, segment=buffer.segment.number)
    assert bytes(received.payload[:10]) == b"parts" + bytes(filled(10).view[5:10])
    assert len(received.payload) == 250_000
    received.payload[:10] = bytes(10)
    first.send_part(part(0, 250_000, b"2" * 16), buffer)
    (following,) = exchange(first, second, 1)
    assert bytes(following.payload[:5]) == b"parts"


def test_a_part_does_not_change_the_eviction_order_of_segments_at_either_end(linked):
    first, second = linked()
    buffers = [filled(INLINE_BELOW_NBYTES, Storage.SEGMENTS) for _ in range(5)]
    for version, buffer in enumerate(buffers[:4], 1):
        first.send(update(version, buffer.nbytes), buffer)
    first.send_part(part(0), buffers[0])
    first.send(update(5, INLINE_BELOW_NBYTES), buffers[4])  # the first segment is the oldest, and leaves both lists
    first.send(update(6, INLINE_BELOW_NBYTES), buffers[0])

    assert [received.payload for received in exchange(first, second, 7)][-1] == buffers[0].view


def test_a_part_of_a_segment_displaced_during_filling_is_not_sent(linked):
    first, second = linked()
    buffers = [filled(INLINE_BELOW_NBYTES, Storage.SEGMENTS) for _ in range(5)]
    first.send(update(1, INLINE_BELOW_NBYTES), buffers[0])
    assert first.takes_parts(buffers[0], INLINE_BELOW_NBYTES, True)
    for version, buffer in enumerate(buffers[1:], 2):  # as other threads would send them
        first.send(update(version, buffer.nbytes), buffer)
    first.send_part(part(0), buffers[0])
    first.send(update(6, INLINE_BELOW_NBYTES), buffers[0])

    received = exchange(first, second, 6)
    assert [each.message.version for each in received] == [1, 2, 3, 4, 5, 6]
    assert received[-1].payload == buffers[0].view


@pytest.mark.parametrize(
    ("named", "error"), [(7, "names segment 7, which it never passed"), (None, "400000 bytes in a segment of 65536")]
)
def test_a_part_outside_the_passed_segments_raises_protocol_error(linked, named, error):
    first, second = linked()
    buffer = filled(INLINE_BELOW_NBYTES, Storage.SEGMENTS)
    first.send(update(1, buffer.nbytes), buffer)
    exchange(first, second, 1)
    first._channel.write("", OutgoingFrame(frame(part(named or buffer.segment.number, 400_000))[4:]))

    with pytest.raises(ProtocolError, match=error) as caught:
        exchange(first, second, 1)
    caught.value.__traceback__ = None  # the traceback keeps the segment and its mapping alive


def test_a_part_of_a_segment_that_could_not_be_mapped_is_skipped(linked, monkeypatch):
    def no_room(*_):
        raise NoRoom("There is none.")

    first, second = linked()
    buffer = filled(INLINE_BELOW_NBYTES, Storage.SEGMENTS)
    with monkeypatch.context() as patch:
        patch.setattr(pipe_link, "Mapping", no_room)
        first.send(update(1, buffer.nbytes), buffer)
        (untaken,) = exchange(first, second, 1)
    first.send_part(part(0), buffer)
    first.send(ack(1))

    assert untaken.untaken == "There is none."
    assert [received.message for received in exchange(first, second, 1)] == [ack(1)]


def test_sending_a_part_on_a_closed_link_raises(linked):
    first, _ = linked()
    first.close()

    with pytest.raises(TransportError, match="is closed"):
        first.send_part(part(0), filled(INLINE_BELOW_NBYTES, Storage.SEGMENTS))


def test_an_ack_of_an_inline_payload_unpins_the_previous_shared_payload(linked):
    first, second = linked()
    shared = filled(INLINE_BELOW_NBYTES, Storage.SEGMENTS)
    pinned = []
    for version, payload in ((1, shared), (2, filled(10))):
        first.send(update(version, payload.nbytes), payload)
        exchange(first, second, 1)
        second.send(ack(version))
        exchange(second, first, 1)
        pinned.append(shared.pinned)

    assert pinned == [True, False]


def test_a_buffer_may_be_larger_than_its_payload(linked):
    first, second = linked()
    for storage in Storage:
        buffer = filled(200_000, storage)
        first.send(update(1, 100_000), buffer)

        assert bytes(buffer.view[:100_000]) == exchange(first, second, 1)[0].payload


def test_an_update_without_its_bytes_is_refused(linked):
    first, second = linked()
    for buffer in (None, Buffer(10)):
        with pytest.raises(ConfigurationError, match="without its 11 bytes"):
            first.send(update(1, 11), buffer)
    with pytest.raises(ConfigurationError, match="cannot be encoded"):
        first.send(replace(update(1), digest=b"short"))

    assert second.receive() == []


def test_a_receive_buffer_is_not_reused_while_a_view_of_it_exists(linked):
    first, second = linked(payloads=Payloads.INLINE)
    kept = []
    for seed in range(6):
        first.send(update(seed + 1, 200_000), filled(200_000, seed=seed))
        (received,) = exchange(first, second, 1)
        kept.append((received.payload[10:], bytes(filled(200_000, seed=seed).view[10:])))

    assert all(view == content for view, content in kept)


def test_a_receive_buffer_is_reused_once_no_view_of_it_exists(linked):
    first, second = linked(payloads=Payloads.INLINE)
    places = set()
    for version in range(1, 7):
        first.send(update(version, 200_000), filled(200_000))
        places.add(id(exchange(first, second, 1)[0].payload.obj))

    assert len(places) == 1


# ---------------------------------------------------------------------------------------- partial frames


@settings(max_examples=40)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("ours"), strategies.acks),
            st.tuples(st.just("payload"), st.integers(1, 200_000)),
            st.tuples(
                st.just("user"),
                st.binary(max_size=300).filter(lambda data: not data.startswith((codec.MAGIC, PREAMBLE)))
                | st.integers(60_000, 150_000),
            ),
        ),
        max_size=8,
    ),
    st.randoms(use_true_random=False),
)
def test_frames_are_read_correctly_for_any_split_of_the_stream(frames, random):
    reading, writing = multiprocessing.Pipe()
    link = PipeLink(reading, "m")
    stream, ours, users = b"", [], []
    for kind, what in frames:
        if kind == "ours":
            message = replace(what, model_id="m")
            stream += frame(message, preamble=random.choice([b"", PREAMBLE]))
            ours.append((message, None))
        elif kind == "payload":
            message, payload = update(1, what, "m"), bytes([what % 256]) * what
            stream += frame(message, payload, preamble=random.choice([b"", PREAMBLE]))
            ours.append((message, payload))
        else:
            content = what if isinstance(what, bytes) else b"u" * what
            stream += struct.pack("!i", len(content)) + content
            users.append(content)
    received, position = [], 0
    while position < len(stream):
        size = random.choice([1, 3, 75, 1000, 70_000, 200_000])
        position += os.write(writing.fileno(), stream[position : position + min(size, 100_000)])
        received += link.receive()

    assert ours == [(r.message, r.payload) for r in received]
    assert users == [link.user.recv_bytes() for _ in users]
    assert not link.user.poll()
    link.close()
    writing.close()


@pytest.mark.parametrize("payloads", Payloads)
def test_messages_and_payloads_arrive_whole_over_a_pipe_with_the_smallest_send_buffer(linked, payloads):
    ends = multiprocessing.Pipe()
    narrow(ends[0])
    first, second = linked(ends=ends, payloads=payloads)
    buffers = [filled(100_000, Storage.SEGMENTS, seed) for seed in range(4)]
    for version, buffer in enumerate(buffers, 1):
        first.send(replace(update(version, 100_000), layout=bytes(50_000)), buffer)
        first.send(ack(version))

    assert first.wants_write() is not None
    received = exchange(first, second, 8)
    assert [r.message.version for r in received] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert [bytes(buffer.view) for buffer in buffers] == [bytes(r.payload) for r in received[::2]]
    assert first.wants_write() is None
    assert first.flush()


def test_a_large_payload_does_not_block_its_sender_and_stays_pinned_until_written(linked):
    first, second = linked(payloads=Payloads.INLINE)
    nbytes = 64 * 2**20
    buffer = filled(nbytes)
    first.send(update(1, nbytes), buffer)
    assert buffer.pinned
    assert not first.flush()
    received = []

    def read_slowly() -> None:
        waker = Waker()
        while not received:
            wait(waker, [second], 0.1)
            received.extend(second.receive())
            time.sleep(0.0005)

    reader = threading.Thread(target=read_slowly)
    reader.start()
    waker = Waker()
    while first.wants_write() is not None:
        wait(waker, [first], 1.0)
        first.flush()
    reader.join()

    assert buffer.view[:nbytes] == received[0].payload
    assert not buffer.pinned


def test_a_payload_sent_on_two_links_stays_pinned_until_both_have_written_it(linked):
    (first, _), (second, _) = pairs = [linked(payloads=Payloads.INLINE) for _ in range(2)]
    nbytes = 2**20
    buffer = filled(nbytes)
    for link in (first, second):
        link.send(update(1, nbytes), buffer)
    pinned = []
    for sending, receiving in pairs:
        exchange(sending, receiving, 1)
        pinned.append(buffer.pinned)

    assert pinned == [True, False]


def test_an_outgoing_payload_is_not_copied(linked):
    first, second = linked(payloads=Payloads.INLINE)
    buffer = filled(2**20)
    first.send(update(1, 2**20), buffer)
    buffer.view[-4:] = b"late"

    assert exchange(first, second, 1)[0].payload[-4:] == b"late"


def test_close_truncates_an_unfinished_frame_and_unpins_its_payload(linked):
    first, second = linked(payloads=Payloads.INLINE)
    buffer = filled(2**20)
    first.send(ack(1))
    first.send(update(2, 2**20), buffer)
    first.close()

    assert not buffer.pinned
    assert not buffer.retired
    assert [ack(1)] == [r.message for r in second.receive()]
    with pytest.raises(TransportError, match="the trainer was closed by the other end"):
        second.receive()


def test_a_close_that_truncates_a_frame_ends_the_stream_despite_an_inherited_descriptor(linked):
    ends = multiprocessing.Pipe()
    inherited = os.dup(ends[0].fileno())
    first, second = linked(ends=ends, payloads=Payloads.INLINE)
    first.send(update(2, 2**20), filled(2**20))
    first.close()

    assert second.receive() == []
    with pytest.raises(TransportError, match="the trainer was closed by the other end"):
        second.receive()
    os.close(inherited)


def test_a_close_between_frames_leaves_the_stream_usable_by_an_inherited_descriptor(linked):
    ends = multiprocessing.Pipe()
    first, second = linked(ends=ends)
    with multiprocessing.connection.Connection(os.dup(ends[0].fileno())) as inherited:
        first.close()
        linked(ends=(inherited, multiprocessing.Pipe()[1]))[0].send(ack(1))

        assert [ack(1)] == [r.message for r in second.receive()]


# -------------------------------------------------------------------------------------------- bad frames


def damaged(how: str) -> bytes:
    data, header = bytearray(frame(ack(2))), 4 + len(PREAMBLE)
    if how == "negative length":
        return struct.pack("!i", -2) + bytes(data[4:])
    if how == "frame too short":
        return struct.pack("!i", header + 36) + bytes(data[4 : header + 40])
    if how == "frame too long":
        return struct.pack("!i", len(data) - 4 + 7) + bytes(data[4:]) + bytes(7)
    if how == "payload that nobody announced":
        return frame(ack(2), b"payload")
    if how == "unknown segment":
        update_ = Update(model_id="policy", incarnation=1, version=2, layout_digest=b"", nbytes=3)
        return frame(replace(update_, slot=SlotRef(segment=99)))
    data[{"kind": header + 16, "incarnation": header + 36, "body": -1}[how]] ^= 0x10
    return bytes(data)


BAD = [
    "negative length",
    "frame too short",
    "frame too long",
    "payload that nobody announced",
    "unknown segment",
    "kind",
    "incarnation",
    "body",
]


@pytest.mark.parametrize("how", BAD)
def test_malformed_frames_raise_protocol_error_after_earlier_messages(linked, how):
    first, second = linked()
    first.send(ack(1))
    os.write(first._channel.connection.fileno(), damaged(how) + frame(ack(3)))

    assert [ack(1)] == [r.message for r in second.receive()]
    assert [second] == wait(Waker(), [second], 1.0)
    for _ in range(2):
        with pytest.raises(ProtocolError) as caught:
            second.receive()
    assert caught.value.unread or how == "unknown segment"
    second.send(Bye(model_id="policy", incarnation=1, reason="a last word"))
    assert first.receive()[0].message.reason == "a last word"


SLOTTED = Update(
    model_id="policy", incarnation=1, version=1, layout_digest=b"", nbytes=100_000, slot=SlotRef(segment=1)
)
STRAY_DESCRIPTORS = {
    "with a handshake": (codec.encode(HELLO, 1), 1),
    "with an update without a slot": (codec.encode(update(1, 0), 1), 1),
    "two with one slot": (codec.encode(SLOTTED, 2), 2),
    "with the user's own message": (b"the user's", 9),
}


@pytest.mark.parametrize("how", list(STRAY_DESCRIPTORS))
def test_unexpected_descriptors_are_closed_and_raise_protocol_error(linked, how, tmp_path):
    first, second = linked()
    content, count = STRAY_DESCRIPTORS[how]
    with open(tmp_path / "file", "w+b") as file:
        for _ in range(count if count > 2 else 1):
            framed = struct.pack("!i", len(content)) + content
            with socket.socket(fileno=os.dup(first._channel.connection.fileno())) as raw:
                socket.send_fds(raw, [framed], [file.fileno()] * min(count, 2))
        with pytest.raises(ProtocolError, match="descriptors"):
            _read(second, count)

        assert opened(file.name) == 1


def opened(*files: str) -> int:
    """The number of descriptors of this process for these files; other threads may open and close others meanwhile."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(map(found.count, files))


def _read(link: PipeLink, times: int) -> None:
    for _ in range(times):
        link.receive()


def test_descriptors_without_a_complete_frame_are_closed_with_the_channel(linked, tmp_path):
    first, second = linked()
    sock = os.readlink(f"/proc/self/fd/{second._channel.connection.fileno()}")
    with (
        open(tmp_path / "file", "w+b") as file,
        socket.socket(fileno=os.dup(first._channel.connection.fileno())) as raw,
    ):
        socket.send_fds(raw, [struct.pack("!i", 100)], [file.fileno()] * 3)
        assert second.receive() == []
        waiting = second.waitables()
        # The socket is open twice: as the connection, and as the channel's own descriptor.
        assert (opened(file.name), opened(sock), len(waiting)) == (4, 2, 2)
        second.close()

        assert (opened(file.name), opened(sock)) == (1, 0)
        for fd in waiting:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)


def test_another_protocol_version_is_a_protocol_error_that_names_both(linked):
    first, second = linked()
    data = bytearray(frame(HELLO))
    data[8 + len(PREAMBLE) : 10 + len(PREAMBLE)] = struct.pack("!H", 7)
    os.write(first._channel.connection.fileno(), bytes(data))

    with pytest.raises(
        ProtocolError, match=f"From the trainer: .* version 7, this process speaks version {PROTOCOL_VERSION}"
    ):
        second.receive()


def test_a_false_frame_length_allocates_no_memory_in_advance(linked):
    first, second = linked()
    os.write(first._channel.connection.fileno(), struct.pack("!iQ", -1, 2**62) + b"not ours" * 100)

    assert second.receive() == []
    assert len(second._channel._inflow.filling.grown) < 2**20


# ------------------------------------------------------------------------------------------------- ends


def test_messages_sent_before_a_close_are_received_before_the_error(linked):
    first, second = linked()
    for version in range(1, 6):
        first.send(ack(version))
    first.close()

    assert len(second.receive()) == 5
    for _ in range(2):
        with pytest.raises(TransportError, match="the trainer"):
            second.receive()
    with pytest.raises(TransportError, match="the trainer"):
        second.send(ack(9))


def test_a_peer_that_closes_with_unread_bytes_is_lost_after_its_last_message(linked):
    first, second = linked()
    second.send(ack(1))
    first.send(ack(2))
    first.close()
    with pytest.raises(TransportError, match="Cannot write to the trainer"):
        second.send(ack(3))

    assert [ack(2)] == [r.message for r in second.receive()]
    with pytest.raises(TransportError):
        second.receive()


def test_close_is_idempotent_and_a_closed_link_raises_on_use(linked):
    first, _ = linked()
    first.close()
    first.close()

    for use in (first.receive, first.flush, lambda: first.send(ack(1))):
        with pytest.raises(TransportError, match="closed"):
            use()
    assert first.waitables() == []
    assert first.wants_write() is None
    first.watch(os.getpid(), 0)


def test_a_connection_closed_by_its_owner_ends_the_link(linked):
    ends = multiprocessing.Pipe()
    first, second = linked(ends=ends)
    ends[0].close()

    with pytest.raises(TransportError, match="closed"):
        first.send(ack(1))
    with pytest.raises(TransportError, match="closed"):
        first.receive()
    first.close()
    with pytest.raises(TransportError, match="closed by the other end"):
        second.receive()


def test_a_link_leaves_the_connection_in_blocking_mode(linked):
    ends = multiprocessing.Pipe()
    socket.setdefaulttimeout(5.0)
    try:
        first, second = linked(ends=ends)
    finally:
        socket.setdefaulttimeout(None)
    first.send(update(1, 2**20), filled(2**20))
    second.receive()

    assert [fcntl.fcntl(end.fileno(), fcntl.F_GETFL) & os.O_NONBLOCK for end in ends] == [0, 0]


# ------------------------------------------------------------------------------------------- unusable pipes


def test_a_one_way_pipe_is_refused_with_advice_to_use_duplex():
    ends = multiprocessing.Pipe(duplex=False)
    for end in ends:
        with pytest.raises(ConfigurationError, match=r"multiprocessing\.Pipe\(duplex=True\)"):
            PipeLink(end, "policy")
        end.close()


def test_an_object_that_is_not_a_connection_is_refused_with_its_type():
    with pytest.raises(ConfigurationError, match=r"An object of type str is not a connection: .*Pipe\(duplex=True\)"):
        PipeLink("pipe", "policy")


def test_a_closed_connection_is_refused():
    first, second = multiprocessing.Pipe()
    first.close()
    second.close()
    with pytest.raises(ConfigurationError, match="closed"):
        PipeLink(first, "policy")


def test_two_links_of_one_model_over_one_connection_are_refused(linked):
    ends = multiprocessing.Pipe()
    linked(ends=ends)
    with pytest.raises(ConfigurationError, match="'policy' already has a link"):
        PipeLink(ends[0], "policy")


# ---------------------------------------------------------------------------------------------- waiting


def test_wait_returns_the_links_that_have_messages(linked):
    one, two = linked(), linked()
    two[0].send(ack(1))

    assert [two[1]] == wait(Waker(), [one[1], two[1]], 1.0)
    two[1].receive()
    assert wait(Waker(), [one[1], two[1]], 0.0) == []


def test_wait_returns_when_the_waker_fires_before_or_during_it(linked):
    _, second = linked()
    waker = Waker()
    waker.fire()
    waker.fire()
    assert wait(waker, [second], None) == []
    threading.Timer(0.05, waker.fire).start()
    assert wait(waker, [second], None) == []
    assert wait(waker, [second], 0.01) == []


def test_a_waker_that_is_closed_ends_every_wait(linked):
    _, second = linked()
    waker = Waker()
    threading.Timer(0.05, waker.close).start()
    assert wait(waker, [second], None) == []
    assert wait(waker, [second], None) == []
    waker.fire()
    waker.clear()
    waker.close()

    assert waker.fileno() == -1


def test_closing_a_waker_marks_it_closed_then_fires_it_then_closes_its_descriptor(monkeypatch):
    waker, seen = Waker(), []
    write, close = os.eventfd_write, os.close

    ours = waker.fileno()

    def writes(fd, value):
        # Enter as a signal handler that begins a wait here: it must not mistake this last firing for its own.
        if fd == ours:
            seen.append(("fired", waker.enter()))
        write(fd, value)

    def closes(fd):
        if fd == ours:  # ignore descriptors that other threads or the garbage collector close
            seen.append(("closed", fd))
        close(fd)

    monkeypatch.setattr(os, "eventfd_write", writes)
    monkeypatch.setattr(os, "close", closes)
    waker.close()

    assert seen == [("fired", None), ("closed", ours)]


def test_room_to_write_ends_a_wait(linked):
    first, second = linked(payloads=Payloads.INLINE)
    first.send(update(1, 2**20), filled(2**20))
    assert wait(Waker(), [first], 0.0) == []
    second.receive()

    assert [first] == wait(Waker(), [first], 1.0)


def test_a_pool_reuses_two_buffers_for_many_versions(linked):
    first, second = linked()
    pool = Pool()
    for version in range(1, 12):
        buffer = pool.acquire(100_000)
        buffer.view[:] = bytes([version]) * 100_000
        first.send(update(version, 100_000), buffer)
        (received,) = second.receive()
        assert bytes([version]) * 100_000 == received.payload
        second.send(ack(version))
        first.receive()

    assert statistics(pool) == (2, 1, 2, 200_000)


class Interrupting:
    """A socket whose calls raise KeyboardInterrupt after they have done their work."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def sendmsg(self, *arguments: object) -> int:
        self.sock.sendmsg(*arguments)
        raise KeyboardInterrupt

    def recvmsg_into(self, *arguments: object) -> tuple:
        self.sock.recvmsg_into(*arguments)
        raise KeyboardInterrupt


def test_a_write_interrupted_midway_takes_the_link_down_and_no_frame_is_garbled(linked):
    first, second = linked()
    outflow = first._channel.outlet
    outflow._socket = Interrupting(outflow._socket)
    with pytest.raises(KeyboardInterrupt):
        first.send(ack(1))
    outflow._socket = outflow._socket.sock
    for _ in range(2):
        with pytest.raises(TransportError, match="interrupted"):
            first.send(ack(2))

    assert [ack(1)] == [received.message for received in second.receive()]


class _FailsOnce:
    """A fake socket whose first write fails for lack of memory, and whose later writes succeed."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self._errors = [OSError(errno.ENOBUFS, "No buffer space available")]

    def sendmsg(self, pieces, *_) -> int:
        if self._errors:
            raise self._errors.pop()
        self.written += map(bytes, pieces)
        return sum(map(len, pieces))


def test_after_a_write_that_failed_nothing_more_is_written():
    sock = _FailsOnce()
    outflow = Outflow(sock)
    for control in (b"first", b"second"):
        with pytest.raises(OSError, match="No buffer space"):
            outflow.write(OutgoingFrame(control))

    assert sock.written == []


def test_a_read_interrupted_midway_takes_the_link_down(linked):
    first, second = linked()
    first.send(ack(1))
    inflow = second._channel._inflow
    inflow._socket = Interrupting(inflow._socket)
    with pytest.raises(KeyboardInterrupt):
        second.receive()
    for _ in range(2):
        with pytest.raises(TransportError, match="interrupted"):
            second.receive()


def test_a_new_link_reports_its_properties_and_all_read_of_a_closed_link_is_none(linked):
    for payloads in Payloads:
        first, second = linked(payloads=payloads)
        assert (first.remark, first.opens, first.reached) == ("", False, frozenset())
        assert first.carries_deltas is (payloads is Payloads.INLINE)
        first.close()
        assert first.all_read() is None
        second.close()


def test_a_payload_without_memory_for_it_is_skipped_and_the_next_message_arrives(linked, monkeypatch):
    first, second = linked(payloads=Payloads.INLINE)

    def refuse(nbytes: int) -> None:
        raise NoRoom(f"no room for {nbytes} bytes")

    monkeypatch.setattr("weightsync.transports.pipe.framing.anonymous", refuse)
    first.send(update(1, 200_000), filled(200_000))
    first.send(ack(2))
    skipped, following = exchange(first, second, 2)

    assert skipped.message == update(1, 200_000)
    assert (skipped.payload, skipped.untaken) == (None, "no room for 200000 bytes")
    assert following.message == ack(2)


def test_a_frame_cut_by_the_end_of_a_read_chunk_is_completed_by_the_next_read(linked):
    first, second = linked()
    messages = [ack(version) for version in range(1, 2001)]
    stream = b"".join(map(frame, messages))
    received = []
    for start in range(0, len(stream), 100_000):
        os.write(first._channel.connection.fileno(), stream[start : start + 100_000])
        received += second.receive()

    assert [r.message for r in received] == messages


def test_a_frame_split_anywhere_in_its_header_is_read_whole(linked):
    first, second = linked()
    whole = frame(update(1, 70_000), b"x" * 70_000)
    long = struct.pack("!iQ", -1, len(whole) - 4) + whole[4:]
    for stream in (whole, long):
        for cut in range(1, 160):
            os.write(first._channel.connection.fileno(), stream[:cut])
            assert second.receive() == []
            os.write(first._channel.connection.fileno(), stream[cut:])

            assert [bytes(r.payload) for r in second.receive()] == [b"x" * 70_000]


@pytest.mark.parametrize("beginning", [1, 3, 20, 60])
def test_a_partial_header_at_the_end_of_a_read_chunk_is_kept(linked, beginning):
    first, second = linked()
    users = b"u" * (64 * 1024 - 4 - beginning)
    stream = struct.pack("!i", len(users)) + users + frame(ack(1)) + frame(ack(2))
    os.write(first._channel.connection.fileno(), stream)

    assert [r.message for r in second.receive()] == [ack(1), ack(2)]
    assert second.user.recv_bytes() == users


@pytest.mark.parametrize("nbytes", [3, 70_000])
def test_a_frame_whose_size_contradicts_its_header_is_reported_with_its_bytes(linked, nbytes):
    first, second = linked()
    content = frame(ack(2), b"x" * nbytes)[4:]
    os.write(first._channel.connection.fileno(), struct.pack("!i", len(content)) + content)

    said = f"A frame of {len(content) - len(PREAMBLE)} bytes has a header with another size"
    with pytest.raises(ProtocolError, match=said) as caught:
        second.receive()
    assert bytes(caught.value.unread[:20]) == content[len(PREAMBLE) :][:20]


def test_a_frame_without_its_descriptor_is_reported_with_its_bytes(linked):
    first, second = linked()
    content = PREAMBLE + codec.encode(SLOTTED, 1)
    os.write(first._channel.connection.fileno(), struct.pack("!i", len(content)) + content)

    with pytest.raises(ProtocolError, match="A frame arrived without its 1 descriptors") as caught:
        second.receive()
    assert bytes(caught.value.unread[:20]) == content[len(PREAMBLE) :][:20]


def test_a_remark_is_kept_until_the_next_message_arrives(linked):
    first, second = linked()
    first.send(Refusal(model_id="policy", incarnation=0, version=0, kind=RefusalKind.REFUSED, reason="another key"))

    assert (second.receive(), second.remark) == ([], "another key")

    first.send(Refusal(model_id="policy", incarnation=0, version=0, kind=RefusalKind.REFUSED, reason="another key"))
    first.send(ack(3))
    assert [r.message for r in second.receive()] == [ack(3)]
    assert second.remark == ""


def test_a_control_frame_is_encoded_once_for_all_links_with_the_same_slot():
    updates, message, segment = _FramedUpdates(), update(1, 3), Segment(8)
    inline, named = updates.control(message), updates.control(message, segment)

    assert codec.decode(inline[len(PREAMBLE) :]) == message
    assert codec.decode(named[len(PREAMBLE) :]) == replace(message, slot=segment.ref)
    assert updates.control(message, segment) is named
    for others in ((message, segment, 1), (message, Segment(8)), (update(1, 3), segment)):
        assert updates.control(*others) is not named
        assert updates.control(message, segment) == named


def test_a_frame_has_a_4_byte_length_where_it_fits_and_no_empty_piece():
    assert OutgoingFrame(b"x", memoryview(b"")).pieces == [struct.pack("!i", 1) + b"x"]
    memory = mmap.mmap(-1, 2**31)  # no page is ever touched
    outgoing = OutgoingFrame(b"x", memoryview(memory))

    assert outgoing.pieces[0] == struct.pack("!iQ", -1, 2**31 + 1) + b"x"
    outgoing.end()


def test_an_outflow_begins_idle():
    with socket.socket() as sock:
        assert Outflow(sock).idle


def test_withdraw_closes_a_link_and_leaves_its_connection_to_the_next_link() -> None:
    ours, theirs = multiprocessing.Pipe()
    first, worker = PipeLink(ours, "policy"), PipeLink(theirs, "policy")
    first.withdraw()
    assert (first.wants_write(), first.all_read()) == (None, None)
    with pytest.raises(TransportError, match="is closed"):
        first.send(ack(1))

    again = PipeLink(ours, "policy")
    again.send(ack(2))
    assert [each.message for each in worker.receive()] == [ack(2)]
    for link in (first, again, worker):
        link.close()


def test_a_refusal_of_a_version_is_reported_to_the_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = multiprocessing.Pipe()
    trainer, worker = PipeLink(ours, "policy"), PipeLink(theirs, "policy")
    answered: list[object] = []
    monkeypatch.setattr(trainer._pins, "answered", answered.append)
    refusal = Refusal(model_id="policy", incarnation=1, version=1, kind=RefusalKind.REFUSED, reason="no")
    worker.send(refusal)

    assert [each.message for each in trainer.receive()] == [refusal]
    assert answered == [refusal]
    trainer.close()
    worker.close()
