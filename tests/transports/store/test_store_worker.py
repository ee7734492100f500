"""The two threads of a link over a store, with a process group that only says what is asked of it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from weightsync import TransportError
from weightsync.protocol import codec
from weightsync.protocol.messages import Ack, Update
from weightsync.transports.base import Waker
from weightsync.transports.store import worker as store_worker
from weightsync.transports.store.mailbox import INLINE_NBYTES, Side, StoreMessage
from weightsync.transports.store.seals import NoGuard
from weightsync.transports.store.store import Client, StoreEnd
from weightsync.transports.store.worker import StoreWorker
from weightsync.transports.store.worker_threads import Outgoing

LARGE = memoryview(bytes(INLINE_NBYTES + 1))
LINK = "weightsync/link/one"


class Group:
    """Payloads are handed over as soon as they are sent, or fail."""

    failing = False

    def __init__(self, backend: str, rank: int, key: str) -> None:
        del backend, rank, key
        self.sent = 0

    def send(self, client: Client, payload: memoryview, in_flight: int) -> None:
        del client, payload, in_flight
        self.sent += 1
        if self.failing:
            raise TransportError("the connection has ended")

    def receive(self, client: Client, buffer: memoryview, in_flight: int) -> None:
        """Leave the buffer as it is."""

    def stuck(self) -> bool:
        return False

    def notify_aborted(self, client: Client) -> None:
        """Nobody asks."""

    def abort(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def lay(store: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], StoreWorker]]:
    """Lays one end of the link: 0 the sender's, 1 the worker's."""
    monkeypatch.setattr(store_worker, "Group", Group)
    with contextlib.ExitStack() as stack:
        waker = Waker()
        stack.callback(waker.close)

        def made(rank: int) -> StoreWorker:
            writes, reads = ("down", "up") if rank == 0 else ("up", "down")
            side = Side(rank, writes, reads, f"end {1 - rank}", lambda client: None, lambda client: None)
            end = StoreWorker(StoreEnd(store, 1), "one", side, NoGuard(side.peer), waker)
            stack.callback(end.close)
            return end

        yield made


def _update(version: int, payload: memoryview | None = None) -> StoreMessage:
    nbytes = 0 if payload is None else len(payload)
    frame = codec.encode(Update(model_id="m", incarnation=1, version=version, layout_digest=b"", nbytes=nbytes))
    return StoreMessage(frame, payload, None, lambda: None)


def _ack(version: int) -> StoreMessage:
    return StoreMessage(codec.encode(Ack(model_id="m", incarnation=1, version=version)), None, None, lambda: None)


def _until(true: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 30.0
    while not (found := true()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def _written(store: Any, way: str) -> set[int]:
    """The numbers of the keys that one end has written and the other has not removed."""
    keys: list[str] = store.list_keys()
    return {int(key.rpartition("/")[2]) for key in keys if f"{LINK}/{way}/" in key}


def test_a_payload_waits_for_its_peer_to_have_been_heard(store: Any, lay: Callable[[int], StoreWorker]) -> None:
    sender = lay(0)
    sender.post(_update(1, LARGE))
    _until(lambda: _written(store, "down") == {0, 1})
    time.sleep(0.1)
    assert sender._group.sent == 0

    lay(1)

    _until(lambda: sender._group.sent == 1)


def test_behind_a_payload_that_was_cut_short_nothing_leaves(
    store: Any, lay: Callable[[int], StoreWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Group, "failing", True)
    sender = lay(0)
    sender.post(_update(1, LARGE))
    sender.post(_update(2))
    _until(lambda: _written(store, "down") == {0, 1})
    put: list[bytes] = []
    before = store_worker.Outbox.put
    monkeypatch.setattr(
        store_worker.Outbox,
        "put",
        lambda self, store_message: (put.append(bytes(store_message)), before(self, store_message)),
    )

    worker = lay(1)

    _until(lambda: worker.collect()[0] or sender.failed)
    _until(lambda: sender._group.sent == 1)
    _until(lambda: sender.failed)
    assert _update(2).frame not in put


class Aborted(Group):
    """A payload that is received is on its way until the group is aborted."""

    receiving: threading.Event
    over: threading.Event
    left: threading.Event

    def receive(self, client: Client, buffer: memoryview, in_flight: int) -> None:
        self.receiving.set()
        self.over.wait(30.0)
        raise TransportError("the process group was aborted")

    def abort(self) -> None:
        self.over.set()

    def close(self) -> None:
        self.left.set()


def test_what_was_said_before_a_close_leaves_though_that_ends_a_payload_on_its_way_here(
    lay: Callable[[int], StoreWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = lay(0)
    monkeypatch.setattr(store_worker, "Group", Aborted)
    for each in ("receiving", "over", "left"):
        monkeypatch.setattr(Aborted, each, threading.Event(), raising=False)
    worker, writes = lay(1), threading.Event()
    sender.post(_update(1, LARGE))
    assert Aborted.receiving.wait(30.0)

    worker.post(replace(_ack(1), done=lambda: writes.wait(30.0)))
    _until(lambda: not worker._outgoing)
    worker.post(_ack(2))
    worker.close()
    assert Aborted.left.wait(30.0)
    writes.set()

    _until(lambda: sender.failed)
    assert [each.message.version for each in sender.collect()[0]] == [1, 2]


def test_what_was_read_is_removed_from_the_store_from_the_first_key_on(
    store: Any, lay: Callable[[int], StoreWorker]
) -> None:
    sender, worker = lay(0), lay(1)
    for version in (1, 2):
        sender.post(_update(version))
        worker.post(_ack(version))

    heard: list[int] = []
    _until(lambda: heard.extend(each.message.version for each in sender.collect()[0]) or heard == [1, 2])
    taken: list[int] = []
    _until(lambda: taken.extend(each.message.version for each in worker.collect()[0]) or taken == [1, 2])

    _until(lambda: _written(store, "down") | _written(store, "up") <= {2})


def test_messages_that_are_left_when_a_link_closes_keep_their_bytes_though_their_buffers_go_back() -> None:
    given_back: list[int] = []
    buffers = [bytearray(b"first"), bytearray(b"other")]
    outgoing = Outgoing()
    for number, buffer in enumerate(buffers):
        outgoing.add(StoreMessage(b"", memoryview(buffer), None, lambda number=number: given_back.append(number)))
    outgoing.shorten()
    assert given_back == [0, 1]
    for buffer in buffers:
        buffer[:] = b"novel"

    left = [outgoing.take(), outgoing.take()]
    assert [bytes(store_message.payload or b"") for store_message in left] == [b"first", b"other"]
    for store_message in left:
        store_message.done()
    assert given_back == [0, 1]
