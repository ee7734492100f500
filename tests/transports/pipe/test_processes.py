"""Links between real processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from weakref import WeakKeyDictionary, WeakSet

import pytest
import transport_workers as workers
from pools import statistics
from transport_workers import in_a_fork

from weightsync.errors import TransportError
from weightsync.protocol.messages import Ack, Bye, Hello, Update
from weightsync.transports.base import Payloads, Waker, wait
from weightsync.transports.buffers import Pool
from weightsync.transports.pipe.link import PipeLink

FORK = multiprocessing.get_context("fork")
_unheard: WeakKeyDictionary[PipeLink, list] = WeakKeyDictionary()
BYE = Bye(model_id=workers.MODEL, incarnation=1)


@pytest.fixture
def start() -> Iterator[Callable]:
    """A function that starts a process with one end of a pipe, and returns it and a link over the other end."""
    begun: list[tuple[multiprocessing.Process, PipeLink | None]] = []

    def begin(target: Callable, *args: object, context=FORK, keep: tuple[Connection, ...] = (), **options: object):
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *args), daemon=True)
        process.start()
        if theirs not in keep:
            theirs.close()
        link = PipeLink(ours, workers.MODEL, peer="worker 0", **options)
        begun.append((process, link))
        return process, link

    yield begin
    for process, link in begun:
        link.close()
        process.kill()
        process.join()
        process.close()


def hear(link: PipeLink, count: int = 1) -> list:
    """Receive the next ``count`` messages. The peer's process is watched from its Hello on."""
    waker, heard = Waker(), _unheard.setdefault(link, [])
    while len(heard) < count:
        assert wait(waker, [link], 90.0)
        link.flush()
        heard += [received.message for received in link.receive()]
    _unheard[link] = heard[count:]
    for message in heard[:count]:
        if isinstance(message, Hello):
            link.watch(message.pid, message.started)
    return heard[:count]


def ending(link: PipeLink) -> tuple[list, str]:
    """Receive until the link ends. Returns the last messages, and the reason of the end."""
    waker, heard = Waker(), []
    while True:
        assert wait(waker, [link], 30.0)
        try:
            heard += link.receive()
        except TransportError as error:
            return heard, str(error)


def update(version: int, nbytes: int) -> Update:
    return Update(model_id=workers.MODEL, incarnation=1, version=version, layout_digest=b"", nbytes=nbytes)


def publish(link: PipeLink, pool: Pool, version: int, nbytes: int) -> None:
    buffer = pool.acquire(nbytes)
    buffer.view[:nbytes] = bytes([version % 256]) * nbytes
    link.send(update(version, nbytes), buffer)


def answered(link: PipeLink, version: int, *, shared: bool) -> None:
    assert [Ack(model_id=workers.MODEL, incarnation=1, version=version)] == hear(link)
    assert link.user.poll(30.0)
    assert ("acked", version, shared) == link.user.recv()


@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize("payloads", Payloads)
def test_versions_are_received_and_acked_by_another_process(start, request, method, payloads):
    context = FORK if method == "fork" else request.getfixturevalue("forkserver")
    process, link = start(workers.echo, context=context, payloads=payloads)
    pool = Pool()
    assert isinstance(hear(link)[0], Hello)
    for version in range(1, 10):
        publish(link, pool, version, 1000 if version == 5 else 300_000)
        answered(link, version, shared=payloads is Payloads.SHARED and version != 5)
    link.send(BYE)
    process.join(30)

    assert process.exitcode == 0


def test_versions_are_received_and_acked_by_a_spawned_process(start):
    process, link = start(workers.echo, context=multiprocessing.get_context("spawn"))
    pool = Pool()
    for version in (1, 2, 3):
        publish(link, pool, version, 300_000)
    assert isinstance(hear(link)[0], Hello)
    answered(link, 1, shared=True)
    assert [message.version for message in hear(link, 2)] == [2, 3]
    link.send(BYE)
    process.join(30)

    assert process.exitcode == 0


def test_a_killed_peer_is_detected_even_if_a_sibling_holds_its_end_of_the_pipe(start):
    ours, theirs = FORK.Pipe()
    victim = FORK.Process(target=workers.stay, args=(theirs,), daemon=True)
    victim.start()
    sibling = FORK.Process(target=workers.hold, args=(theirs,), daemon=True)
    sibling.start()
    link = PipeLink(ours, workers.MODEL, peer="worker 3")
    hear(link)
    os.kill(victim.pid, signal.SIGKILL)
    heard, why = ending(link)

    assert heard == []
    assert f"worker 3 has ended: process {victim.pid} is dead" in why
    link.close()
    theirs.close()
    for process in (victim, sibling):
        process.kill()
        process.join()
        process.close()


def test_messages_of_a_killed_peer_are_received_before_its_end(start):
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=workers.last_words, args=(theirs,), daemon=True)
    process.start()
    link = PipeLink(ours, workers.MODEL)
    process.join()
    pid, started = process.pid, 0
    link.watch(pid, started)
    heard, why = ending(link)

    assert list(range(1, 51)) == [received.message.version for received in heard[1:]]
    assert f"process {pid} is dead" in why
    link.close()
    theirs.close()
    process.close()


