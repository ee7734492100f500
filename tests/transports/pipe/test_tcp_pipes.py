"""Pipes over TCP: `multiprocessing.connection` accepts only peers with its authkey; weightsync's key is not used."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import pytest
from fleet import PATIENCE, constants, filled, small

from weightsync import MultiProcessWeightSyncScheme
from weightsync.protocol import codec
from weightsync.protocol.messages import Ack, Hello
from weightsync.transports import exposure
from weightsync.transports.pipe import connection

AUTHKEY = b"a secret of both"


def accept(listener: Listener) -> tuple[Connection[Any, Any], int]:
    """Accept in a loop, as a user would. Returns the accepted connection, and the number of rejected ones."""
    turned_away = 0
    while True:
        try:
            return listener.accept(), turned_away
        except (multiprocessing.AuthenticationError, EOFError, OSError):
            turned_away += 1


def forge(listener: Listener) -> bytes:
    """Write weightsync messages to the port without its authkey. Returns all bytes that come back."""
    messages = Hello(model_id="policy", incarnation=2**62), Ack(model_id="policy", incarnation=1, version=1)
    frames = [codec.encode(each) for each in messages]
    with socket.create_connection(listener.address) as raw:
        raw.sendall(b"".join(struct.pack("!i", len(frame)) + frame for frame in frames))
        said = b""
        with contextlib.suppress(ConnectionResetError):
            while more := raw.recv(4096):
                said += more
    return said


def guess(listener: Listener) -> None:
    """Try to connect with another authkey."""
    with pytest.raises((multiprocessing.AuthenticationError, EOFError, OSError)):
        Client(listener.address, authkey=b"another")


@pytest.mark.parametrize("listens", ["trainer", "worker"])
def test_a_tcp_peer_without_the_authkey_neither_sends_nor_receives_weights(listens: str) -> None:
    with Listener(("127.0.0.1", 0), authkey=AUTHKEY) as listener, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept, listener)
        said = forge(listener)
        guess(listener)
        there = Client(listener.address, authkey=AUTHKEY)
        here, turned_away = accepted.result(PATIENCE)

    assert turned_away == 2
    assert b"#CHALLENGE#" in said
    assert codec.MAGIC not in said
    ours, theirs = (here, there) if listens == "trainer" else (there, here)
    model = small()
    with MultiProcessWeightSyncScheme() as trains, MultiProcessWeightSyncScheme() as serves:
        trains.init_on_sender("policy", pipes=[ours], model=filled(small(), 3.0))
        serves.init_on_worker("policy", pipe=theirs, model=model)
        trains.get_sender().send_async()
        assert serves.get_receiver().receive(timeout=PATIENCE)
        assert trains.get_sender().wait_async(timeout=PATIENCE).ok
        assert constants(model) == {3.0}


def test_a_pipe_to_another_host_warns_that_the_weightsync_key_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "weightsync")
    monkeypatch.setattr(exposure, "_warning", exposure._Warning())
    everywhere: Callable[[socket.socket], bool] = lambda sock: True  # noqa: E731 - for its type
    monkeypatch.setattr(connection, "leaves_host", everywhere)
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        connection.Channel.of(ours)

    [record] = caplog.records
    assert "authkey=" in record.getMessage()
    assert "Neither key= nor WEIGHTSYNC_KEY is used" in record.getMessage()
