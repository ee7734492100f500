"""The two threads of a link over torch.distributed."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from store_fleet import keys_of

from weightsync import TransportError
from weightsync.protocol import codec
from weightsync.protocol.messages import Ack, Update
from weightsync.transports.base import Waker
from weightsync.transports.buffers import NoRoom
from weightsync.transports.pipe.framing import ReceiveBuffers
from weightsync.transports.store import blocking_threads, heartbeat, link_threads
from weightsync.transports.store.blocking_threads import WriteQueue
from weightsync.transports.store.link_threads import LinkThreads
from weightsync.transports.store.mailbox import INLINE_NBYTES, QueuedMessage, Side
from weightsync.transports.store.seals import NoGuard
from weightsync.transports.store.store import Client, StoreEndpoint
from weightsync.transports.store.stream import Stream

LARGE, SMALL = memoryview(bytes(INLINE_NBYTES + 1)), memoryview(bytes(3))
LINK = "weightsync/link/one"


@pytest.fixture
def create_link(store: Any) -> Iterator[Callable[[int], LinkThreads]]:
    """A function that creates one end of a link: 0 is the sender's, 1 the worker's."""
    with contextlib.ExitStack() as stack:
        waker = Waker()
        stack.callback(waker.close)

        def made(rank: int) -> LinkThreads:
            writes, reads = ("down", "up") if rank == 0 else ("up", "down")
            side = Side(rank, writes, reads, f"end {1 - rank}")
            end = LinkThreads(StoreEndpoint(store, 1), "one", side, NoGuard(side.peer), waker, fanout=None)
            stack.callback(end.close)
            return end

        yield made


def _update(version: int, payload: memoryview | None = None) -> QueuedMessage:
    nbytes = 0 if payload is None else len(payload)
    frame = codec.encode(Update(model_id="m", incarnation=1, version=version, layout_digest=b"", nbytes=nbytes))
    return QueuedMessage(frame, payload, None, lambda: None)


def _ack(version: int) -> QueuedMessage:
    return QueuedMessage(codec.encode(Ack(model_id="m", incarnation=1, version=version)), None, None, lambda: None)


def _until(true: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 30.0
    while not (found := true()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_messages_wait_for_the_peer_and_then_arrive_in_order(create_link: Callable[[int], LinkThreads]) -> None:
    sender = create_link(0)
    for version, payload in ((1, LARGE), (2, None), (3, SMALL)):
        sender.post(_update(version, payload))
    assert not sender.flushed()

    worker, arrived = create_link(1), []

    _until(lambda: arrived.extend(worker.collect()[0]) or len(arrived) == 3)
    assert [each.message.version for each in arrived] == [1, 2, 3]
    assert [each.payload and len(each.payload) for each in arrived] == [len(LARGE), None, len(SMALL)]
    _until(sender.flushed)


def test_a_link_that_is_cut_while_its_reader_connects_to_the_store_leaves_no_thread(
    create_link: Callable[[int], LinkThreads], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link is cut when its process ends, and nothing else would end the reader's wait for the peer."""
    connects, goes_on = threading.Event(), threading.Event()

    class Late(Client):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            if threading.current_thread().name == "weightsync-link-reader":
                connects.set()
                assert goes_on.wait(30.0)

    monkeypatch.setattr(link_threads, "Client", Late)
    before = set(threading.enumerate())
    link = create_link(0)
    assert connects.wait(30.0)
    _until(lambda: link._introduced)
    link.cut()
    link.close()
    started = [each for each in set(threading.enumerate()) - before if each.name.startswith("weightsync-link")]
    for thread in started:
        if thread.name == "weightsync-link-writer":
            thread.join(30.0)
    goes_on.set()

    for thread in started:
        thread.join(30.0)
    assert not any(thread.is_alive() for thread in started)


