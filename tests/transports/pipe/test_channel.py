"""Several models and user messages over one connection."""

from __future__ import annotations

import gc
import multiprocessing
import os
import struct
import threading
import time

import pytest
from fleet import descriptors_of

from weightsync.errors import ConfigurationError, ProtocolError, TransportError
from weightsync.protocol._tables import RefusalKind
from weightsync.protocol.messages import Ack, Bye, Hello, Message, Refusal, Update
from weightsync.transports.base import Payloads, Waker, wait
from weightsync.transports.buffers import Buffer, Storage
from weightsync.transports.pipe import mailbox
from weightsync.transports.pipe.connection import Channel
from weightsync.transports.pipe.framing import PREAMBLE, Outflow
from weightsync.transports.pipe.link import PipeLink
from weightsync.transports.pipe.mailbox import MAX_UNCLAIMED
from weightsync.transports.pipe.user_messages import UserMessages


def ack(version: int, model_id: str = "policy") -> Ack:
    return Ack(model_id=model_id, incarnation=1, version=version)


def hello(version: int, model_id: str = "policy", fence: int = 0) -> Hello:
    return Hello(model_id=model_id, incarnation=1, version=version, fence=fence)


def versions(link: PipeLink) -> list[int]:
    return [received.message.version for received in link.receive()]


@pytest.fixture
def ends():
    pair = multiprocessing.Pipe()
    yield pair
    for end in pair:
        end.close()


def test_a_link_created_while_the_old_channel_is_freed_gets_a_new_channel(ends, monkeypatch):
    """Another thread may create the link while the unused channel is freed, which takes several steps."""
    made, clear = [], Outflow.clear

    def cleared(outlet: Outflow) -> None:
        if not made:
            made.append(PipeLink(ends[0], "policy"))
        clear(outlet)

    channel = Channel.of(ends[0])
    monkeypatch.setattr(Outflow, "clear", cleared)
    del channel
    monkeypatch.undo()

    made[0].send(ack(1))
    made[0].flush()
    assert versions(PipeLink(ends[1], "policy")) == [1]


# --------------------------------------------------------------------------------------- several models


def test_each_link_receives_the_messages_of_its_own_model_whichever_link_reads(linked, ends):
    actor, critic = linked("actor", ends), linked("critic", ends)
    for version in range(1, 4):
        actor[0].send(ack(version, "actor"))
        critic[0].send(ack(version + 10, "critic"))

    assert versions(actor[1]) == [1, 2, 3]
    assert versions(critic[1]) == [11, 12, 13]


def test_a_link_is_woken_when_another_link_has_read_its_frame(linked, ends):
    actor, critic = linked("actor", ends), linked("critic", ends)
    waker, ready = Waker(), []
    waiter = threading.Thread(target=lambda: ready.extend(wait(waker, [critic[1]], 10.0)))
    critic[0].send(ack(1, "critic"))
    assert versions(actor[1]) == []
    waiter.start()
    waiter.join()

    assert [critic[1]] == ready
    assert versions(critic[1]) == [1]
    assert wait(waker, [critic[1]], 0.0) == []


def test_g10_every_link_is_woken_when_one_reads_a_frame_that_ends_the_connection(linked, ends):
    actor, critic = linked("actor", ends), linked("critic", ends)
    os.write(ends[0].fileno(), struct.pack("!i", -2))
    with pytest.raises(ProtocolError):
        actor[1].receive()

    assert wait(Waker(), [critic[1]], 0.0) == [critic[1]]
    with pytest.raises(ProtocolError):
        critic[1].receive()


def test_two_threads_can_wait_for_two_models_over_one_connection(linked, ends):
    pairs = {name: linked(name, ends) for name in ("actor", "critic")}
    heard = {name: [] for name in pairs}

    def listen(name: str) -> None:
        waker = Waker()
        while len(heard[name]) < 200:
            assert wait(waker, [pairs[name][1]], 10.0)
            heard[name] += versions(pairs[name][1])

    threads = [threading.Thread(target=listen, args=(name,)) for name in pairs]
    for thread in threads:
        thread.start()
    for version in range(1, 201):
        for name, (first, _) in pairs.items():
            first.send(ack(version, name))
            while not first.flush():
                time.sleep(0.001)
    for thread in threads:
        thread.join()

    assert {name: list(range(1, 201)) for name in pairs} == heard


