"""Memory for a peer's unread messages is bounded: a flooding peer loses its own link, with a typed error."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from weightsync import AuthenticationError, ProtocolError, TransportError
from weightsync.keys import SharedKey
from weightsync.protocol import codec
from weightsync.protocol.messages import Bye, Hello, Update
from weightsync.torchrl.transports import queues
from weightsync.torchrl.transports.queues import QueueChannel, QueueLink
from weightsync.transports.base import Received
from weightsync.transports.buffers import Buffer
from weightsync.transports.calls import gates, server, server_link
from weightsync.transports.calls.server import CallServer, Parcel
from weightsync.transports.sealing import Challenged, Identity, KeyedSeal

KEY = SharedKey("a secret of both")
PATIENCE = 30.0


def hello(model_id: str = "m") -> bytes:
    return codec.encode(Hello(model_id=model_id, incarnation=1))


def update(version: int, nbytes: int = 0) -> bytes:
    return codec.encode(Update(model_id="m", incarnation=1, version=version, layout_digest=b"", nbytes=nbytes))


def parcel(link: str, number: int, nbytes: int = 0) -> Parcel:
    return Parcel(link, number, update(number + 1, nbytes), memoryview(bytearray(nbytes)) if nbytes else None)


# ------------------------------------------------------------------------------------------------------- calls


@pytest.fixture
def call_server() -> Iterator[tuple[CallServer, list[Any]]]:
    made, links = CallServer("m"), []
    stop = made.open(links.append)
    yield made, links
    stop()
    for link in links:
        link.close()


@pytest.mark.parametrize(
    ("bound", "most", "nbytes"), [("MAX_UNREAD", 5, 0), ("MAX_UNREAD_NBYTES", 50, 10)], ids=["messages", "bytes"]
)
def test_a_sender_that_floods_a_call_server_loses_its_own_link(
    call_server: tuple[CallServer, list[Any]], monkeypatch: pytest.MonkeyPatch, bound: str, most: int, nbytes: int
) -> None:
    monkeypatch.setattr(server_link, bound, most)
    opened, links = call_server
    opened.submit(parcel("good", 0))
    for number in range(5):
        opened.submit(parcel("flood", number, nbytes))

    for number in (5, 6):
        with pytest.raises(ProtocolError, match=r"5 messages .* are unread"):
            opened.submit(parcel("flood", number, nbytes))

    good, flooded = links
    assert len(flooded.receive()) == 5
    with pytest.raises(ProtocolError, match="this link is closed"):
        flooded.receive()
    assert [each.message.version for each in good.receive()] == [1]
    opened.submit(parcel("good", 1))
    assert [each.message.version for each in good.receive()] == [2]


def test_calls_ahead_of_their_turn_are_bounded_by_bytes_too(
    call_server: tuple[CallServer, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_link, "MAX_UNREAD_NBYTES", 50)
    opened, _ = call_server
    for number in range(1, 6):
        opened.submit(parcel("a", number, 10))
    with pytest.raises(ProtocolError, match="50 bytes"):
        opened.submit(parcel("a", 6, 10))


def test_reading_messages_makes_room_for_new_calls(
    call_server: tuple[CallServer, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_link, "MAX_UNREAD_NBYTES", 10)
    opened, links = call_server
    for number in range(30):
        opened.submit(parcel("a", number, 10))
        assert len(links[0].receive()) == 1


def test_the_goodbye_of_a_link_refused_for_lack_of_room_is_refused_like_its_handshake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "MAX_UNMET", 1)
    unopened = CallServer("m")
    unopened.submit(Parcel("waits", 0, hello()))
    with pytest.raises(TransportError, match="no receiver listens"):
        unopened.submit(Parcel("another", 0, hello()))

    with pytest.raises(TransportError, match="no receiver listens"):
        unopened.hang_up(Parcel("another", 1, codec.encode(Bye(model_id="m", incarnation=1))))

    unopened.hang_up(Parcel("waits", 1, codec.encode(Bye(model_id="m", incarnation=1))))


def test_only_the_last_ended_links_are_remembered_and_open_links_are_bounded(
    call_server: tuple[CallServer, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_LINKS", 4)
    monkeypatch.setattr(server, "_REMEMBERED", 2)
    opened, links = call_server
    opened.submit(parcel("stays", 0))
    for name in range(20):
        opened.submit(parcel(f"{name}", 0))
        opened.hang_up(Parcel(f"{name}", 1, codec.encode(Bye(model_id="m", incarnation=1))))
        links[-1].close()
    assert set(opened._links) == {"stays", "17", "18", "19"}
    assert opened.knows("stays")

    for name in "abc":
        opened.submit(parcel(name, 0))
    with pytest.raises(TransportError, match="4 senders of model 'm'"):
        opened.submit(parcel("d", 0))
    opened.submit(parcel("stays", 1))
    assert len(links[0].receive()) == 2


@pytest.mark.parametrize("keyed", [False, True], ids=["no key", "a key"])
def test_links_waiting_for_a_receiver_are_bounded_and_the_first_ones_are_kept(
    monkeypatch: pytest.MonkeyPatch, keyed: bool
) -> None:
    monkeypatch.setattr(server, "MAX_UNMET", 3)
    made, links = CallServer("m"), []
    frame = KeyedSeal(KEY, Identity("calls", "m", "", "0"), "w").frame(0, codec.decode(hello()), None)
    for name in range(3):
        made.submit(Parcel(f"{name}", 0, frame if keyed else hello()))
    with pytest.raises(TransportError, match="3 others wait"):
        made.submit(Parcel("3", 0, frame if keyed else hello()))

    stop = made.open(links.append, KEY if keyed else None)
    assert (made.knows("0"), made.knows("3")) == (True, False)
    assert len(links) == (0 if keyed else 3)
    stop()
    for link in links:
        link.close()


def test_the_bytes_that_wait_for_a_receiver_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_UNMET_NBYTES", 20)
    made = CallServer("m")
    for number in range(2):
        made.submit(parcel("a", number, 10))
    for flood in (parcel("a", 2, 10), parcel("b", 0, 10)):
        with pytest.raises(TransportError, match="20 bytes"):
            made.submit(flood)


class Sender:
    """A sender's end with the key, whose calls a test can replay."""

    def __init__(self, opened: CallServer, name: str) -> None:
        self.call_server = opened
        self.name = name
        self.seal = KeyedSeal(KEY, Identity("calls", "m", "", name), "the worker")
        self.early = Parcel(name, 0, self.seal.frame(0, codec.decode(hello()), None))

    def call(self) -> None:
        with pytest.raises(Challenged):
            self.seal.brought(self.call_server.submit(self.early).result(timeout=0))

    def prove(self) -> Any:
        return self.call_server.submit(Parcel(self.name, 0, self.seal.again(0)))


