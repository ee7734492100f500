"""The result channel over TCP, and the trainer's messages over it."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import logging
import pickle
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from weightsync.errors import ConfigurationError, SenderClosed
from weightsync.group.channel import Frame, Held, Put, Released, TrainerEnd, WorkerEnd
from weightsync.group.reception import ChannelListener, Invitation
from weightsync.keys import SharedKey

KEY = SharedKey(b"a secret")


@pytest.fixture(params=[None, KEY], ids=["no-key", "key"])
def reception(request: pytest.FixtureRequest) -> Iterator[ChannelListener]:
    with contextlib.closing(ChannelListener("127.0.0.1", request.param)) as reception:
        yield reception


def admit(reception: ChannelListener, until: Callable[[], bool]) -> None:
    """Admit connections until a condition holds: on a busy machine, they may arrive late."""
    poller, patience = select.poll(), time.monotonic() + 60
    poller.register(reception, select.POLLIN)
    while not until():
        assert time.monotonic() < patience
        if poller.poll(10):
            reception.admit()


def is_closed(sock: socket.socket) -> bool:
    """Whether the other end has closed the connection. It never sends anything."""
    if not select.select([sock], [], [], 0)[0]:
        return False
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:  # closed with unread bytes
        return True


def test_only_invited_workers_are_admitted_and_only_once(
    reception: ChannelListener, caplog: pytest.LogCaptureFixture
) -> None:
    invitation, end = reception.expect()
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.create_connection((invitation.host, invitation.port)))
        strangers = [replace(invitation, token=bytes(32)), replace(invitation, key=None, token=bytes(32))]
        if invitation.key is not None:
            strangers.append(replace(invitation, key=None))  # knows the token, but not the key
        socks = [stack.enter_context(contextlib.closing(each.connect())) for each in strangers]
        socks[0].sendall(pickle.dumps("never unpickled"))
        admit(reception, until=lambda: all(map(is_closed, socks)))
        assert not end.attached
        assert [record.levelno for record in caplog.records] == [logging.WARNING]

        worker = WorkerEnd(invitation.connect(), capacity=1)
        worker.put("here", lambda: (3,))
        admit(reception, until=lambda: end.attached)
        assert results_of(end, 1) == [Put((3,), pickle.dumps("here", pickle.HIGHEST_PROTOCOL))]

        again = stack.enter_context(contextlib.closing(invitation.connect()))
        admit(reception, until=lambda: is_closed(again))
        assert silent.fileno() >= 0  # the silent connection does not block others
        end.close()
        assert worker.stops_within(60)
        worker.close()


def test_a_token_that_arrives_in_pieces_is_read_to_its_end_and_no_further(reception: ChannelListener) -> None:
    invitation, end = reception.expect()
    sock = socket.create_connection((invitation.host, invitation.port))
    with contextlib.closing(WorkerEnd(sock, capacity=1)) as worker:
        sock.sendall(invitation.proof[:5])
        admit(reception, until=lambda: any(stranger.shown for stranger in reception._strangers))
        sock.sendall(invitation.proof[5:])
        worker.put("here", lambda: (3,))
        admit(reception, until=lambda: end.attached)
        assert results_of(end, 1) == [Put((3,), pickle.dumps("here", pickle.HIGHEST_PROTOCOL))]
        end.close()


def test_a_worker_whose_life_was_given_up_is_not_admitted(reception: ChannelListener) -> None:
    invitation, end = reception.expect()
    end.close()
    with contextlib.closing(WorkerEnd(invitation.connect(), 1)) as worker:
        admit(reception, until=lambda: worker.stopped)


def test_all_workers_that_connect_before_the_listener_accepts_are_admitted(reception: ChannelListener) -> None:
    """Regression: of the ranks that waited together, all but the last 64 were dropped, and nothing restarts a rank."""
    expected = [reception.expect() for _ in range(70)]
    with contextlib.ExitStack() as stack:
        for invitation, _ in expected:
            stack.enter_context(contextlib.closing(invitation.connect()))
        admit(reception, until=lambda: any(end.attached for _, end in expected))
        assert all(end.attached for _, end in expected)
        for _, end in expected:
            end.close()


class ListenerWithoutDescriptors:
    """A listening socket of a process that has no free descriptor."""

    def accept(self) -> None:
        raise OSError(errno.EMFILE, "Too many open files")


def test_a_worker_without_a_free_descriptor_wakes_the_trainer_once_and_is_admitted_later(
    reception: ChannelListener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: every wait of the trainer returned at once."""
    invitation, end = reception.expect()
    poller = select.poll()
    poller.register(reception, select.POLLIN)
    with contextlib.closing(WorkerEnd(invitation.connect(), 1)):
        assert poller.poll(60_000)
        with monkeypatch.context() as full:
            full.setattr(reception, "_listener", ListenerWithoutDescriptors())
            for _ in range(2):
                reception.admit()
                assert not poller.poll(0)
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        reception.admit()
        admit(reception, until=lambda: end.attached)
        end.close()