def test_the_connection_closes_with_its_last_link(linked, ends):
    actor, critic = linked("actor", ends), linked("critic", ends)
    actor[0].close()
    assert not ends[0].closed
    critic[0].send(ack(1, "critic"))
    assert versions(critic[1]) == [1]
    critic[0].close()

    assert ends[0].closed
    for link in (actor[1], critic[1]):
        with pytest.raises(TransportError, match="closed by the other end"):
            link.receive()


def test_a_closed_link_raises_on_use_even_if_another_keeps_the_connection_open(linked, ends):
    actor, _ = linked("actor", ends), linked("critic", ends)
    actor[0].close()

    for use in (actor[0].receive, actor[0].flush, lambda: actor[0].send(ack(1, "actor"))):
        with pytest.raises(TransportError, match="closed"):
            use()


def test_an_unfinished_frame_of_a_closed_link_is_completed_for_the_other_links(linked, ends):
    actor = linked("actor", ends, payloads=Payloads.INLINE)
    critic = linked("critic", ends)
    buffer = Buffer(2**20)
    update = Update(model_id="actor", incarnation=1, version=1, layout_digest=b"", nbytes=2**20)
    actor[0].send(update, buffer)
    critic[0].send(ack(2, "critic"))
    actor[0].close()
    assert buffer.pinned
    received = []
    while not received:
        critic[0].flush()
        received = versions(critic[1])

    assert received == [2]
    assert versions(actor[1]) == [1]
    assert not buffer.pinned


def test_frames_for_a_model_not_yet_registered_are_kept_for_it(linked, ends):
    actor = PipeLink(ends[0], "actor"), PipeLink(ends[1], "actor")
    late = PipeLink(ends[0], "late")
    buffer = Buffer(100_000, Storage.SEGMENTS)
    buffer.view[:5] = b"hello"
    late.send(ack(1, "late"))
    late.send(Update(model_id="late", incarnation=1, version=2, layout_digest=b"", nbytes=100_000), buffer)
    assert versions(actor[1]) == []
    other = PipeLink(ends[1], "late")

    assert [other] == wait(Waker(), [other], 1.0)
    _, received = other.receive()
    assert received.payload[:5] == b"hello"
    for link in (*actor, late, other):
        link.close()


def test_unclaimed_messages_are_bounded_and_the_error_names_their_model(linked, ends):
    first, second = linked("policy", ends)
    nobody = PipeLink(ends[0], "nobody")
    for version in range(1, MAX_UNCLAIMED + 2):
        nobody.send(ack(version, "nobody"))
    with pytest.raises(ProtocolError, match=f"{MAX_UNCLAIMED} messages .*'nobody'"):
        second.receive()
    nobody.close()
    first.close()


@pytest.mark.parametrize("bound", [{"MAX_UNCLAIMED": 3}, {"MAX_KEPT_NBYTES": 2000}], ids=["count", "bytes"])
def test_unclaimed_messages_are_bounded_by_count_and_by_bytes(linked, ends, monkeypatch, bound):
    for name, value in bound.items():
        monkeypatch.setattr(mailbox, name, value)
    _, second = linked("policy", ends)
    nobody = PipeLink(ends[0], "nobody")
    buffer = Buffer(1000)
    for version in range(1, 5):
        nobody.send(Update(model_id="nobody", incarnation=1, version=version, layout_digest=b"", nbytes=1000), buffer)

    with pytest.raises(ProtocolError, match="another arrived"):
        second.receive()
    nobody.close()


@pytest.mark.parametrize("bound", [{"MAX_USER_MESSAGES": 3}, {"MAX_KEPT_NBYTES": 3000}], ids=["count", "bytes"])
def test_unread_user_messages_are_bounded_and_the_kept_ones_remain_readable(linked, ends, monkeypatch, bound):
    for name, value in bound.items():
        monkeypatch.setattr(mailbox, name, value)
    first, second = linked("policy", ends)
    for number in range(6):  # three are kept and read, which makes room for three more
        first.user.send_bytes(bytes([number]) * 1000)
        if number == 2:
            assert second.receive() == []
            assert [second.user.recv_bytes()[0] for _ in range(3)] == [0, 1, 2]
    assert second.receive() == []
    first.user.send_bytes(b"one too many")

    with pytest.raises(TransportError, match=r"3 messages of your own \(3000 bytes\) are unread.*pipe"):
        second.receive()
    assert [second.user.recv_bytes()[0] for _ in range(3)] == [3, 4, 5]
    with pytest.raises(EOFError):
        second.user.recv_bytes()


