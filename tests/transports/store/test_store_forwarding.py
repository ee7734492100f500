"""A worker in a fan-out passes an arriving payload on to its children, over real sockets, without a trainer."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import pytest
import xxhash
from fleet import PATIENCE

from weightsync import TransportError
from weightsync.clock import Deadline
from weightsync.transports.store import fetching, forwarding
from weightsync.transports.store.fetching import NotFetched, fetch
from weightsync.transports.store.forwarding import Feed, Forwarder
from weightsync.transports.store.routes import FetchFailure, Routed
from weightsync.transports.store.stream import dial

TOKEN = b"0123456789abcdef"
#: A payload of more than three pieces.
PAYLOAD = os.urandom(3 * forwarding.PIECE_NBYTES + 12345)
#: Successive numbers of bytes that have arrived: within a piece, at its end, behind it.
STEPS = (1, forwarding.PIECE_NBYTES, forwarding.PIECE_NBYTES + 1, 3 * forwarding.PIECE_NBYTES, len(PAYLOAD))


@pytest.fixture
def forwarder() -> Iterator[Forwarder]:
    """The server of a parent on this host."""
    made = Forwarder("127.0.0.1")
    yield made
    made.close()


@pytest.fixture
def long_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the timeout, so that no parent counts as silent even on a slow machine."""
    monkeypatch.setattr(fetching, "SILENCE", PATIENCE)


def routed(parent: str, token: bytes = TOKEN, digest: bytes = b"") -> Routed:
    return Routed(token, 0, digest or xxhash.xxh3_128_digest(PAYLOAD), parent)


def fetched(route: Routed, go_on: Callable[[], None] = lambda: None) -> tuple[bytes, list[int]]:
    """Fetch a payload as a child. Returns its bytes, and the reported numbers of bytes."""
    buffer, reached = bytearray(len(PAYLOAD)), list[int]()
    fetch(route, memoryview(buffer), reached.append, go_on)
    return bytes(buffer), reached


def why_not(route: Routed) -> FetchFailure:
    """The reason why a child cannot fetch the payload."""
    with pytest.raises(NotFetched) as refused:
        fetched(route)
    assert str(refused.value) == refused.value.why.name
    return refused.value.why


def connection(forwarder: Forwarder, *options: tuple[int, int, int]) -> socket.socket:
    """A raw connection to a parent, of a child or a stranger."""
    host, _, port = forwarder.address.rpartition(":")
    sock = socket.socket()
    for option in options:
        sock.setsockopt(*option)
    sock.settimeout(PATIENCE)
    sock.connect((host, int(port)))
    return sock


# ------------------------------------------------------------------------------------------------- children


@pytest.mark.usefixtures("long_timeout")
def test_each_child_gets_the_payload_in_pieces_while_it_arrives_and_checks_it(forwarder: Forwarder) -> None:
    feed = forwarder.offer(TOKEN, 2, memoryview(PAYLOAD))
    digests = hashlib.sha256(PAYLOAD).digest(), xxhash.xxh3_128_digest(PAYLOAD)
    with ThreadPoolExecutor(2) as children:
        calls = [children.submit(fetched, routed(forwarder.address, digest=digest)) for digest in digests]
        for step in STEPS:
            time.sleep(1.5 * forwarding._PULSE)  # so that the parent sends a sign of life
            feed.reach(step)
        found = [call.result(PATIENCE) for call in calls]

    for got, reached in found:
        assert got == PAYLOAD
        assert reached == sorted(reached)
        assert len(set(reached)) >= 4
        assert reached[-1] == len(PAYLOAD)
    assert why_not(routed(forwarder.address)) is FetchFailure.ENDED  # only two children were announced