@pytest.fixture
def keyed() -> Iterator[tuple[CallServer, list[Any]]]:
    made, links = CallServer("m"), []
    stop = made.open(links.append, KEY)
    yield made, links
    stop()
    for link in links:
        link.close()


def test_unproven_links_are_bounded_and_the_oldest_is_dropped_first(
    keyed: tuple[CallServer, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "MAX_UNPROVEN", 3)
    opened, links = keyed
    for name in range(10):
        opened.submit(Sender(opened, f"{name}").early)
    lives = Sender(opened, "lives")
    lives.call()
    for name in range(2):
        opened.submit(Sender(opened, f"{name}").early)
    assert [name for name in ("9", "lives", "0", "1") if opened.knows(name)] == ["lives", "0", "1"]

    lives.prove()
    [link] = links
    assert len(link.receive()) == 1


def test_the_bytes_kept_for_unproven_links_are_bounded(
    keyed: tuple[CallServer, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "MAX_KEPT_NBYTES", 250)
    opened, _ = keyed
    for name in "abcd":
        seal, nbytes = Sender(opened, name).seal, 100
        message = Update(model_id="m", incarnation=1, version=1, layout_digest=b"", nbytes=nbytes)
        payload = Buffer(nbytes)
        opened.submit(Parcel(name, 0, seal.frame(0, message, payload), payload.view[:nbytes]))

    assert [name for name in "abcd" if opened.knows(name)] == ["c", "d"]


def test_an_unauthenticated_hang_up_does_not_end_a_held_call(keyed: tuple[CallServer, list[Any]]) -> None:
    opened, links = keyed
    lives = Sender(opened, "lives")
    lives.call()
    for frame in (hello(), b"", b"WSYK" + bytes(60)):
        opened.hang_up(Parcel("lives", 1, frame))

    lives.prove()
    assert len(links[0].receive()) == 1


def test_a_proof_from_a_dropped_unproven_sender_is_refused(
    keyed: tuple[CallServer, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "MAX_UNPROVEN", 1)
    opened, links = keyed
    first = Sender(opened, "first")
    first.call()
    opened.submit(Sender(opened, "second").early)

    with pytest.raises(AuthenticationError):
        first.seal.brought(first.prove().result(timeout=0))
    assert links == []


# ------------------------------------------------------------------------------------------------------ queues


class Inbox:
    """A fake queue without a thread or a pipe."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def __call__(self) -> QueueChannel:
        channel = QueueChannel(None, multiprocessing.Queue())
        channel.inbox = self
        return channel

    def get_nowait(self) -> Any:
        if not self.items:
            raise queues.queue.Empty
        return self.items.pop(0)


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def open_link() -> Iterator[Callable[[QueueChannel, str], QueueLink]]:
    made: list[QueueLink] = []

    def make(channel: QueueChannel, model_id: str) -> QueueLink:
        made.append(QueueLink(channel, model_id, "the sender"))
        return made[-1]

    yield make
    for link in made:
        link.close()


def test_at_most_max_unread_messages_are_read_from_a_queue_at_once(
    inbox: Inbox, open_link: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "MAX_UNREAD", 10)
    link = open_link(inbox(), "m")
    inbox.items = [hello() for _ in range(25)]

    assert [len(link.receive()) for _ in range(4)] == [10, 10, 5, 0]


def test_a_model_that_floods_a_queue_loses_its_own_link(
    inbox: Inbox, open_link: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "MAX_UNREAD", 10)
    channel = inbox()
    good, flooded = open_link(channel, "good"), open_link(channel, "m")
    inbox.items = [hello() for _ in range(25)] + [hello("good")]

    assert [type(each) for each in good.receive()] == [Received]
    assert len(flooded.receive()) == 10
    with pytest.raises(ProtocolError, match="for 'm' are unread"):
        flooded.receive()
    inbox.items = [hello("good")]
    assert len(good.receive()) == 1


def test_messages_for_models_without_a_link_are_bounded(
    inbox: Inbox, open_link: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "MAX_UNCLAIMED", 4)
    channel = inbox()
    inbox.items = [hello(f"{name}") for name in range(9)]
    assert channel.unclaimed() == ("0", "1", "2", "3")
    assert len(inbox.items) == 5

    link = open_link(channel, "good")
    for _ in range(2):
        with pytest.raises(ProtocolError, match="models without a link"):
            link.receive()


def test_objects_in_a_queue_that_are_not_weightsync_messages_are_bounded(
    inbox: Inbox, open_link: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "MAX_USER_MESSAGES", 4)
    link = open_link(inbox(), "m")
    inbox.items = ["an object"] * 5

    with pytest.raises(TransportError, match="not weightsync messages"):
        link.receive()