def test_frames_for_a_model_whose_link_was_closed_are_dropped(linked, ends):
    actor, critic = linked("actor", ends), linked("critic", ends)
    critic[1].close()
    buffer = Buffer(100_000, Storage.SEGMENTS)
    for version in range(1, MAX_UNCLAIMED + 2):
        update = Update(model_id="critic", incarnation=1, version=version, layout_digest=b"", nbytes=100_000)
        critic[0].send(update, buffer)
        assert versions(actor[1]) == []
    again = PipeLink(ends[1], "critic")
    critic[0].send(hello(6, "critic"))
    critic[0].send(ack(7, "critic"))

    assert versions(again) == [6, 7]
    again.close()


@pytest.mark.parametrize(
    "begins",
    [
        Hello(model_id="critic", incarnation=2),
        Hello(model_id="critic", incarnation=1, version=4, fence=1),
        Refusal(model_id="critic", incarnation=1, version=0, kind=RefusalKind.FENCED),
        Bye(model_id="critic", incarnation=0),
    ],
    ids=["a handshake", "its answer", "its refusal", "an end before its answer"],
)
def test_a_new_link_does_not_receive_messages_in_flight_to_the_old_link(linked, ends, begins: Message):
    actor, critic = linked("actor", ends), linked("critic", ends)
    buffer = Buffer(100_000, Storage.SEGMENTS)
    critic[0].send(Update(model_id="critic", incarnation=1, version=1, layout_digest=b"", nbytes=100_000), buffer)
    critic[0].send(ack(2, "critic"))
    critic[0].send(Refusal(model_id="critic", incarnation=1, version=3, kind=RefusalKind.REFUSED))
    critic[0].send(Bye(model_id="critic", incarnation=1))
    critic[1].close()
    again = PipeLink(ends[1], "critic")
    assert (again.receive(), versions(actor[1])) == ([], [])
    critic[0].send(ack(4, "critic"))
    critic[0].send(begins)
    critic[0].send(ack(5, "critic"))

    heard = [received.message for received in (*again.receive(), *again.receive())]
    again.close()
    assert heard == [begins, ack(5, "critic")]


@pytest.mark.parametrize("read", [True, False], ids=["after its goodbye", "unread"])
def test_messages_after_a_goodbye_go_to_the_next_link_of_the_model(linked, ends, read: bool):
    actor, critic = linked("actor", ends), linked("critic", ends)
    buffer = Buffer(100_000, Storage.SEGMENTS)
    update = Update(model_id="critic", incarnation=1, version=4, layout_digest=b"", nbytes=100_000)
    for message in (hello(1, "critic"), ack(2, "critic"), Bye(model_id="critic", incarnation=1), hello(3, "critic")):
        critic[0].send(message)
    critic[0].send(update, buffer)
    assert versions(actor[1]) == []
    if read:
        *_, last = critic[1].receive()
        assert isinstance(last.message, Bye)
    critic[1].close()
    assert Channel.of(ends[1]).unclaimed() == ("critic",)
    again = PipeLink(ends[1], "critic")

    assert versions(again) == [3, 4]
    assert versions(actor[1]) == []
    again.close()


def test_a_link_kept_open_after_a_goodbye_receives_the_messages_after_it(linked):
    first, second = linked()
    first.send(Bye(model_id="policy", incarnation=1))
    first.send(hello(2))
    first.close()

    assert len(second.receive()) == 1
    assert wait(Waker(), [second], 0.0) == [second]
    assert versions(second) == [2]
    with pytest.raises(TransportError):
        second.receive()


