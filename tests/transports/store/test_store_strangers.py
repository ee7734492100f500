"""Foreign data in the store, a temporary lack of descriptors, and workers that are added again."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from descriptor_limit import limit_descriptors
from fleet import PATIENCE, constants, small
from store_fleet import StorePair, reach, until

from weightsync import DistributedWeightSyncScheme, TransportError, WeightReceiver, WorkerLostError
from weightsync.engine.listening import Listening
from weightsync.protocol.report import OutcomeKind
from weightsync.transports.store import announcing, blocking_threads, heartbeat, link_threads, listener
from weightsync.transports.store import store as stores
from weightsync.transports.store.group import RendezvousStore
from weightsync.transports.store.mailbox import Ended, Inbox, Outbox, PeerClosed
from weightsync.transports.store.store import DIAL, Client
from weightsync.transports.store.stream import Acceptor, _proves_name, dial

JUNK = [b"", b"junk", b"\xff\xfe\x00", b"Lno frame", b"M" + bytes(9)]
BASE = "weightsync/policy/1"


class WorkerLoop:
    """A worker's loop in a thread, which ends once its sender is lost."""

    def __init__(self, receiver: WeightReceiver) -> None:
        self.receiver = receiver
        self.raised: list[BaseException] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            while not self._over.is_set():
                self.receiver.receive(timeout=0.05)
        except Exception as error:  # noqa: BLE001 - checked by the test
            self.raised.append(error)

    def end(self) -> None:
        self._over.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def serving(receiver: WeightReceiver) -> Iterator[WorkerLoop]:
    loop = WorkerLoop(receiver)
    try:
        yield loop
    finally:
        loop.end()


# ------------------------------------------------------------------------------------ data of strangers


class SegmentedSocket(socket.socket):
    """A socket that receives in segments of three bytes."""

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        return super().recv(min(bufsize, 3), flags)


@pytest.mark.parametrize(("shown", "named"), [("policy/7 ü", True), ("policy/8 ü", False), ("polic", False)])
def test_the_name_of_a_link_is_recognized_even_if_it_arrives_in_segments(shown: str, named: bool) -> None:
    near, far = socket.socketpair()
    with near, SegmentedSocket(fileno=far.detach()) as accepted:
        near.sendall(shown.encode())
        near.shutdown(socket.SHUT_WR)
        assert _proves_name(accepted, "policy/7 ü") is named


@pytest.mark.parametrize("junk", JUNK, ids=repr)
@pytest.mark.parametrize("key", [f"{BASE}/newest", f"{BASE}/announced/0", f"{BASE}/announced/1"])
def test_junk_under_the_keys_of_announcements_is_ignored(store: Any, key: str, junk: bytes) -> None:
    store.set(key, junk)
    pair = StorePair(store)
    try:
        with serving(pair.receiver) as loop:
            assert pair.sender.send(timeout=PATIENCE).ok
            pair.sender.add_worker(0, (store, 1))
            assert pair.sender.send(timeout=PATIENCE).ok
        assert loop.raised == []
    finally:
        pair.close()


class FailingLogHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise OSError("the log is full")


def test_receive_raises_if_a_failing_log_handler_has_ended_the_listening_thread(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "logger", logging.Logger("weightsync"))
    listener.logger.addHandler(FailingLogHandler())
    store.set(f"{BASE}/announced/0", b"junk")
    with DistributedWeightSyncScheme() as scheme:
        scheme.init_on_worker("policy", store=store, rank=1, model=small())
        with pytest.raises(TransportError, match=r"thread failed: OSError\('the log is full'\)"):
            scheme.get_receiver().receive(timeout=PATIENCE)


@pytest.mark.parametrize("junk", JUNK, ids=repr)
@pytest.mark.parametrize("way", ["down", "up"])
def test_junk_under_the_keys_of_introductions_is_ignored(
    store: Any, monkeypatch: pytest.MonkeyPatch, way: str, junk: bytes
) -> None:
    name = "0123456789abcdef" * 2
    monkeypatch.setattr(announcing, "new_name", lambda: name)
    store.set(f"weightsync/link/{name}/{way}/0", junk)
    pair = StorePair(store)
    try:
        assert pair.sync().ok
        assert constants(pair.model) == {1.0}
    finally:
        pair.close()


