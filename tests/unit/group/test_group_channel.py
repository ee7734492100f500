"""The result channel over TCP, and what the trainer says over it."""

from __future__ import annotations

import contextlib
import logging
import pickle
import select
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from weightsync.group.channel import Put, TrainerEnd, WorkerEnd
from weightsync.group.reception import ChannelListener, Invitation
from weightsync.keys import SharedKey

KEY = SharedKey(b"a secret")


@pytest.fixture(params=[None, KEY], ids=["no-key", "key"])
def reception(request: pytest.FixtureRequest) -> Iterator[ChannelListener]:
    with contextlib.closing(ChannelListener("127.0.0.1", request.param)) as reception:
        yield reception


def admitted(reception: ChannelListener) -> None:
    """Have it look at everything that comes within a moment."""
    poller = select.poll()
    poller.register(reception, select.POLLIN)
    while poller.poll(50):
        reception.admit()


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:  # closed with something unread
        return True


def test_only_a_worker_that_was_invited_is_let_in_and_only_once(
    reception: ChannelListener, caplog: pytest.LogCaptureFixture
) -> None:
    invitation, end = reception.expect()
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.create_connection((invitation.host, invitation.port)))
        strangers = [replace(invitation, token=bytes(32)), replace(invitation, key=None, token=bytes(32))]
        if invitation.key is not None:
            strangers.append(replace(invitation, key=None))  # has seen the token, and has no key
        socks = [stack.enter_context(contextlib.closing(each.connect())) for each in strangers]
        socks[0].sendall(pickle.dumps("never unpickled"))
        admitted(reception)
        assert not end.attached
        assert all(map(is_closed, socks))
        assert [record.levelno for record in caplog.records] == [logging.WARNING]

        worker = WorkerEnd(invitation.connect(), capacity=1)
        worker.put("here", (3,))
        admitted(reception)
        assert end.attached
        assert end.read() == [Put((3,), pickle.dumps("here", pickle.HIGHEST_PROTOCOL))]

        again = stack.enter_context(contextlib.closing(invitation.connect()))
        admitted(reception)
        assert is_closed(again)
        assert silent.fileno() >= 0  # it keeps nobody out
        end.close()
        assert worker.stopped
        worker.close()


def test_a_life_that_was_given_up_is_not_let_in(reception: ChannelListener) -> None:
    invitation, end = reception.expect()
    end.close()
    with contextlib.closing(WorkerEnd(invitation.connect(), 1)) as worker:
        admitted(reception)
        assert worker.stopped


def test_a_worker_hears_what_was_said_before_it_connected(reception: ChannelListener) -> None:
    invitation, end = reception.expect()
    end.announce(7)
    end.stop()
    with contextlib.closing(WorkerEnd(invitation.connect(), 1)) as worker:
        admitted(reception)
        assert (worker.version, worker.stopped) == (7, True)
    end.close()


def test_a_worker_that_does_not_listen_delays_no_announcement_and_hears_the_newest() -> None:
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    end, worker = TrainerEnd(near), WorkerEnd(far, 1)
    for version in range(1, 10_001):
        end.announce(version)
    end.stop()
    assert end.events & select.POLLOUT  # what did not fit wakes the group when there is room
    while worker.version < 10_000 or not worker.stopped:
        assert end.read() == []
    worker.put("there is room for one", ())
    assert len(end.read()) == 1
    end.close()
    worker.close()


def test_an_invitation_shows_no_key(reception: ChannelListener) -> None:
    invitation: Invitation = reception.expect()[0]
    assert "a secret" not in repr(invitation)
    assert (invitation.proof == invitation.token) == (invitation.key is None)