def test_a_handshake_unread_by_a_closed_link_is_dropped(linked, ends):
    actor, critic = linked("actor", ends), linked("critic", ends)
    critic[0].send(hello(1, "critic"))
    assert versions(actor[1]) == []
    critic[1].close()
    again = PipeLink(ends[1], "critic")

    assert (again.receive(), Channel.of(ends[1]).unclaimed()) == ([], ())
    again.close()


def test_a_handshake_answer_to_a_closed_link_is_not_kept_for_a_later_link(linked, ends):
    actor, critic = linked("actor", ends), linked("critic", ends)
    critic[1].close()
    critic[0].send(hello(1, "critic", fence=1))
    critic[0].send(ack(2, "critic"))
    assert versions(actor[1]) == []
    again = PipeLink(ends[1], "critic")

    assert (again.receive(), Channel.of(ends[1]).unclaimed()) == ([], ())
    again.close()


def test_a_segment_for_a_model_without_a_link_is_closed_with_the_connection(linked, ends):
    actor, buffer = linked("actor", ends), Buffer(100_000, Storage.SEGMENTS)
    nobody, inode = PipeLink(ends[0], "nobody"), os.fstat(buffer.segment.fd).st_ino
    nobody.send(Update(model_id="nobody", incarnation=1, version=1, layout_digest=b"", nbytes=100_000), buffer)
    nobody.close()

    held = [len(descriptors_of(inode))]
    assert versions(actor[1]) == []
    held.append(len(descriptors_of(inode)))
    actor[1].close()
    held.append(len(descriptors_of(inode)))
    assert held == [held[0], held[0] + 1, held[0]]


def test_dropping_an_unclosed_link_leaves_the_connection_open(ends):
    """The fixture `no_descriptor_is_left` checks that the link's own descriptors are closed."""
    link = PipeLink(ends[0], "policy")
    link.send(ack(1))
    del link

    assert not ends[0].closed
    again, other = PipeLink(ends[0], "policy"), PipeLink(ends[1], "policy")
    again.send(ack(2))
    assert versions(other) == [1, 2]
    again.close()
    other.close()


# ------------------------------------------------------------------------------------------- user messages


def test_user_messages_are_received_in_order_and_unchanged(linked, ends):
    first, second = linked("policy", ends)
    objects = [{"a": 1}, b"bytes", "x" * 20_000, list(range(10_000)), None]
    for version, value in enumerate(objects, 1):
        first.user.send(value)
        first.send(ack(version))
    first.user.send_bytes(b"raw")

    assert versions(second) == [1, 2, 3, 4, 5]
    assert objects == [second.user.recv() for _ in objects]
    assert second.user.recv_bytes() == b"raw"
    assert not second.user.poll()


@pytest.mark.parametrize("size", [0, 1, 16_384, 16_385, 150_000])
def test_user_messages_are_compatible_with_a_plain_connection(ends, size):
    link = PipeLink(ends[0], "policy")
    plain = ends[1]
    link.user.send_bytes(b"u" * size)
    assert b"u" * size == plain.recv_bytes()
    link.user.send({"size": size})
    assert {"size": size} == plain.recv()
    plain.send(["object", size])
    plain.send_bytes(b"p" * size)

    assert link.user.poll(1.0)
    assert ["object", size] == link.user.recv()
    assert b"p" * size == link.user.recv_bytes()
    link.close()


def test_user_messages_that_begin_like_weightsyncs_own_are_refused_on_send(linked, ends):
    first, second = linked("policy", ends)
    for ours in (b"WSYN and more", PREAMBLE):
        with pytest.raises(ConfigurationError, match="weightsync's own"):
            first.user.send_bytes(ours)

    assert not second.user.poll()


def test_recv_on_the_raw_pipe_raises_with_advice_to_use_receiver_pipe(linked, ends):
    first, _ = linked("policy", ends)
    first.send(ack(1))
    with pytest.raises(ConfigurationError, match=r"receiver\.pipe\.recv\(\)"):
        ends[1].recv()


def test_poll_waits_up_to_its_timeout(linked, ends):
    first, second = linked("policy", ends)
    begun = time.monotonic()
    assert not second.user.poll(0.05)
    assert time.monotonic() - begun >= 0.045
    threading.Timer(0.05, lambda: first.user.send("late")).start()

    assert second.user.poll(10.0)
    assert second.user.recv() == "late"