@pytest.mark.usefixtures("long_timeout")
def test_payloads_passed_on_within_this_host_use_reno_congestion_control(
    forwarder: Forwarder, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, send_at_once = list[bytes](), forwarding.send_at_once

    def recorded(sock: socket.socket) -> None:
        send_at_once(sock)
        chosen.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0"))

    monkeypatch.setattr(forwarding, "send_at_once", recorded)
    forwarder.offer(TOKEN, 1, memoryview(PAYLOAD)).reach(len(PAYLOAD))

    assert fetched(routed(forwarder.address))[0] == PAYLOAD
    assert chosen == [b"reno"]


def test_the_progress_of_a_feed_never_decreases(forwarder: Forwarder) -> None:
    feed = Feed(memoryview(PAYLOAD))
    feed.reach(20)
    feed.reach(10)  # as by a thread that was overtaken

    assert feed.beyond(0, 0.0) == PAYLOAD[:20]
    assert feed.beyond(15, 0.0) == PAYLOAD[15:20]
    assert feed.beyond(20, 0.0) == b""
    feed.reach(len(PAYLOAD))
    assert feed.beyond(20, 0.0) == PAYLOAD[20 : 20 + forwarding.PIECE_NBYTES]
    feed.end()
    assert feed.beyond(20, PATIENCE) is None


@pytest.mark.usefixtures("long_timeout")
@pytest.mark.parametrize("children", [1, 2])
def test_children_are_told_that_a_declined_payload_has_ended(
    forwarder: Forwarder, children: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "PATIENCE", PATIENCE)  # time for slow children
    forwarder.decline(TOKEN, children)
    began = Deadline(forwarding.PATIENCE)
    for _ in range(children):
        assert why_not(routed(forwarder.address)) is FetchFailure.ENDED
    assert not began.passed, "a child waited for a payload that does not come"


@pytest.mark.usefixtures("long_timeout")
@pytest.mark.parametrize("ends", [lambda _, feed: feed.end(), lambda forwarder, _: forwarder.close()])
def test_a_payload_that_ends_before_it_is_complete_also_ends_for_its_children(
    forwarder: Forwarder, ends: Callable[[Forwarder, Feed], None]
) -> None:
    feed = forwarder.offer(TOKEN, 2, memoryview(PAYLOAD))
    feed.reach(forwarding.PIECE_NBYTES)
    with ThreadPoolExecutor(1) as child:
        call = child.submit(why_not, routed(forwarder.address))
        until(lambda: TOKEN in forwarder._feeds and forwarder._feeds[TOKEN][1] == 1)
        ends(forwarder, feed)
        assert call.result(PATIENCE) is FetchFailure.ENDED


@pytest.mark.usefixtures("long_timeout")
def test_only_the_two_newest_payloads_that_no_child_fetched_are_kept(forwarder: Forwarder) -> None:
    tokens = [bytes([index]) * 16 for index in range(3)]
    for token in tokens:
        forwarder.offer(token, 1, memoryview(PAYLOAD)).reach(len(PAYLOAD))

    assert why_not(routed(forwarder.address, tokens[0])) is FetchFailure.ENDED
    for token in tokens[1:]:
        assert fetched(routed(forwarder.address, token))[0] == PAYLOAD


def test_a_token_may_arrive_in_pieces_and_before_its_payload(
    forwarder: Forwarder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "PATIENCE", PATIENCE)  # time for the pauses on a busy machine
    with connection(forwarder) as child:
        for part in (TOKEN[:5], TOKEN[5:] + b"and more"):
            child.sendall(part)
            time.sleep(0.05)
        forwarder.offer(TOKEN, 1, memoryview(b"weights")).reach(7)
        with child.makefile("rb") as arrived:
            assert arrived.read(11) == b"\0\0\0\x07weights"


def test_a_child_that_reads_nothing_is_disconnected_and_a_slow_one_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "_PULSE", 0.1)
    forwarder = Forwarder("127.0.0.1")
    small = socket.SOL_SOCKET, socket.SO_RCVBUF, 4096
    payload = bytes(16 * forwarding.PIECE_NBYTES)
    try:
        forwarder.offer(TOKEN, 2, memoryview(payload)).reach(len(payload))
        with connection(forwarder, small) as deaf, connection(forwarder) as slow:
            for each in (deaf, slow):
                each.sendall(TOKEN)
            until(lambda: len(forwarder._children) == 2)
            got = len(slow.recv(2**16))
            began = Deadline(PATIENCE)
            while len(forwarder._children) == 2 and not began.passed:
                got += len(slow.recv(2**16))
                time.sleep(0.02)
            assert len(forwarder._children) == 1
            while got < len(payload) and (some := slow.recv(2**20)):
                got += len(some)
            assert got >= len(payload)
    finally:
        forwarder.close()


# -------------------------------------------------------------------------------------------------- parents


