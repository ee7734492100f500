"""Waits for links ask them for their descriptors when these may have changed, and miss no event."""

from __future__ import annotations

import multiprocessing
import subprocess
import threading
from collections.abc import Callable

import pytest

from weightsync.errors import TransportError
from weightsync.protocol.messages import Ack, Update
from weightsync.transports.base import Waits, Waker, wait
from weightsync.transports.buffers import Buffer
from weightsync.transports.pipe.connection import Channel
from weightsync.transports.pipe.link import PipeLink
from weightsync.transports.process import started_at

Linked = Callable[..., tuple[PipeLink, PipeLink]]


def ack(version: int, model_id: str = "policy") -> Ack:
    return Ack(model_id=model_id, incarnation=1, version=version)


def test_a_pipe_is_asked_for_its_descriptors_once(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    (first, second), asked, ask = linked(), [], PipeLink.waitables
    monkeypatch.setattr(PipeLink, "waitables", lambda link: asked.append(link) or ask(link))
    waits, links = Waits(Waker()), (second,)
    assert waits.wait(links, 0.0) == []
    for version in (1, 2, 3):
        first.send(ack(version))
        assert waits.wait(links, 30.0) == [second]
        assert [received.message.version for received in second.receive()] == [version]
        assert waits.wait(links, 0.0) == []

    assert asked == [second]


def test_a_link_flushed_by_another_thread_is_reported_ready_only_once(linked: Linked) -> None:
    first, second = linked()
    waits, links, nbytes = Waits(Waker()), (first,), 2**20
    first.send(Update(model_id="policy", incarnation=1, version=1, layout_digest=b"", nbytes=nbytes), Buffer(nbytes))
    assert not first.outlet.idle
    assert waits.wait(links, 0.0) == []
    while not first.flush():  # as another thread, or another model's link over the same connection, would do
        second.receive()
    assert [received.message.version for received in second.receive()] == [1]
    assert waits.wait(links, 0.0) == [first]

    assert waits.wait(links, 0.0) == []


def test_the_death_of_a_watched_process_ends_the_wait_for_another_link_of_the_connection(
    linked: Linked,
) -> None:
    ends = multiprocessing.Pipe()
    (one, _), (other, _) = linked("one", ends), linked("other", ends)
    waits, links = Waits(Waker()), (other,)
    assert waits.wait(links, 0.0) == []
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            one.watch(process.pid, started_at(process.pid) or 0)
            assert waits.wait(links, 30.0) == [other]
            assert other.receive() == []
        finally:
            process.kill()
        assert waits.wait(links, 30.0) == [other]
    with pytest.raises(TransportError, match=f"process {process.pid} is dead"):
        other.receive()


def test_a_failed_write_on_one_link_is_raised_on_the_other_link_of_the_connection(linked: Linked) -> None:
    ends = multiprocessing.Pipe()
    (one, _), (other, _) = linked("one", ends), linked("other", ends)

    class FailingSocket:
        def sendmsg(self, *_: object) -> int:
            raise OSError(105, "No buffer space available")

    one._channel.outlet._socket = FailingSocket()
    with pytest.raises(TransportError, match="No buffer space"):
        one.send(ack(1, "one"))

    assert not other.outlet.idle
    with pytest.raises(TransportError, match="No buffer space"):
        other.flush()


def test_a_nudge_ends_one_wait_and_not_the_next() -> None:
    waker = Waker()
    waits, begun, ended = Waits(waker), threading.Event(), []
    seen = waker.fired

    def wait() -> None:
        begun.set()
        ended.append(waits.wait((), 60.0, seen))

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert begun.wait(30.0)
    waker.nudge()
    waiting.join(30.0)
    assert ended == [[]]
    seen = waker.fired
    waker.nudge()

    assert waits.wait((), None, seen) == [], "a wait after a nudge does not block"
    threading.Timer(0.05, waker.fire).start()
    seen = waker.fired
    assert (waits.wait((), 60.0, seen), waker.fired) == ([], seen + 1), "without a nudge it waits for the waker"


def test_a_link_closed_by_another_thread_during_a_wait_does_not_hide_ready_links(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    (closing, _), (other, far), ask = linked(), linked(), Channel.waitables

    def ask_as_it_closes(channel: Channel) -> list[int]:
        closing.close()
        return ask(channel)

    far.send(ack(1))
    monkeypatch.setattr(Channel, "waitables", ask_as_it_closes)

    assert wait(Waker(), [closing, other], 30.0) == [other]