def test_a_strangers_connection_to_a_worker_is_closed_and_the_sender_gets_its_link() -> None:
    listener = Acceptor("127.0.0.1")
    strangers = [socket.create_connection(("127.0.0.1", int(listener.address.rpartition(":")[2]))) for _ in range(2)]
    strangers[0].sendall(b"f" * len(NAME))
    strangers[1].close()
    sender = dial(listener.address, NAME.decode())
    taken = listener.accept(NAME.decode(), lambda: None)
    listener.close()
    sender.write(b"from the sender", None, lambda: None)

    assert taken.read() == b"from the sender"
    assert strangers[0].recv(1) == b""
    for opened in (strangers[0], sender, taken):
        opened.close()


@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_junk_under_the_keys_of_claims_and_group_agreements_is_overwritten(
    row: tuple[Client, Inbox], junk: bytes
) -> None:
    client, name = row[0], "0123456789abcdef" * 2
    client.set(f"weightsync/link/{name}/taken", junk)
    client.set("group/agreed", junk)
    rendezvous = RendezvousStore(client, "group/", threading.Event())

    assert announcing.claim_link(client, name)
    assert not announcing.claim_link(client, name)
    assert [rendezvous._agree("connect"), rendezvous._agree("given up")] == ["connect", "connect"]


def test_a_withdrawn_link_cannot_be_claimed(row: tuple[Client, Inbox]) -> None:
    client, name = row[0], "0123456789abcdef" * 2
    client.set(f"weightsync/link/{name}/taken", b"closed")
    assert not announcing.claim_link(client, name)


def test_junk_in_a_heartbeat_is_overwritten_and_loses_no_worker(pair: StorePair) -> None:
    assert pair.sync().ok
    beats = f"weightsync/heartbeat/{heartbeat.process_name()}"
    pair.store.set(beats, "junk")
    until(lambda: pair.store.get(beats) != b"junk")

    assert pair.sync().ok


@pytest.fixture
def row(store: Any) -> Iterator[tuple[Client, Inbox]]:
    client = Client(store)
    yield client, Inbox(client, "row")
    client.close()


NAME = b"0123456789abcdef" * 2
NAMES = NAME + b" " + NAME + b" 127.0.0.1:4711"


def test_mailbox_messages_arrive_unchanged_and_in_order_until_the_end(row: tuple[Client, Inbox]) -> None:
    client, inbox = row
    outbox = Outbox(client, "row")
    for words in (NAME, NAMES, NAME):
        outbox.put(words)
    outbox.shut()

    assert [inbox.take() for _ in range(3)] == [NAME, NAMES, NAME]
    with pytest.raises(PeerClosed):
        inbox.take()


@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_junk_before_the_end_of_an_inbox_is_ignored(row: tuple[Client, Inbox], junk: bytes) -> None:
    client, inbox = row
    client.set("row/0", junk)
    Inbox.end(client, "row", inbox.number)
    with pytest.raises(Ended):
        inbox.take()


def test_an_overwritten_message_raises_transport_error(row: tuple[Client, Inbox]) -> None:
    client, inbox = row
    outbox = Outbox(client, "row")
    outbox.put(NAME)
    outbox.put(NAME)
    client.set("row/0", b"junk")
    with pytest.raises(TransportError, match="overwritten in the store by someone else, under the key row/0"):
        inbox.take()


def test_reading_a_value_never_waits_for_it_to_be_written(row: tuple[Client, Inbox]) -> None:
    client, _ = row
    assert client.value("nothing") is None
    assert client.peek("nothing") is None
    client.set("something", b"\xff")

    assert client.peek("something") == b"\xff"
    assert client.value("something") == b"\xff"
    assert not client.present("nothing")
    assert client.claim("something", "mine") == "\ufffd"


# ------------------------------------------------------------------------------- no descriptor is left