def test_a_worker_receives_announcements_made_before_it_connected(reception: ChannelListener) -> None:
    invitation, end = reception.expect()
    end.announce(7)
    end.stop()
    with contextlib.closing(WorkerEnd(invitation.connect(), 1)) as worker:
        admit(reception, until=lambda: worker.stopped)
        assert worker.version == 7
    end.close()


def test_a_worker_that_does_not_read_delays_no_announcement_and_gets_the_newest() -> None:
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    end, worker = TrainerEnd(near), WorkerEnd(far, 1)
    for version in range(1, 10_001):
        end.announce(version)
    end.stop()
    assert end.events & select.POLLOUT  # the rest wakes the group when the socket has room
    while worker.version < 10_000 or not worker.stopped:
        assert end.read() == []
    worker.put("there is room for one", tuple)
    assert len(end.read()) == 1
    end.close()
    worker.close()


class Interrupt(Exception):
    """Raised by a user's signal handler."""


def results_of(end: TrainerEnd, count: int) -> list[Put]:
    """Wait for this many results, and return them."""
    found: list[Put] = []
    poller = select.poll()
    poller.register(end, select.POLLIN)
    while len(found) < count:
        assert poller.poll(60_000)
        found += [frame for frame in end.read() if isinstance(frame, Put)]
    return found


def test_results_of_several_threads_arrive_whole_and_within_the_capacity() -> None:
    near, far = socket.socketpair()
    end, worker = TrainerEnd(near), WorkerEnd(far, capacity=1)
    threads = [threading.Thread(target=worker.put, args=(bytes([k]) * (1 << 20), tuple)) for k in range(4)]
    for thread in threads:
        thread.start()
    seen = set()
    for _ in threads:
        (result,) = results_of(end, 1)
        time.sleep(0.01)
        assert end.read() == []  # there is room for one result only
        seen.add(bytes(set(pickle.loads(result.pickled))))
        end.make_room()
    assert seen == {bytes([k]) for k in range(4)}
    for thread in threads:
        thread.join(60)
    end.close()
    worker.close()


def test_a_result_interrupted_by_a_signal_handler_arrives_whole_with_the_next() -> None:
    near, far = socket.socketpair()
    end, worker = TrainerEnd(near), WorkerEnd(far, capacity=2)
    struck = threading.Event()

    def interrupt(*_: object) -> None:
        if not struck.is_set():
            struck.set()
            raise Interrupt

    def send_signals() -> None:
        """Send signals once a part is written. One may come just before the wait and not end it, so repeat them."""
        select.select([near], [], [], 60)
        while not struck.wait(0.01):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, interrupt)
    signalling = threading.Thread(target=send_signals)
    signalling.start()
    try:
        with pytest.raises(Interrupt):
            worker.put(bytes(1 << 24), tuple)  # the trainer reads nothing
    finally:
        struck.set()
        signalling.join()
        signal.signal(signal.SIGALRM, before)
    thread = threading.Thread(target=worker.put, args=("next", tuple))
    thread.start()
    assert [len(pickle.loads(result.pickled)) for result in results_of(end, 2)] == [1 << 24, len("next")]
    thread.join(60)
    end.close()
    worker.close()