def test_a_dead_workers_buffer_is_freed_and_a_living_workers_buffer_is_retired(start):
    process, link = start(workers.stay)
    _, other = start(workers.stay)
    pool = Pool()
    for each in (link, other):
        hear(each)
    held, retired = pool.acquire(300_000), None
    link.send(update(1, 300_000), held)
    retired = pool.acquire(300_000)
    other.send(update(1, 300_000), retired)
    assert held is not retired
    process.kill()
    process.join()
    ending(link)
    link.close()
    other.close()

    assert [(buffer.pinned, buffer.retired) for buffer in (held, retired)] == [(False, False), (False, True)]
    assert held is pool.acquire(300_000)


def test_a_dead_trainers_memory_stays_readable_and_leaves_no_name(start):
    """The leak check of tests/conftest.py finds names in shared memory after every test."""
    _, link = start(workers.trainer_that_dies, 300_000)
    received = []
    while len(received) < 2:
        wait(Waker(), [link], 30.0)
        received += link.receive()
    link.watch(received[0].message.pid, received[0].message.started)
    link.user.send("die")
    ending(link)

    assert received[1].payload == b"t" * 300_000


# -------------------------------------------------------------------------------------------------- fork


def test_an_inherited_link_raises_in_the_child_and_works_in_the_parent(linked):
    first, second = linked()
    waker, buffer = Waker(), Pool().acquire(300_000)
    first.send(update(1, 300_000), buffer)
    first.user.send("kept")

    def check() -> None:
        for use in (first.receive, second.receive, first.flush, lambda: first.send(BYE)):
            with pytest.raises(TransportError, match="inherited over a fork"):
                use()
        with pytest.raises(TransportError, match="forked from"):
            buffer.view[:1]
        waker.fire()
        for link in (first, second):
            assert link.waitables() == [-1] or not link.waitables()
            link.close()

    in_a_fork(check)

    assert wait(waker, [first], 0.0) == []
    assert [update(1, 300_000).version] == [received.message.version for received in second.receive()]
    assert second.user.recv() == "kept"
    second.send(BYE)
    assert [received.message for received in first.receive()] == [BYE]


@contextlib.contextmanager
def held_by_another_thread(*locks: AbstractContextManager) -> Iterator[None]:
    """In the block, another thread holds these locks."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            held.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    try:
        yield
    finally:
        done.set()
        holder.join()


def test_an_inherited_waker_is_closed_in_the_child_though_another_thread_held_its_lock():
    waker = Waker()

    def check() -> None:
        assert waker.fileno() == -1
        assert waker.enter() is None
        waker.fire()
        waker.close()

    with held_by_another_thread(waker._lock):
        in_a_fork(check)

    assert (waker.fired, wait(waker, [], 0.0)) == (0, [])
    waker.close()


def test_a_channel_is_dropped_in_the_child_though_another_thread_held_the_locks_of_its_wakers(linked, monkeypatch):
    first, _ = linked()
    channel, user = first._channel, first._channel.user_waker()

    def check() -> None:
        channel.forget()
        assert (user.fileno(), first._box.waker.fileno()) == (-1, -1)

    # The order in which a child drops inherited objects is undefined, so `check` drops the channel itself.
    monkeypatch.setattr("weightsync.transports.process._inherited", WeakSet())
    with held_by_another_thread(first._box.waker._lock, user._lock):
        in_a_fork(check)

    assert user.fired == 0
    assert user.fileno() >= 0


def test_a_forked_child_can_create_links_over_inherited_pipes():
    ends = multiprocessing.Pipe()
    mine = PipeLink(ends[0], workers.MODEL)

    def check() -> None:
        link = PipeLink(ends[1], workers.MODEL)
        workers.hello(link)
        wait(Waker(), [link], 10.0)
        assert [received.message for received in link.receive()] == [BYE]

    mine.send(BYE)
    in_a_fork(check)

    assert isinstance(hear(mine)[0], Hello)
    mine.close()
    ends[1].close()


def test_a_fork_while_another_thread_uses_the_link_does_not_hang(linked):
    first, second = linked()
    stop = threading.Event()

    def talk() -> None:
        while not stop.is_set():
            first.send(BYE)
            second.receive()

    talker = threading.Thread(target=talk)
    talker.start()
    try:
        for _ in range(10):
            in_a_fork(first.close)
    finally:
        stop.set()
        talker.join()

    assert first.flush()


# ---------------------------------------------------------------------------------------------- liveness


def test_a_dead_peer_named_by_a_hello_ends_the_wait(linked):
    process = FORK.Process(target=int)
    process.start()
    process.join()
    first, _ = linked()
    first.watch(process.pid, 5)
    _, why = ending(first)

    assert f"process {process.pid} is dead" in why
    process.close()


# ------------------------------------------------------------------------------------------------- torn


def test_workers_never_read_a_payload_with_parts_of_two_versions(start):
    pool, nbytes, waker = Pool(), 256 * 1024, Waker()
    links = [start(workers.check_torn, linger)[1] for linger in (0.0, 0.002)]
    for link in links:
        hear(link)
    acked = [0] * len(links)
    for version in range(1, 200):
        buffer = pool.acquire(nbytes)
        buffer.view[:] = bytes([version % 251]) * nbytes
        for link in links:
            link.send(update(version, nbytes), buffer)
        while min(acked) < version - 3:
            ready = wait(waker, links, 30.0)
            assert ready
            for link in ready:
                for received in link.receive():
                    acked[links.index(link)] = received.message.version
    for link in links:
        link.send(BYE)
        assert link.user.poll(30.0)
        assert link.user.recv() == 0

    assert statistics(pool).segments <= 8