class DescriptorShortage:
    """Makes new connections fail for lack of descriptors, until ``over`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.over = threading.Event()
        self.refused = 0
        real = stores._require_descriptors

        def require(*count: int) -> None:
            if not self.over.is_set():
                self.refused += 1
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            real(*count)

        monkeypatch.setattr(stores, "_require_descriptors", require)


def test_a_link_without_descriptors_is_lost_at_once_and_its_worker_can_be_added_again(
    pair: StorePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pair.sync().ok
    scarce = DescriptorShortage(monkeypatch)
    with serving(pair.receiver) as loop:
        pair.sender.add_worker(0, (pair.store, 1))
        with pytest.raises(WorkerLostError, match="Too many open files"):
            pair.sender.send(timeout=None)
        scarce.over.set()
        until(lambda: bool(loop.raised))
        assert isinstance(loop.raised[0], TransportError)
        pair.receiver.register_worker_transport((pair.store, 1))
        again = WorkerLoop(pair.receiver)
        pair.sender.add_worker(0, (pair.store, 1))
        assert pair.sender.send(timeout=PATIENCE).ok
    again.end()


def test_a_sender_is_told_that_a_worker_without_descriptors_has_closed_its_link(
    pair: StorePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking_threads, "_LOOK_SECONDS", 0.01)
    assert pair.sync().ok
    # The sender has its own store object, so that its links can be distinguished from the worker's.
    senders, real, scarce, sent = reach(pair.store.port), link_threads.Client, [], threading.Event()

    def client(store: Any) -> Client:
        """Connect the sender's links. The worker's cannot connect at first, and then only once the sender has sent."""
        if store is senders:
            return real(store)
        if len(scarce) < 6:
            scarce.append(store)
            raise TransportError("no descriptor") from OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        assert sent.wait(PATIENCE)
        return real(store)

    for module in (link_threads, blocking_threads):
        monkeypatch.setattr(module, "Client", client)
    pair.sender.add_worker(0, (senders, 1))
    pair.sender.send_async()
    sent.set()
    report = pair.sender.wait_async(timeout=None, on_failure="report")

    assert len(scarce) == 6
    assert report[0].kind is OutcomeKind.LOST
    assert "closed this link" in report[0].reason


def test_a_worker_without_descriptors_declines_a_new_link_and_accepts_the_next(
    pair: StorePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pair.sync().ok
    real, refused = listener.worker_link, []

    def refuses_once(*arguments: Any) -> Any:
        if not refused:
            refused.append(arguments)
            raise TransportError("No file descriptor to wait on: Too many open files.")
        return real(*arguments)

    monkeypatch.setattr(listener, "worker_link", refuses_once)
    pair.sender.add_worker(0, (pair.store, 1))
    report = pair.sender.send(timeout=None, on_failure="report")
    assert report[0].kind is OutcomeKind.LOST
    with pytest.raises(TransportError, match="no sender any more"):
        pair.receiver.receive(timeout=PATIENCE)
    pair.receiver.register_worker_transport((pair.store, 1))
    pair.sender.add_worker(0, (pair.store, 1))
    with serving(pair.receiver):
        assert pair.sender.send(timeout=PATIENCE).ok


@pytest.mark.parametrize("left", [0, 1, 2])
def test_connecting_to_a_store_without_descriptors_raises_transport_error_at_once(store: Any, left: int) -> None:
    with limit_descriptors(left), pytest.raises(TransportError, match="Too many open files"):
        Client(store)


# ------------------------------------------------------------------------------------ added, registered again


def test_a_worker_that_registers_again_after_a_loss_waits_for_the_next_sender(pair: StorePair) -> None:
    assert pair.sync().ok
    pair.sender.remove_worker(0)
    with pytest.raises(TransportError, match="register_worker_transport"):
        pair.receiver.receive(timeout=PATIENCE)
    pair.receiver.register_worker_transport((pair.store, 1))
    assert pair.receiver.receive(timeout=0.01) is False
    pair.sender.add_worker(0, (pair.store, 1))
    with serving(pair.receiver) as loop:
        assert pair.sender.send(timeout=PATIENCE).ok
    assert loop.raised == []


def listeners() -> int:
    """The number of this process's threads that listen at a store."""
    return sum(thread.name == "weightsync-listener" for thread in threading.enumerate())


def test_registering_repeatedly_leaves_one_listener(pair: StorePair) -> None:
    assert pair.sync().ok
    opened = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        pair.receiver.register_worker_transport((pair.store, 1))

    until(lambda: listeners() == 1)
    until(lambda: len(os.listdir("/proc/self/fd")) <= opened)
    assert len(pair.receiver._listening._listeners) == 1
    pair.sender.add_worker(0, (pair.store, 1))
    assert pair.sync().ok