def test_link_messages_do_not_end_a_poll_for_user_messages(linked, ends):
    first, second = linked("policy", ends)
    sending = threading.Timer(0.02, lambda: first.send(ack(1)))
    sending.start()

    assert not second.user.poll(0.1)
    sending.join()
    assert versions(second) == [1]


def test_a_waiting_recv_is_woken_when_a_link_reads_the_user_message(linked, ends):
    first, second = linked("policy", ends)
    heard = []
    listener = threading.Thread(target=lambda: heard.append(second.user.recv()))
    listener.start()
    deadline = time.monotonic() + 10
    first.user.send("mine")
    while listener.is_alive() and time.monotonic() < deadline:
        second.receive()
    listener.join()

    assert heard == ["mine"]


def test_sending_a_large_user_message_blocks_until_it_is_written(linked, ends):
    first, second = linked("policy", ends)
    big = os.urandom(3 * 2**20)
    sender = threading.Thread(target=lambda: first.user.send_bytes(big))
    sender.start()
    sender.join(0.05)
    assert sender.is_alive()
    first.send(ack(1))

    assert big == second.user.recv_bytes()
    sender.join()
    while not (heard := versions(second)):
        first.flush()
    assert heard == [1]


def test_user_recv_raises_eof_error_at_the_end_of_the_connection(linked, ends):
    first, second = linked("policy", ends)
    first.user.send("last")
    first.close()

    assert second.user.poll()
    assert second.user.recv() == "last"
    assert second.user.poll()
    with pytest.raises(EOFError):
        second.user.recv()
    with pytest.raises(TransportError):
        second.user.send("nobody")


def test_unread_user_messages_survive_the_last_link(linked, ends):
    first, second = linked("policy", ends)
    user = second.user
    first.user.send("kept")
    second.receive()
    second.close()

    assert user.recv() == "kept"
    with pytest.raises(EOFError):
        user.recv()


def test_user_messages_are_readable_from_the_connection_after_its_last_link_is_gone(ends):
    first, second = PipeLink(ends[0], "policy"), PipeLink(ends[1], "policy")
    first.user.send("stop")
    first.send(ack(1))
    assert versions(second) == [1]
    for link in (first, second):
        link.close()
    del first, second, link
    gc.collect()

    assert UserMessages(Channel.of(ends[1])).recv() == "stop"
    with pytest.raises(EOFError):
        UserMessages(Channel.of(ends[1])).recv()


def test_user_messages_need_no_link(ends):
    user = UserMessages(Channel.of(ends[0]))
    ends[1].send("before")
    assert user.recv() == "before"
    link = PipeLink(ends[0], "policy")
    ends[1].send("after")

    assert link.user.recv() == "after"
    link.close()


def test_a_goodbye_is_delivered_before_the_connection_closes(linked, ends):
    first, second = linked("policy", ends)
    first.send(Bye(model_id="policy", incarnation=1, reason="done"))
    first.close()

    assert second.receive()[0].message.reason == "done"


def test_a_segment_stays_open_until_its_frame_is_written_even_if_its_link_is_closed(linked, ends):
    first, second = linked("actor", ends, payloads=Payloads.INLINE), linked("critic", ends)
    big, buffer = Buffer(2**20), Buffer(100_000, Storage.SEGMENTS)
    buffer.view[:5] = b"hello"
    first[0].send(Update(model_id="actor", incarnation=1, version=1, layout_digest=b"", nbytes=2**20), big)
    second[0].send(Update(model_id="critic", incarnation=1, version=1, layout_digest=b"", nbytes=100_000), buffer)
    second[0].close()
    del buffer
    received = []
    while not received:
        first[0].flush()
        assert first[1].waitables()
        first[1].receive()
        received = second[1].receive()

    assert b"hello" == received[0].payload[:5]


def test_sending_a_user_message_raises_if_another_thread_closes_the_link_meanwhile(
    linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, _), shipped = linked(), Channel.write

    def write_until_closed(*asked: object) -> bool:
        monkeypatch.undo()
        written = shipped(*asked)
        first.close()
        return written

    monkeypatch.setattr(Channel, "write", write_until_closed)

    with pytest.raises(TransportError, match="is closed"):
        first.user.send_bytes(bytes(2**22))
