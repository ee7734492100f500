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


def test_a_pipe_that_another_has_emptied_is_not_ready_for_ever(linked: Linked) -> None:
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


def test_the_death_of_a_process_watched_over_one_link_ends_the_wait_for_another_of_its_connection(
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


def test_a_write_that_failed_over_one_link_is_told_over_the_other_of_its_connection(linked: Linked) -> None:
    ends = multiprocessing.Pipe()
    (one, _), (other, _) = linked("one", ends), linked("other", ends)

    class Breaks:
        def sendmsg(self, *_: object) -> int:
            raise OSError(105, "No buffer space available")

    one._channel.outlet._socket = Breaks()
    with pytest.raises(TransportError, match="No buffer space"):
        one.send(ack(1, "one"))

    assert not other.outlet.idle
    with pytest.raises(TransportError, match="No buffer space"):
        other.flush()


def test_a_nudge_ends_a_wait_and_leaves_nothing_for_the_next() -> None:
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

    assert waits.wait((), None, seen) == [], "it does not block"
    threading.Timer(0.05, waker.fire).start()
    seen = waker.fired
    assert (waits.wait((), 60.0, seen), waker.fired) == ([], seen + 1), "it has waited"


def test_a_link_that_another_thread_closes_as_it_is_asked_does_not_end_the_wait_for_the_others(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    (closing, _), (other, far), ask = linked(), linked(), Channel.waitables

    def ask_as_it_closes(channel: Channel) -> list[int]:
        closing.close()
        return ask(channel)

    far.send(ack(1))
    monkeypatch.setattr(Channel, "waitables", ask_as_it_closes)

    assert wait(Waker(), [closing, other], 30.0) == [other]
