"""Messages that a `StoreLink` has queued when it is closed are sent in order, or dropped with all later ones."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any
from weakref import ref

import pytest
import torch.distributed as dist
from store_fleet import reach
from torch import nn

from weightsync import DistributedWeightSyncScheme, TransportError
from weightsync.clock import Deadline
from weightsync.protocol.messages import Ack, Bye, Hello, Update
from weightsync.transports.base import Link, Waker, wait
from weightsync.transports.buffers import Buffer
from weightsync.transports.store import blocking_threads, heartbeat, link_threads
from weightsync.transports.store.announcing import WorkerLocation, _Announcement, announced_key, base_key
from weightsync.transports.store.blocking_threads import _running
from weightsync.transports.store.link import StoreLink
from weightsync.transports.store.link_threads import LinkThreads
from weightsync.transports.store.listener import PlaceholderLink, _Listener, _listeners
from weightsync.transports.store.mailbox import Outbox
from weightsync.transports.store.store import Client, base_of
from weightsync.transports.store.stream import Stream

#: Seconds. Only a failing test waits this long.
PATIENCE = 60.0
STORE_TIMEOUT = timedelta(seconds=PATIENCE)
INLINE, GROUPED = 1000, 200_000


class Ends:
    """Both ends of a link: the sender's, and the receiver's once it is accepted."""

    def __init__(self, store: Any) -> None:
        self.store = store
        scheme = DistributedWeightSyncScheme()
        self.sender: Link = scheme.create_link((store, 1), "policy", "the worker")
        self.accepted: list[Link] = []
        self.stop = scheme.listen((store, 1), "policy", self.accepted.append)
        self.buffers: list[Buffer] = []
        self.sender.send(Hello(model_id="policy", incarnation=5))
        waited = Deadline(PATIENCE)
        while not self.accepted and not waited.passed:
            wait(Waker(), [], 0.001)

    def update(self, version: int, nbytes: int) -> None:
        buffer = Buffer(nbytes)
        self.buffers.append(buffer)
        self.sender.send(
            Update(model_id="policy", incarnation=5, version=version, layout_digest=b"l" * 16, nbytes=nbytes), buffer
        )

    def bye_and_close(self) -> None:
        self.sender.send(Bye(model_id="policy", incarnation=5, reason="done"))
        self.sender.close()

    def heard(self) -> list[str | int]:
        return _heard(self.accepted[0])


def _heard(link: Link) -> list[str | int]:
    """The messages that arrive at the receiver's end of a link until its end is reported."""
    found: list[str | int] = []
    waited = Deadline(PATIENCE)
    while not waited.passed:
        wait(Waker(), [link], 0.5)
        try:
            arrived = [received.message for received in link.receive()]
        except TransportError:
            return found
        found += [each.version if isinstance(each, Update) else type(each).__name__ for each in arrived]
    return [*found, "and the end was never reported"]


@pytest.fixture
def ends(store: Any) -> Iterator[Ends]:
    made = Ends(store)
    yield made
    made.stop()
    for link in (*([made.sender] if "sender" in vars(made) else []), *made.accepted):
        link.close()


def test_inline_payloads_queued_at_close_are_sent_before_the_goodbye(ends: Ends) -> None:
    for version in range(1, 9):
        ends.update(version, INLINE)
    ends.bye_and_close()

    assert not any(buffer.pinned for buffer in ends.buffers[1:])
    assert ends.heard() == ["Hello", *range(1, 9), "Bye"]


def test_a_written_payload_is_released_even_if_nothing_is_written_after_it(ends: Ends) -> None:
    """A payload would keep alive its sender, even one that was dropped, and the sender's shared memory."""
    ends.update(1, GROUPED)
    arrived, waited = [], Deadline(PATIENCE)
    while not any(isinstance(each, Update) for each in arrived) and not waited.passed:
        wait(Waker(), [ends.accepted[0]], 0.5)
        arrived += [received.message for received in ends.accepted[0].receive()]
    assert isinstance(arrived[-1], Update)
    payload = ref(ends.buffers.pop())
    while payload() is not None and not waited.passed:
        gc.collect()

    assert payload() is None


def test_a_garbage_collected_link_ends_and_its_peer_sees_the_end(ends: Ends) -> None:
    threads = ends.sender._threads
    del ends.sender
    gc.collect()

    assert ends.heard() == ["Hello"]
    assert threads._read_all.wait(PATIENCE)