class Parent:
    """A fake parent that accepts one connection, reads the token and calls ``does``."""

    def __init__(self, does: Callable[[socket.socket], Any]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._over = threading.Event()
        self._does = does
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        sock, _ = self._listener.accept()
        with sock:
            sock.recv(16)
            self._does(sock)
            self._over.wait(PATIENCE)

    def close(self) -> None:
        self._over.set()
        self._thread.join(PATIENCE)
        self._listener.close()


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"", FetchFailure.SILENT),
        (forwarding.LENGTH.pack(100) + b"some", FetchFailure.SILENT),
        (forwarding.LENGTH.pack(len(PAYLOAD) + 1), FetchFailure.WRONG),
        (forwarding.LENGTH.pack(len(PAYLOAD)) + bytes(len(PAYLOAD)), FetchFailure.WRONG),
    ],
    ids=["nothing", "a part", "more", "other bytes"],
)
def test_a_child_gives_up_a_parent_that_is_silent_or_sends_wrong_bytes(
    sent: bytes, why: FetchFailure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "SILENCE", 0.1 if why is FetchFailure.SILENT else PATIENCE)
    parent = Parent(lambda sock: sock.sendall(sent))
    try:
        assert why_not(routed(parent.address)) is why
    finally:
        parent.close()


@pytest.mark.usefixtures("long_timeout")
@pytest.mark.parametrize("digest", [hashlib.sha256(b"").digest(), xxhash.xxh3_128_digest(b"")], ids=["sha256", "xxh3"])
def test_a_payload_with_another_digest_is_rejected(forwarder: Forwarder, digest: bytes) -> None:
    forwarder.offer(TOKEN, 1, memoryview(PAYLOAD)).reach(len(PAYLOAD))
    assert why_not(routed(forwarder.address, digest=digest)) is FetchFailure.WRONG


def test_a_child_whose_own_link_ends_stops_waiting_for_its_parent() -> None:
    parent = Parent(lambda sock: None)

    def ended() -> None:
        raise TransportError("the link has ended")

    try:
        with pytest.raises(TransportError, match="the link has ended"):
            fetched(routed(parent.address), ended)
    finally:
        parent.close()


@pytest.mark.parametrize("parent", ["127.0.0.1:1", "127.0.0.1:0", "127.0.0.1:port", "127.0.0.1", "no..host:1"])
def test_a_parent_that_cannot_be_reached_is_reported_as_unreachable(parent: str) -> None:
    assert why_not(routed(parent)) is FetchFailure.UNREACHABLE


def test_an_invalid_port_is_not_reduced_to_a_valid_one() -> None:
    """The resolver takes ports modulo 65536, so an invalid port must not reach it."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1] + 2**16}"

        assert why_not(routed(address)) is FetchFailure.UNREACHABLE
        with pytest.raises(TransportError, match="has no port from 1 to 65535"):
            dial(address, "a link")


def test_a_parent_with_an_ipv6_address_is_connected_to_at_that_address(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []

    def none(address: Any, timeout: float) -> NoReturn:
        called.append((address, timeout))
        raise OSError

    monkeypatch.setattr(socket, "create_connection", none)
    assert why_not(routed("fe80::1%eth0:4711")) is FetchFailure.UNREACHABLE
    assert called == [(("fe80::1%eth0", 4711), fetching.SILENCE)]


def test_listening_at_an_address_of_another_host_raises_and_names_it() -> None:
    with pytest.raises(TransportError, match=r"No connection can be accepted at 203\.0\.113\.1: Cannot assign"):
        Forwarder("203.0.113.1")


# ------------------------------------------------------------------------------------------------ strangers


@pytest.mark.usefixtures("long_timeout")
def test_a_stranger_without_the_token_gets_nothing(forwarder: Forwarder) -> None:
    forwarder.offer(TOKEN, 1, memoryview(PAYLOAD)).reach(len(PAYLOAD))
    strangers = [connection(forwarder) for _ in range(3)]
    for stranger, said in zip(strangers, (b"x" * 16, b"short", b""), strict=True):
        stranger.sendall(said)
    for stranger in strangers:
        with stranger:
            assert stranger.recv(100) == b""
    assert fetched(routed(forwarder.address))[0] == PAYLOAD


@pytest.mark.usefixtures("long_timeout")
def test_silent_connections_are_dropped_and_children_are_still_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "_MOST", 2)
    forwarder = Forwarder("127.0.0.1")
    strangers = [connection(forwarder) for _ in range(4)]
    try:
        assert strangers[-1].recv(1) == b""
        until(lambda: not forwarder._children)  # a connection has a second to present its token
        forwarder.offer(TOKEN, 1, memoryview(PAYLOAD)).reach(len(PAYLOAD))
        assert fetched(routed(forwarder.address))[0] == PAYLOAD
    finally:
        forwarder.close()
        for each in strangers:
            each.close()


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = Deadline(PATIENCE)
    while not condition():
        assert not deadline.passed, "the condition did not hold in time"
        time.sleep(0.01)