def test_a_goodbye_waits_longer_for_a_new_link_than_its_connection_to_the_store_may_take() -> None:
    assert announcing._PATIENCE > DIAL.total_seconds()


def being_announced(pair: StorePair) -> list[announcing.WorkerLocation]:
    """The endpoints of this pair's workers whose goodbyes would wait for a new link."""
    return [where for where in list(announcing._under_way._pending) if where.port == stores.base_of(pair.store).port]


def test_a_link_that_cannot_reach_the_store_delays_no_goodbye(pair: StorePair, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pair.sync().ok

    def unreachable(_: Any) -> None:
        raise TransportError("no store")

    for module in (link_threads, blocking_threads):
        monkeypatch.setattr(module, "Client", unreachable)
    pair.sender.add_worker(0, (pair.store, 1))

    until(lambda: not being_announced(pair))


def test_a_link_that_loses_the_store_while_being_announced_delays_no_goodbye(
    pair: StorePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pair.sync().ok
    claim = Client.claim

    def loses_the_store(client: Client, key: str, *rest: Any) -> str:
        if "/announced/" in key:
            client.cut()
        return claim(client, key, *rest)

    monkeypatch.setattr(Client, "claim", loses_the_store)
    pair.sender.add_worker(0, (pair.store, 1))

    until(lambda: not being_announced(pair))


def test_a_worker_that_gets_a_new_link_never_reports_its_sender_lost(
    pair: StorePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pair.sync().ok
    claim = Client.claim

    def claims_late(client: Client, key: str, *rest: Any) -> str:
        if "/announced/" in key or key.endswith("/taken"):
            time.sleep(0.1)  # so that a goodbye that does not wait overtakes the link
        return claim(client, key, *rest)

    monkeypatch.setattr(Client, "claim", claims_late)
    with serving(pair.receiver) as loop:
        for _ in range(3):
            pair.sender.add_worker(0, (pair.store, 1))
            assert pair.sender.send(timeout=PATIENCE).ok
        assert loop.raised == []


@pytest.mark.parametrize("keys", [{}, {"WEIGHTSYNC_KEY": "a key of sixteen characters or more"}], ids=len)
def test_a_goodbye_waits_until_the_receiver_has_the_link_announced_before_it(
    store: Any, monkeypatch: pytest.MonkeyPatch, keys: dict[str, str]
) -> None:
    for name, key in keys.items():
        monkeypatch.setenv(name, key)
    accept = Listening.accept

    def accepts_late(listening: Listening, link: Any) -> None:
        time.sleep(0.2)  # so that a goodbye that does not wait overtakes the link
        accept(listening, link)

    with contextlib.closing(StorePair(store)) as pair:
        assert pair.sync().ok
        monkeypatch.setattr(Listening, "accept", accepts_late)
        with serving(pair.receiver) as loop:
            pair.sender.add_worker(0, (pair.store, 1))
            assert pair.sender.send(timeout=PATIENCE).ok
        assert loop.raised == []


def test_a_late_handshake_of_an_older_link_does_not_replace_the_senders_newer_link(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, claimed, greeted = Client.claim, [], threading.Event()

    def claims_the_first_last(client: Client, key: str, *rest: Any) -> str:
        if "/announced/" in key:
            claimed.append(key)
            if len(claimed) == 1:
                assert greeted.wait(PATIENCE)
        return claim(client, key, *rest)

    monkeypatch.setattr(Client, "claim", claims_the_first_last)
    with contextlib.closing(StorePair(store)) as pair:
        until(lambda: len(claimed) == 1)
        with serving(pair.receiver) as loop:
            pair.sender.add_worker(0, (pair.store, 1))
            assert pair.sender.send(timeout=PATIENCE).ok
            greeted.set()
            driver = pair.receiver._driver
            until(lambda: driver._last_link == 2 and len(driver.links()) == 1)
            assert pair.sender.send(timeout=PATIENCE).ok
        assert loop.raised == []


def test_a_trainer_forgets_links_once_they_have_been_announced(pair: StorePair) -> None:
    for _ in range(3):
        pair.sender.add_worker(0, (pair.store, 1))
        assert pair.sync().ok

    until(lambda: not being_announced(pair))
