"""A process group is let go of whenever its end comes: also while it is still being made."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from weightsync import TransportError
from weightsync.transports.distributed import group as module
from weightsync.transports.distributed.group import Group
from weightsync.transports.distributed.store import Client

PAYLOAD = memoryview(bytearray(1))


class Sent:
    """What was sent has arrived."""

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Sent:
        del tensors, to, tag
        return self

    def wait(self, timeout: timedelta) -> None:
        del timeout


class Making:
    """How gloo makes a group, but for the group: it opens one connection, which nobody but the group closes."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.meanwhile: Callable[[], None] = lambda: None
        self.ours: socket.socket | None = None
        self.peer: socket.socket | None = None

    def __call__(self, store: Any, rank: int) -> Sent:
        del store, rank
        self.ours = socket.create_connection(self.listener.getsockname())
        self.peer, _ = self.listener.accept()
        self.meanwhile()
        return Sent()

    def ended(self) -> bool:
        assert self.peer is not None
        try:
            return self.peer.recv(1, socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False


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