def test_a_sender_garbage_collected_while_its_update_waits_for_an_absent_worker_ends_its_link(store: Any) -> None:
    """The queue of the link's thread holds the update, whose pinned payload used to refer to the sender."""
    scheme = DistributedWeightSyncScheme()
    scheme.init_on_sender("policy", store=store, num_workers=1, model=nn.Linear(4, 4))
    scheme.get_sender().send_async()
    link = ref(scheme.get_sender().transports()[0])
    threads = link()._threads  # type: ignore[union-attr]
    del scheme
    gc.collect()

    assert threads._read_all.wait(PATIENCE)
    assert link() is None


def test_a_garbage_collected_receiver_stops_listening_and_another_can_take_its_place(store: Any) -> None:
    scheme, before = DistributedWeightSyncScheme(), _listeners_running()
    scheme.init_on_worker("policy", store=store, rank=1, model=nn.Linear(4, 4))
    receiver, (listener,) = ref(scheme.get_receiver()), _listeners_running() - before
    del scheme
    gc.collect()
    waited = Deadline(PATIENCE)
    while not listener._over.is_set() and not waited.passed:
        wait(Waker(), [], 0.01)
    assert receiver() is None

    another = DistributedWeightSyncScheme()
    another.init_on_worker("policy", store=store, rank=1, model=nn.Linear(4, 4))
    another.close()


def test_a_receiver_that_registers_at_another_store_releases_the_store_that_was_lost(store: Any) -> None:
    """A worker may outlive many trainers, each with another store, so descriptors of former stores must not pile up."""
    earlier = dist.TCPStore("127.0.0.1", 0, None, True, STORE_TIMEOUT, wait_for_workers=False)
    with DistributedWeightSyncScheme() as scheme:
        scheme.init_on_worker("policy", store=store, rank=1, model=nn.Linear(4, 4))
        before = _listeners_running()
        scheme.get_receiver().register_worker_transport((earlier, 1))
        (listener,), held = _listeners_running() - before, ref(earlier)
        waited = Deadline(PATIENCE)
        while listener._client is None and not waited.passed:
            wait(Waker(), [], 0.001)
        listener.cut()
        while listener in _listeners_running() and not waited.passed:
            wait(Waker(), [], 0.001)
        with contextlib.suppress(TransportError):
            scheme.get_receiver().receive(timeout=0)  # raises the loss of the former store
        scheme.get_receiver().register_worker_transport((store, 1))
        del listener, earlier
        while held() is not None and not waited.passed:
            gc.collect()
            wait(Waker(), [], 0.01)

        assert held() is None


def _listeners_running() -> set[_Listener]:
    return {owner for owner in _running._owners_by_thread().values() if isinstance(owner, _Listener)}


def test_no_message_is_sent_after_a_payload_that_close_dropped(ends: Ends) -> None:
    for version in range(1, 5):
        ends.update(version, GROUPED if version == 3 else INLINE)
    ends.bye_and_close()
    found = ends.heard()

    assert found in (["Hello", 1, 2], ["Hello", *range(1, 5), "Bye"])


def test_a_receiver_that_waits_for_a_payload_sees_the_end_of_a_closed_link(ends: Ends) -> None:
    """The receiver has read the announcement of the payload, and must not wait for it forever."""
    ends.update(1, GROUPED)
    ends.bye_and_close()

    assert ends.heard() in (["Hello"], ["Hello", 1], ["Hello", 1, "Bye"])