def test_a_small_message_is_written_by_the_sending_thread_unless_others_are_queued(
    create_link: Callable[[int], LinkThreads], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, worker, arrived = create_link(0), create_link(1), []
    _until(lambda: sender._introduced and sender._stream)
    goes_on, transfer = threading.Event(), LinkThreads._transfer

    def transfers(*given: Any) -> None:
        assert goes_on.wait(30.0)
        transfer(*given)

    monkeypatch.setattr(LinkThreads, "_transfer", transfers)
    sender.post(_update(1, SMALL))
    assert sender.flushed()
    _until(lambda: arrived.extend(worker.collect()[0]) or arrived)
    for version, payload in ((2, LARGE), (3, SMALL)):
        sender.post(_update(version, payload))
    assert not sender.flushed()
    goes_on.set()

    _until(lambda: arrived.extend(worker.collect()[0]) or len(arrived) == 3)
    assert [each.message.version for each in arrived] == [1, 2, 3]


def test_small_messages_beyond_the_socket_buffers_are_queued_in_order_without_blocking(
    create_link: Callable[[int], LinkThreads], monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, read, arrived, done = threading.Event(), Stream.read, [], []

    def read_late(stream: Stream) -> bytearray:
        assert goes_on.wait(30.0)
        return read(stream)

    monkeypatch.setattr(Stream, "read", read_late)
    sender, worker = create_link(0), create_link(1)
    _until(lambda: sender._introduced and sender._stream)
    inline, sent = memoryview(bytes(INLINE_NBYTES)), 0
    while sender.flushed():
        sent += 1
        sender.post(replace(_update(sent, inline), done=lambda: done.append(1)))
    for _ in range(3):
        sent += 1
        sender.post(replace(_update(sent, inline), done=lambda: done.append(1)))
    goes_on.set()

    _until(lambda: arrived.extend(worker.collect()[0]) or len(arrived) == sent)
    assert [each.message.version for each in arrived] == list(range(1, sent + 1))
    _until(sender.flushed)
    assert len(done) == sent


def test_a_buffer_is_released_only_once_its_payload_is_written(
    create_link: Callable[[int], LinkThreads], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, happened = create_link(0), []
    write = sender._group.write

    def writes(*arguments: Any) -> None:
        write(*arguments)
        happened.append("written")

    monkeypatch.setattr(sender._group, "write", writes)
    sender.post(replace(_update(1, LARGE), done=lambda: happened.append("given back")))
    worker = create_link(1)

    _until(lambda: worker.collect()[0])
    _until(lambda: "given back" in happened)
    assert happened == ["written", "given back"]


def test_nothing_is_sent_after_a_truncated_payload(
    create_link: Callable[[int], LinkThreads], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(stream: Stream, piece: memoryview, _: object) -> None:
        stream._socket.sendall(piece[:-1])
        raise TransportError("the connection has ended")

    monkeypatch.setattr(Stream, "_write_piece", cut)
    sender, worker = create_link(0), create_link(1)
    sender.post(_update(1))
    sender.post(_update(2, LARGE))
    sender.post(_update(3))

    _until(lambda: sender.failed and worker.failed)
    assert [each.message.version for each in worker.collect()[0]] == [1]
    assert "the connection has ended" in str(sender.failed)
    with pytest.raises(TransportError, match="has ended"):
        sender.flushed()


def test_a_payload_that_the_worker_has_no_memory_for_is_skipped_and_the_next_arrives(
    create_link: Callable[[int], LinkThreads], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(buffers: ReceiveBuffers, nbytes: int) -> memoryview:
        raise NoRoom(f"No memory for {nbytes} bytes")

    monkeypatch.setattr(ReceiveBuffers, "find", find)
    sender, worker, arrived = create_link(0), create_link(1), []
    sender.post(_update(1, LARGE))
    sender.post(_update(2, SMALL))

    _until(lambda: arrived.extend(worker.collect()[0]) or len(arrived) == 2)
    assert [(each.message.version, each.untaken) for each in arrived] == [
        (1, f"No memory for {len(LARGE)} bytes"),
        (2, ""),
    ]


def test_messages_posted_before_a_close_arrive_even_while_a_payload_is_being_received(
    create_link: Callable[[int], LinkThreads], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is closed with unread bytes drops what was written to it."""
    sender, worker, reading = create_link(0), create_link(1), threading.Event()
    before, go_on = Stream.read_into, threading.Event()

    def read_into(stream: Stream, room: memoryview) -> None:
        reading.set()
        assert go_on.wait(30.0)
        before(stream, room)

    monkeypatch.setattr(Stream, "read_into", read_into)
    sender.post(_update(1, LARGE))
    assert reading.wait(30.0)
    for version in (1, 2):
        worker.post(_ack(version))
    worker.close()
    go_on.set()

    _until(lambda: sender.failed)
    assert [each.message.version for each in sender.collect()[0]] == [1, 2]


def test_a_link_fails_if_its_store_is_lost_while_the_link_joins_the_heartbeat(
    create_link: Callable[[int], LinkThreads], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A heartbeat reports a loss to all links in turn, so a link that raises would keep it from the others."""
    join, told = heartbeat.join, threading.Event()

    def join_late(store: Any, callbacks: heartbeat.Callbacks) -> heartbeat.HeartbeatMember:
        def lose() -> None:
            callbacks.store_lost("silent")
            told.set()

        member = join(store, callbacks)
        losing = threading.Thread(target=lose)
        losing.start()
        losing.join(0.2)
        return member

    monkeypatch.setattr(heartbeat, "join", join_late)
    link = create_link(0)

    assert told.wait(30.0)
    assert "is lost with the store: silent" in str(link.failed)


def test_a_heartbeat_while_links_join_it_does_not_fail_the_links(
    create_link: Callable[[int], LinkThreads], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in the beat would fail the heartbeat, and all links of the process over that store."""
    join, looked = heartbeat.join, threading.Event()

    def join_late(store: Any, callbacks: heartbeat.Callbacks) -> heartbeat.HeartbeatMember:
        def look(*given: Any) -> None:
            try:
                callbacks.beat(*given)
            finally:
                looked.set()

        member = join(store, replace(callbacks, beat=look))
        assert looked.wait(30.0)
        return member

    monkeypatch.setattr(heartbeat, "join", join_late)
    sender, worker = create_link(0), create_link(1)
    worker.post(_ack(1))

    _until(lambda: sender.collect()[0])
    assert (sender.failed, worker.failed) == (None, None)


def test_the_threads_of_a_closed_link_end_although_the_peer_never_connects(
    create_link: Callable[[int], LinkThreads],
) -> None:
    sender = create_link(0)
    sender.post(_update(1))
    sender.close()

    _until(lambda: sender._users == 0)
    assert sender.collect()[0] == []


def test_introductions_are_removed_from_the_store_once_they_are_read(
    store: Any, create_link: Callable[[int], LinkThreads]
) -> None:
    sender, worker = create_link(0), create_link(1)
    worker.post(_ack(1))
    _until(lambda: sender.collect()[0])

    _until(lambda: not any(f"{LINK}/{way}/" in key for way in ("down", "up") for key in keys_of(store)))


def test_messages_queued_at_close_keep_their_bytes_although_their_buffers_are_released() -> None:
    given_back: list[int] = []
    buffers = [bytearray(b"first"), bytearray(b"other")]
    outgoing = WriteQueue()
    for number, buffer in enumerate(buffers):
        outgoing.add(QueuedMessage(b"", memoryview(buffer), None, lambda number=number: given_back.append(number)))
    outgoing.shorten()
    assert given_back == [0, 1]
    for buffer in buffers:
        buffer[:] = b"novel"

    left = [outgoing.take(), outgoing.take()]
    assert [bytes(queued.payload or b"") for queued in left] == [b"first", b"other"]
    for queued in left:
        queued.done()
    assert given_back == [0, 1]


@pytest.mark.parametrize(("named", "left"), [(False, [b"first", b"bye"]), (True, [b"first"])])
def test_close_drops_queued_parts_and_everything_from_the_update_that_names_them(
    named: bool, left: list[bytes]
) -> None:
    given_back: list[bytes] = []
    outgoing = WriteQueue()
    outgoing.add(QueuedMessage(b"first", None))
    for part in (b"part", b"rest"):
        payload = memoryview(bytes(2 * INLINE_NBYTES))
        outgoing.add(QueuedMessage(part, payload, done=partial(given_back.append, part), payload_id=b"1"))
    if named:
        outgoing.add(QueuedMessage(b"update", None, payload_id=b"1"))
    outgoing.add(QueuedMessage(b"bye", None))

    outgoing.shorten()

    assert given_back == [b"part", b"rest"]
    assert [outgoing.take().frame for _ in left] == left
    assert not outgoing
    assert outgoing.cut_short


# ---------------------------------------------------------------------------------------------- connections


class UnprivilegedSocket(socket.socket):
    """A socket of a process that is not permitted to choose a congestion control."""

    def setsockopt(self, level: int, option: int, *value: Any) -> None:
        if (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        super().setsockopt(level, option, *value)


def control(sock: socket.socket) -> bytes:
    """The congestion control of a connection."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@pytest.fixture
def connect() -> Iterator[Callable[..., tuple[socket.socket, socket.socket]]]:
    """A function that connects to 127.0.0.1 from a given address, and returns both sockets."""
    with contextlib.ExitStack() as stack:

        def made(source: str, kind: type[socket.socket] = socket.socket) -> tuple[socket.socket, socket.socket]:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            sock = stack.enter_context(kind(socket.AF_INET, socket.SOCK_STREAM))
            sock.bind((source, 0))
            sock.connect(listener.getsockname())
            return sock, stack.enter_context(listener.accept()[0])

        yield made


def test_both_ends_of_a_connection_within_one_host_use_reno_congestion_control(
    connect: Callable[..., tuple[socket.socket, socket.socket]],
) -> None:
    ends = connect("127.0.0.1")
    for end in ends:
        Stream(end)

    assert [control(end) for end in ends] == [b"reno", b"reno"]


def test_a_connection_between_two_addresses_keeps_the_congestion_control_of_the_system(
    connect: Callable[..., tuple[socket.socket, socket.socket]],
) -> None:
    ends = connect("127.0.0.2")
    before = [control(end) for end in ends]
    for end in ends:
        Stream(end)

    assert [control(end) for end in ends] == before


def test_a_connection_works_where_setting_the_congestion_control_is_not_permitted(
    connect: Callable[..., tuple[socket.socket, socket.socket]],
) -> None:
    writer, reader = (Stream(end) for end in connect("127.0.0.1", UnprivilegedSocket))
    room = bytearray(len(SMALL))

    writer.write(b"a message", SMALL, lambda: None)

    assert reader.read() == b"a message"
    reader.read_into(memoryview(room))
    assert room == SMALL


class OwnerWokenByClose:
    """An owner whose thread waits until a second thread, started by `close`, wakes it, as in listeners."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.woken = False

    def wait(self) -> None:
        self.over.wait()

    def close(self) -> None:
        blocking_threads.start_threads(self, {"waker": self.wake})

    def wake(self) -> None:
        self.over.set()
        time.sleep(0.1)
        self.woken = True

    def cut(self) -> None:
        pass


def test_process_exit_also_waits_for_threads_that_closing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that returns from torch after that would abort the process."""
    monkeypatch.setattr(blocking_threads, "_running", blocking_threads._Running())
    owner = OwnerWokenByClose()
    blocking_threads.start_threads(owner, {"waiter": owner.wait})
    blocking_threads._running.end()
    assert owner.woken


class OwnerFailingToClose(OwnerWokenByClose):
    """An owner that raises when it is closed, and ends when it is cut."""

    def close(self) -> None:
        raise RuntimeError("no close")

    def cut(self) -> None:
        self.over.set()
        raise RuntimeError("no cut")


def test_an_owner_that_fails_at_process_exit_does_not_keep_others_from_ending(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(blocking_threads, "_running", blocking_threads._Running())
    monkeypatch.setattr(blocking_threads, "_PATIENCE", 0.2)
    first, last = OwnerFailingToClose(), OwnerFailingToClose()
    for owner in (first, last):
        blocking_threads.start_threads(owner, {"waiter": owner.wait})
    blocking_threads._running.end()

    assert first.over.is_set()
    assert last.over.is_set()
    failures = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert [str(error) for error in failures] == ["no close", "no close", "no cut", "no cut"]
