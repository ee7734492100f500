"""A process group is let go of whenever its end comes: also while it is still being made."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from weightsync import TransportError
from weightsync.transports.store import group as module
from weightsync.transports.store.group import Group
from weightsync.transports.store.sockets import connected
from weightsync.transports.store.store import Client

PAYLOAD = memoryview(bytearray(1))


class Sent:
    """A group whose other rank takes what is sent."""

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Sent:
        del tensors, to, tag
        return self

    def recv(self, tensors: list[torch.Tensor], of: int, tag: int) -> Sent:
        return self.send(tensors, of, tag)

    def wait(self, timeout: timedelta) -> None:
        del timeout


class Forgetful(Sent):
    """A group whose connection ends just as something is sent: gloo tells who waits for an arrival, and nobody else."""

    def recv(self, tensors: list[torch.Tensor], of: int, tag: int) -> Sent:
        return Failed()

    def wait(self, timeout: timedelta) -> None:
        pytest.fail("gloo would have forgotten us here")


class Failed(Sent):
    """An operation that failed."""

    def wait(self, timeout: timedelta) -> None:
        raise RuntimeError("Connection closed by peer")


class Arriving(Sent):
    """A group whose other rank is gone as soon as all has come from it."""

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Sent:
        return Failed()

    def recv(self, tensors: list[torch.Tensor], of: int, tag: int) -> Sent:
        tensors[0].fill_(7)
        return Sent()


class Making:
    """How gloo makes a group, but for the group: it opens one connection, which nobody but the group closes."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.made = Sent()
        self.meanwhile: Callable[[], None] = lambda: None
        self.ours: socket.socket | None = None
        self.peer: socket.socket | None = None

    def __call__(self, store: Any, rank: int, address: str | None) -> Sent:
        _, port = self.listener.getsockname()
        store.set(str(rank), b"an address: " + struct.pack("=H", socket.AF_INET) + struct.pack("!H", port))
        self.ours, self.peer = connection(self.listener)
        self.meanwhile()
        return self.made

    def ended(self) -> bool:
        assert self.peer is not None
        try:
            return self.peer.recv(1, socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False

    def fails(self) -> None:
        """The connection ends by itself."""
        assert self.ours is not None
        assert self.peer is not None
        self.ours.close()
        self.peer.close()


def connection(server: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Both ends of one, to that server."""
    ours = socket.create_connection(server.getsockname())
    theirs, _ = server.accept()
    return ours, theirs


@pytest.fixture
def making(monkeypatch: pytest.MonkeyPatch) -> Iterator[Making]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = Making(listener)
        monkeypatch.setattr(module, "_backend", lambda name: (made, None))
        yield made
        for end in (made.ours, made.peer):
            if end is not None:
                end.close()


@pytest.fixture
def client(store: Any) -> Iterator[Client]:
    client = Client(store)
    yield client
    client.close()


def test_a_group_that_was_made_is_let_go_of_when_it_is_closed(making: Making, client: Client) -> None:
    group = Group("gloo", 0, "a link")
    group.send(client, PAYLOAD, 1)
    assert not making.ended()

    group.close()

    assert making.ended()


@pytest.mark.parametrize("end", [Group.close, Group.abort])
def test_a_group_that_ends_while_it_is_being_made_keeps_no_connection(
    making: Making, client: Client, end: Callable[[Group], None]
) -> None:
    group = Group("gloo", 0, "a link")
    making.meanwhile = lambda: end(group)

    with pytest.raises(TransportError, match="aborted"):
        group.send(client, PAYLOAD, 1)

    assert making.ended()


def test_a_connection_that_somebody_else_opened_meanwhile_is_left_alone(making: Making, client: Client) -> None:
    theirs: list[socket.socket] = []

    def meanwhile() -> None:
        making.fails()
        theirs.extend(connection(server))

    with socket.create_server(("127.0.0.1", 0)) as server:
        making.meanwhile = meanwhile
        group = Group("gloo", 0, "a link")
        group.send(client, PAYLOAD, 1)

        group.close()

        one, other = theirs
        one.sendall(b"still here")
        assert other.recv(10) == b"still here"
        one.close()
        other.close()


def test_the_groups_connection_is_known_among_others(making: Making, client: Client) -> None:
    theirs: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        making.meanwhile = lambda: theirs.extend(connection(server))
        group = Group("gloo", 0, "a link")
        group.send(client, PAYLOAD, 1)

        group.close()

        assert making.ended()
        for end in theirs:
            end.close()


def test_a_descriptor_that_is_anothers_by_now_is_not_copied() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = connection(server)
        [listed] = [each for each in connected().values() if each.fd == gone[0].fileno()]
        another = connection(server)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, listed.fd)
            for end in (*another, gone[1]):
                stack.callback(end.close)
            copy = listed.copy()
            assert copy is not None
            copy.close()

            gone[0].detach()
            os.dup2(another[0].fileno(), listed.fd)

            assert listed.copy() is None


def test_g10_a_send_that_gloo_has_forgotten_ends_with_its_connection(making: Making, client: Client) -> None:
    making.made = Forgetful()
    group = Group("gloo", 0, "a link")

    with pytest.raises(TransportError, match="closed by peer"):
        group.send(client, PAYLOAD, 1)

    group.close()


def test_what_has_arrived_is_kept_though_its_sender_is_gone(making: Making, client: Client) -> None:
    making.made = Arriving()
    group = Group("gloo", 1, "a link")
    buffer = memoryview(bytearray(1))

    group.receive(client, buffer, 1)

    assert buffer[0] == 7
    group.close()


def test_no_operation_touches_a_payload_any_more_once_a_send_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUCKET_NBYTES", 1)
    group = Group("gloo", 0, "a link")
    happened: list[object] = []

    def start(bucket: torch.Tensor, number: int) -> Callable[[], None]:
        del bucket

        def finish() -> None:
            happened.append(number)
            if number == 0:
                raise TransportError("the connection has ended")

        return finish

    monkeypatch.setattr(group, "abort", lambda: happened.append("aborted"))
    with pytest.raises(TransportError, match="the connection has ended"):
        group._move(memoryview(bytearray(5)), 3, start)

    assert happened == [0, "aborted", 1, 2]
