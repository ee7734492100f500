"""A peer may send a message and die at any moment: its last message is received before its end is reported (G11)."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from weightsync import TransportError
from weightsync.protocol import codec
from weightsync.protocol.messages import Ack, Message, Update
from weightsync.torchrl.transports.queues import QueueChannel, QueueLink
from weightsync.transports import process as process_module
from weightsync.transports.base import Link, Waker, wait
from weightsync.transports.calls.client import CallLink
from weightsync.transports.calls.server_link import CallServerLink, Parcel, opened
from weightsync.transports.pipe.link import PipeLink
from weightsync.transports.process import ProcessWatch, own_identity

ACK = Ack(model_id="m", incarnation=1, version=1)
UPDATE = Update(model_id="m", incarnation=1, version=1, layout_digest=b"")
#: A pid above the kernel's maximum.
UNUSED_PID = 2**22
FORK = multiprocessing.get_context("fork")
#: A link, the last message of its peer, and a function by which the dying peer sends it.
Scene = tuple[Link, Message, Callable[[], object]]


@contextlib.contextmanager
def over_a_pipe() -> Iterator[Scene]:
    ours, theirs = multiprocessing.Pipe()
    link, peer = PipeLink(ours, "m"), PipeLink(theirs, "m")
    yield link, ACK, lambda: peer.send(ACK)
    peer.close()
    link.close()


@contextlib.contextmanager
def over_calls() -> Iterator[Scene]:
    call: Future[Any] = Future()

    class CallClient:
        def start(self, *_: object) -> Future[Any]:
            return call

        def close(self) -> None:
            return None

    link = CallLink(CallClient(), "the worker")
    link.send(UPDATE)
    yield link, ACK, lambda: call.set_result([ACK])
    link.close()


@contextlib.contextmanager
def over_a_call_server() -> Iterator[Scene]:
    link = CallServerLink("the sender")
    yield link, UPDATE, lambda: link.bring(0, opened(Parcel("a", 0, codec.encode(UPDATE))))
    link.close()


@contextlib.contextmanager
def over_queues() -> Iterator[Scene]:
    there, back = multiprocessing.Queue(), multiprocessing.Queue()
    link = QueueLink(QueueChannel(there, back), "m", "the worker")
    yield link, ACK, lambda: back.put(codec.encode(ACK))
    link.close()
    for queue in (there, back):
        queue.close()
        queue.join_thread()


@pytest.mark.parametrize("scene", [over_a_pipe, over_calls, over_a_call_server, over_queues])
def test_g10_watching_a_process_that_is_already_dead_ends_the_wait(
    scene: Callable[[], contextlib.AbstractContextManager[Scene]],
) -> None:
    waker = Waker()
    with scene() as (link, _, _say):
        link.watch(UNUSED_PID, 5)

        assert wait(waker, [link], 30.0) == [link]
        with pytest.raises(TransportError, match=f"process {UNUSED_PID} is dead"):
            link.receive()
    waker.close()


@pytest.mark.parametrize("scene", [over_a_pipe, over_calls, over_a_call_server])
def test_g11_a_message_sent_by_a_dying_peer_is_received_before_its_end(
    scene: Callable[[], contextlib.AbstractContextManager[Scene]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with scene() as (link, word, say):
        pid, started = own_identity()
        link.watch(pid, started)
        last_words = [say]

        def found_dead(_: ProcessWatch) -> bool:
            while last_words:
                last_words.pop()()
            return True

        monkeypatch.setattr(ProcessWatch, "dead", property(found_dead))
        assert [received.message for received in link.receive()] == [word]
        with pytest.raises(TransportError, match=f"process {pid} is dead"):
            link.receive()


def test_the_error_of_a_link_closed_by_its_peer_names_the_peers_process() -> None:
    ours, theirs = multiprocessing.Pipe()
    here, there = PipeLink(ours, "m", peer="worker 1"), PipeLink(theirs, "m")
    here.watch(*own_identity())
    there.close()
    with pytest.raises(TransportError, match=rf"worker 1 was closed by the other end, process {os.getpid()}\.$"):
        here.receive()
    here.close()


@pytest.mark.parametrize("unread", [b"", b"what it has not read resets the connection"])
@pytest.mark.parametrize("turn", range(3))  # a process closes its descriptors a moment before it is dead
def test_the_error_of_a_killed_workers_link_names_the_signal_even_after_a_reset(
    unread: bytes, turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "_DYING_MS", 30_000)  # on a busy machine this moment may be long
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=time.sleep, args=(60,), daemon=True)
    process.start()
    theirs.close()
    if unread:
        ours.send_bytes(unread)
    link, waker = PipeLink(ours, "m", peer="worker 1"), Waker()
    link.watch(process.pid, 0)
    process.kill()
    assert wait(waker, [link], 30.0) == [link]
    with pytest.raises(TransportError, match=f"worker 1 has ended: process {process.pid} is dead: .*SIGKILL"):
        link.receive()
    waker.close()
    link.close()
    process.join()
    process.close()


def test_the_error_of_a_call_to_a_killed_worker_names_the_signal() -> None:
    process, call = FORK.Process(target=time.sleep, args=(60,), daemon=True), Future[Any]()

    class CallClient:
        def start(self, *_: object) -> Future[Any]:
            return call

        def close(self) -> None:
            return None

    process.start()
    link = CallLink(CallClient(), "worker 1")
    link.watch(process.pid, 0)
    link.send(UPDATE)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    call.set_exception(TransportError("worker 1 cannot be reached."))
    ending = rf"cannot be reached\. How worker 1 ended: process {process.pid} is dead: .*SIGKILL"
    with pytest.raises(TransportError, match=ending):
        link.receive()
    link.close()
    process.join()
    process.close()