def test_a_result_that_was_interrupted_before_it_was_queued_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each such result took up room for good, until `put` waited forever."""
    near, far = socket.socketpair()
    end, worker = TrainerEnd(near), WorkerEnd(far, capacity=1)

    def interrupted(*_: object) -> bytes:
        raise Interrupt

    with monkeypatch.context() as patch:
        patch.setattr(pickle, "dumps", interrupted)
        with pytest.raises(Interrupt):
            worker.put("interrupted", tuple)
    thread = threading.Thread(target=worker.put, args=("next", tuple), daemon=True)
    thread.start()

    assert [pickle.loads(result.pickled) for result in results_of(end, 1)] == ["next"]
    thread.join(60)
    end.close()
    worker.close()


def test_a_signal_handler_may_put_a_result_while_its_thread_waits_for_room() -> None:
    """Regression: the handler's `put` waited forever for the call that the handler had interrupted."""
    near, far = socket.socketpair()
    end, worker = TrainerEnd(near), WorkerEnd(far, capacity=1)
    worker.put("first", tuple)
    entered, found = threading.Event(), []

    def put(*_: object) -> None:
        entered.set()
        worker.put("by the handler", tuple)

    def take() -> None:
        while not entered.wait(0.01):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        for _ in range(3):
            found.extend(pickle.loads(result.pickled) for result in results_of(end, 1))
            end.make_room()

    taking = threading.Thread(target=take)
    before = signal.signal(signal.SIGUSR1, put)
    taking.start()
    try:
        worker.put("last", tuple)
    finally:
        signal.signal(signal.SIGUSR1, before)
    taking.join(60)

    assert found == ["first", "by the handler", "last"]
    end.close()
    worker.close()