def test_a_written_payload_that_is_not_yet_recorded_as_written_is_not_dropped_at_close(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's answer may come before that, and the trainer may close at once."""
    post, arrived, closed = LinkThreads._write_message, threading.Event(), threading.Event()

    def noted_late(worker: LinkThreads, queued: Any, client: Any) -> None:
        post(worker, queued, client)
        if queued.needs_peer:
            arrived.set()
            assert closed.wait(PATIENCE)

    monkeypatch.setattr(LinkThreads, "_write_message", noted_late)
    ends.update(1, GROUPED)
    assert arrived.wait(PATIENCE)
    ends.bye_and_close()
    closed.set()

    assert ends.heard() == ["Hello", 1, "Bye"]


def test_close_drops_a_payload_that_the_peer_does_not_read(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, begun, goes_on = ends.sender._threads, threading.Event(), threading.Event()  # type: ignore[attr-defined]
    read = Stream.read_into

    def read_late(stream: Stream, room: memoryview) -> None:
        begun.set()
        assert goes_on.wait(PATIENCE)
        read(stream, room)

    monkeypatch.setattr(Stream, "read_into", read_late)
    ends.update(1, 64 * 2**20)
    assert begun.wait(PATIENCE)
    ends.bye_and_close()
    waited = Deadline(PATIENCE)
    while worker._users and not waited.passed:
        os.sched_yield()
    goes_on.set()

    assert not worker._users
    assert not ends.buffers[0].pinned
    assert ends.heard() == ["Hello"]


def test_an_unresponsive_store_does_not_stop_the_goodbye_of_a_process_that_ends(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's only thread may stall for seconds while the link writes TorchRL's key for an update."""
    worker, asked, cut = ends.sender._threads, threading.Event(), threading.Event()  # type: ignore[attr-defined]

    answered = Client.set

    def unanswered(client: Client, key: str, value: bytes) -> None:
        if key.startswith("weightsync/"):
            return answered(client, key, value)
        asked.set()
        assert cut.wait(PATIENCE)
        raise TransportError("the connection to the store was cut")

    monkeypatch.setattr(link_threads, "_LINGER", PATIENCE)
    ends.sender._hints.write_all()  # type: ignore[attr-defined]
    with monkeypatch.context() as stalled:
        stalled.setattr(Client, "set", unanswered)
        stalled.setattr(worker, "_cut_clients", cut.set)
        ends.update(1, GROUPED)
        assert asked.wait(PATIENCE)
        ends.bye_and_close()
        worker.cut()

    assert ends.heard() == ["Hello", 1, "Bye"]


def test_an_unresponsive_store_delays_neither_an_ack_nor_the_goodbye_after_it(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker reads on, up to its trainer's goodbye, while the key for its ack is still being written."""
    answered, asked, over = Client.set, threading.Event(), threading.Event()

    def unanswered(client: Client, key: str, value: bytes) -> None:
        if not key.startswith("weightsync/"):
            asked.set()
            assert over.wait(PATIENCE)
        answered(client, key, value)

    worker = ends.accepted[0]
    worker.receive()
    with monkeypatch.context() as stalled:
        stalled.setattr(Client, "set", unanswered)
        worker.send(Ack(model_id="policy", incarnation=5, version=1, digest=b"d" * 16, seconds=0.0))
        assert asked.wait(PATIENCE)
        assert worker.flush()
        ends.bye_and_close()
        assert ends.heard()[-1:] == ["Bye"]
        assert worker.flush()
        over.set()


def test_an_ack_that_is_not_yet_recorded_as_written_does_not_hide_the_senders_goodbye(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    post, written, noted, link = LinkThreads._write_message, threading.Event(), threading.Event(), ends.accepted[0]
    worker: LinkThreads = link._threads  # type: ignore[attr-defined]

    def noted_late(writing: LinkThreads, *message: Any) -> None:
        post(writing, *message)
        if writing is worker:
            written.set()
            assert noted.wait(PATIENCE)

    link.receive()
    with monkeypatch.context() as late:
        late.setattr(LinkThreads, "_write_message", noted_late)
        link.send(Ack(model_id="policy", incarnation=5, version=1, digest=b"d" * 16, seconds=0.0))
        assert written.wait(PATIENCE)
        ends.bye_and_close()
        waited = Deadline(PATIENCE)
        while worker.failed is None and not waited.passed:
            os.sched_yield()
        assert not link.flush()
        noted.set()
    while not link.flush() and not waited.passed:
        wait(Waker(), [link], 0.5)

    assert ends.heard()[-1:] == ["Bye"]


@pytest.mark.parametrize("goodbye", [True, False])
def test_the_end_of_the_store_is_a_failure_only_without_a_goodbye_of_the_sender(ends: Ends, goodbye: bool) -> None:
    """In many programs the trainer hosts the store, which ends right after the goodbye."""
    (listener,) = _listeners.at(WorkerLocation(ends.store.host, ends.store.port, base_key("policy", 1)))
    if goodbye:
        ends.bye_and_close()
        assert ends.heard() == ["Hello", "Bye"]
    listener.cut()
    waited = Deadline(PATIENCE)
    while listener in _listeners.at(listener.where) and not waited.passed:
        os.sched_yield()

    assert [type(link) for link in ends.accepted] == [StoreLink] + [PlaceholderLink] * (not goodbye)


def test_flush_is_true_only_once_all_is_written_and_the_link_then_wakes_its_waiter(ends: Ends) -> None:
    ends.update(1, 64 * 2**20)
    assert not ends.sender.flush()
    waited = Deadline(PATIENCE)
    while not ends.sender.flush() and not waited.passed:
        assert wait(Waker(), [ends.sender], PATIENCE) == [ends.sender]
        with contextlib.suppress(TransportError):
            ends.sender.receive()

    assert not waited.passed
    assert not ends.buffers[0].pinned
    ends.bye_and_close()
    assert ends.heard() == ["Hello", 1, "Bye"]


def _end_before_anything_is_written(port: int) -> None:
    """Run a trainer that closes its link and ends before its writer thread has run."""
    link_threads._LINGER = blocking_threads._PATIENCE = PATIENCE  # type: ignore[misc] # for busy machines
    runs = threading.Event()
    write = Stream.write

    def write_later(*message: Any) -> None:
        runs.wait(PATIENCE)
        write(*message)

    Stream.write = write_later  # type: ignore[method-assign]
    Finalize(None, runs.set, exitpriority=100)
    sender = DistributedWeightSyncScheme().create_link((reach(port), 1), "policy", "the worker")
    sender.send(Hello(model_id="policy", incarnation=5))
    sender.send(Bye(model_id="policy", incarnation=5, reason="done"))
    sender.close()


def test_a_multiprocessing_child_ends_only_after_its_goodbyes_are_sent(store: Any, forkserver: Any) -> None:
    accepted: list[Link] = []
    stop = DistributedWeightSyncScheme().listen((store, 1), "policy", accepted.append)
    trainer = forkserver.Process(target=_end_before_anything_is_written, args=(store.port,))
    trainer.start()
    waited = Deadline(PATIENCE)
    while not accepted and not waited.passed:
        wait(Waker(), [], 0.001)

    assert _heard(accepted[0]) == ["Hello", "Bye"]
    trainer.join(PATIENCE)
    stop()
    accepted[0].close()


def test_a_listener_ends_although_no_thread_can_be_started_to_wake_it(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python 3.12 on, no thread can be started at interpreter shutdown."""
    stop = DistributedWeightSyncScheme().listen((store, 1), "policy", lambda _: None)
    (listener,) = _listeners.at(WorkerLocation(store.host, store.port, base_key("policy", 1)))
    waited = Deadline(PATIENCE)
    while listener._client is None and not waited.passed:
        wait(Waker(), [], 0.001)

    def starting(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", starting)
        stop()
    while listener in _listeners.at(listener.where) and not waited.passed:
        wait(Waker(), [], 0.001)

    assert not waited.passed


def test_a_link_that_no_worker_took_ends_only_after_its_replacement_is_announced(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that takes both links thus knows the second when it reads the end of the first, and keeps its sender."""
    order: list[str] = []
    ended, announce, shut = threading.Event(), _Announcement.announce, Outbox.shut
    scheme = DistributedWeightSyncScheme()
    first = scheme.create_link((store, 1), "policy", "the worker")
    client = Client(store)
    client.await_value(announced_key(base_key("policy", 1), 0))

    def announce_late(announcement: _Announcement, client: Client) -> None:
        ended.wait(0.3)
        order.append("the second is announced")
        announce(announcement, client)

    def note_end(outbox: Outbox) -> None:
        order.append("the first has ended")
        shut(outbox)
        ended.set()

    monkeypatch.setattr(_Announcement, "announce", announce_late)
    monkeypatch.setattr(Outbox, "shut", note_end)
    second = scheme.create_link((store, 1), "policy", "the worker")
    first.close()

    assert ended.wait(PATIENCE)
    assert order == ["the second is announced", "the first has ended"]
    second.close()
    client.close()


@contextlib.contextmanager
def no_thread(name: str) -> Iterator[list[threading.Thread]]:
    """In the block, no thread of this name can be started. Yields a list of the other threads that start."""
    begun: list[threading.Thread] = []
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        real(thread)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        yield begun


def test_a_heartbeat_ends_if_one_of_its_threads_cannot_be_started(store: Any) -> None:
    said = "The thread for weightsync-heartbeat-watchdog cannot be started"
    with no_thread("weightsync-heartbeat-watchdog") as begun, pytest.raises(TransportError, match=said):
        heartbeat.Heartbeat(base_of(store)).start()

    (beating,) = begun
    beating.join(60.0)
    assert not beating.is_alive()


def test_a_listener_whose_thread_cannot_be_started_leaves_the_heartbeat(store: Any) -> None:
    said = "The thread for weightsync-listener cannot be started"
    with no_thread("weightsync-listener") as begun, pytest.raises(TransportError, match=said):
        DistributedWeightSyncScheme().init_on_worker("policy", store=store, rank=1, model=nn.Linear(4, 4))

    for thread in begun:
        thread.join(PATIENCE)
        assert not thread.is_alive()