@pytest.mark.parametrize("full", [True, False], ids=["waits for room", "writes"])
def test_a_put_while_the_workers_function_returns_raises_sender_closed(
    full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: `put` raised a bare ValueError about a negative descriptor."""
    near, far = socket.socketpair()
    end, worker = TrainerEnd(near), WorkerEnd(far, capacity=1)
    if full:
        worker.put("full", tuple)
    poll, calls = select.poll, itertools.count()

    def closed_before() -> select.poll:
        if full or next(calls):
            worker.close()
        return poll()

    monkeypatch.setattr(select, "poll", closed_before)
    with pytest.raises(SenderClosed, match=r"this worker.s function has returned: the result is dropped"):
        worker.put(bytes(1 << 24), tuple)
    end.close()


def interrupted_at(call: int, function: Callable[[], list[Frame]]) -> list[Frame]:
    """Call a function, and raise in it (in no finalizer) after this many of its calls of C functions have returned."""
    returned = itertools.count()

    def profile(_frame: object, event: str, _argument: object) -> None:
        if event == "c_return" and next(returned) == call:
            sys.setprofile(None)
            raise Interrupt

    gc.disable()
    sys.setprofile(profile)
    try:
        return function()
    finally:
        sys.setprofile(None)
        gc.enable()


def test_a_trainer_that_is_interrupted_while_it_reads_results_loses_none() -> None:
    near, far = socket.socketpair()
    end, worker = TrainerEnd(near), WorkerEnd(far, capacity=3)
    for size in (5, 70_000, 0):
        worker.put(bytes(size), tuple)
    for call in itertools.count():
        try:
            found = interrupted_at(call, end.read)
            break
        except Interrupt:
            continue
    assert [len(pickle.loads(result.pickled)) for result in found if isinstance(result, Put)] == [5, 70_000, 0]
    assert call > 5
    end.close()
    worker.close()


def test_a_put_that_waits_over_tcp_raises_sender_closed_when_the_trainer_closes(
    reception: ChannelListener,
) -> None:
    """TCP accepts the first bytes that are written to a connection after the other end has closed it."""
    invitation, end = reception.expect()
    worker = WorkerEnd(invitation.connect(), capacity=1)
    admit(reception, until=lambda: end.attached)
    worker.put("first", tuple)
    results_of(end, 1)
    end.close()
    with pytest.raises(SenderClosed, match="the trainer has closed its worker group"):
        worker.put("second", tuple)
    worker.close()


def test_held_and_released_messages_never_wait_for_the_trainer() -> None:
    near, far = socket.socketpair()
    end, worker = TrainerEnd(near), WorkerEnd(far, capacity=1)
    putting = threading.Thread(target=worker.put, args=(bytes(1 << 24), tuple))
    putting.start()
    while not select.select([near], [], [], 60)[0]:
        pass
    worker.mention(Held())
    worker.mention(Released())
    (result,) = results_of(end, 1)
    putting.join(60)
    assert len(result.pickled) > 1 << 24
    end.close()
    with pytest.raises(SenderClosed, match="the trainer has closed its worker group"):
        worker.mention(Held())
    worker.close()


def test_a_result_that_cannot_be_pickled_leaves_its_versions_for_the_next_result() -> None:
    near, far = socket.socketpair()
    end, worker = TrainerEnd(near), WorkerEnd(far, capacity=1)
    asked: list[str] = []

    def versions() -> tuple[int, ...]:
        asked.append("asked")
        return (1,)

    with pytest.raises(ConfigurationError, match="cannot be pickled"):
        worker.put(lambda: 0, versions)
    assert asked == []  # a call of `versions` would forget them
    worker.close()
    with pytest.raises(SenderClosed, match=r"this worker.s function has returned: the result is dropped"):
        worker.put(0, versions)
    end.close()


class Interrupted:
    """A value whose pickling is interrupted by a signal."""

    def __reduce__(self) -> tuple[type[int], tuple[()]]:
        signal.raise_signal(signal.SIGALRM)
        sum(range(1000))  # Python runs the handler between two of its instructions
        return int, ()


def test_put_raises_the_error_of_a_signal_handler_that_interrupts_pickling() -> None:
    near, far = socket.socketpair()
    end, worker = TrainerEnd(near), WorkerEnd(far, capacity=1)
    before = signal.signal(signal.SIGALRM, raise_timeout)
    try:
        with pytest.raises(TimeoutError, match="out of time"):
            worker.put(Interrupted(), tuple)
    finally:
        signal.signal(signal.SIGALRM, before)
    worker.put("the next one", tuple)
    (result,) = results_of(end, 1)
    assert pickle.loads(result.pickled) == "the next one"
    end.close()
    worker.close()


def raise_timeout(*_: object) -> None:
    raise TimeoutError("out of time")


def test_the_repr_of_an_invitation_does_not_show_the_key(reception: ChannelListener) -> None:
    invitation: Invitation = reception.expect()[0]
    assert "a secret" not in repr(invitation)
    assert (invitation.proof == invitation.token) == (invitation.key is None)


class SignallingSocket:
    """A socket on which a signal arrives after each write."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)

    def send(self, *given: object) -> int:
        nbytes = self._sock.send(*given)  # type: ignore[arg-type]
        signal.raise_signal(signal.SIGUSR1)
        return nbytes


def test_bytes_written_before_a_signal_handler_raises_are_not_written_again() -> None:
    def interrupt(*_: object) -> None:
        raise Interrupt

    near, far = socket.socketpair()
    trainer, worker = TrainerEnd(near), WorkerEnd(far, 1)
    trainer._sock, worker._sock = SignallingSocket(near), SignallingSocket(far)  # type: ignore[assignment]
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(Interrupt):
            trainer.make_room()
        with pytest.raises(Interrupt):
            worker.put("one", lambda: (1,))
    finally:
        signal.signal(signal.SIGUSR1, before)
        trainer._sock, worker._sock = near, far
    trainer.announce(7)
    worker.mention(Held())

    assert (worker.version, worker._room) == (7, 1)
    assert [type(frame) for frame in trainer.read()] == [Put, Held]
    trainer.close()
    worker.close()
