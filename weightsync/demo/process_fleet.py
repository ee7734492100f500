"""Workers that are processes of ours."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

from weightsync import TransportError
from weightsync.demo.fleet import GRACE, Body, Gone, Inbox, Listener
from weightsync.demo.grounds import Seat, ground_for
from weightsync.demo.settings import START_TIMEOUT, Settings
from weightsync.demo.wire import FromWorker, Stop, ToWorker

#: What the workers need: imported once, by the process that they are forked from.
_PRELOADED = ["weightsync.demo.rollout", "gymnasium"]


def warm_up() -> ForkServerContext:
    """Start the process that the workers are forked from; it begins at once to import what they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with _deaf_to_interrupts():
        forkserver.ensure_running()
    return context


class ProcessFleet:
    """Starts the workers and ends them.

    Each has a private pipe for the demo's own messages, read by a thread of its own: a worker that is killed while it
    writes can neither damage what others send nor block the trainer. A worker sees by its pipes when the trainer is
    gone, however that died, and ends.

    Args:
        settings: how many workers, and what they are told.
        heard: called with each message, in the thread that reads it.
        body: what they run; None: `rollout.work`.
    """

    def __init__(self, settings: Settings, heard: Listener, body: Body | None) -> None:
        context = warm_up()
        self.inbox: Inbox = queue.SimpleQueue()
        self._heard = heard
        #: How many workers there are.
        self.size = settings.workers
        self._news = threading.Condition()
        self._there: set[int] = set()
        self._gone: set[int] = set()
        self._ground = ground_for(settings.scheme, settings.workers)
        self._channels: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._readers: list[threading.Thread] = []
        try:
            for index in range(settings.workers):
                self._start(context, index, settings, body or _work())
        except BaseException:
            self.close()
            raise

    def _start(self, context: ForkServerContext, index: int, settings: Settings, body: Body) -> None:
        seat = self._ground.seat(index)
        channel, far_channel = context.Pipe()
        self._channels.append(channel)
        process = context.Process(
            target=body, args=(index, settings, seat, far_channel), name=f"rollout-{index}", daemon=True
        )
        with contextlib.closing(far_channel), _given(seat):
            process.start()
        self._processes.append(process)
        reader = threading.Thread(target=self._read, args=(index, channel), name=f"reader-{index}", daemon=True)
        self._readers.append(reader)
        reader.start()

    def _read(self, index: int, channel: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                message: FromWorker = channel.recv()
                self._note(self._there, index)
                self._heard(index, message)
                self.inbox.put((index, message))
        self._note(self._gone, index)
        self.inbox.put((index, Gone()))

    def _note(self, where: set[int], index: int) -> None:
        with self._news:
            where.add(index)
            self._news.notify_all()

    @property
    def pids(self) -> list[int | None]:
        """The process id of each worker."""
        return [process.pid for process in self._processes]

    def arguments(self) -> dict[str, Any]:
        """What `init_on_sender` is to be given to reach them, and to notice those that die before they are reached."""
        return self._ground.arguments(self._gathered, self._processes)

    def _gathered(self) -> None:
        """Wait until every worker has said something.

        Raises:
            TransportError: one has ended before, or has said nothing in time.
        """
        with self._news:
            self._news.wait_for(lambda: len(self._there) == self.size or self._gone, START_TIMEOUT)
            silent = sorted(set(range(self.size)) - self._there)
        if self._gone:
            raise TransportError(f"workers {sorted(self._gone)} have ended before the others had started.")
        if silent:
            raise TransportError(f"workers {silent} have not started within {START_TIMEOUT:g} s.")

    def tell(self, index: int, message: ToWorker) -> None:
        """Send a worker a command; one that is gone does not get it."""
        with contextlib.suppress(OSError):
            self._channels[index].send(message)

    def kill(self, index: int) -> None:
        """Send a worker SIGKILL."""
        self._processes[index].kill()

    def close(self) -> None:
        """End all workers: by command, and those who do not obey by SIGKILL."""
        deadline = time.monotonic() + GRACE
        try:
            for index in range(len(self._processes)):
                self.tell(index, Stop())
            for process in self._processes:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for process in self._processes:
                process.kill()
                process.join()
        for reader in self._readers:
            reader.join(GRACE)
        for connection in self._channels:
            connection.close()
        self._ground.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _work() -> Body:
    from weightsync.demo.rollout import work  # noqa: PLC0415 - torch takes seconds

    return work


@contextlib.contextmanager
def _given(seat: Seat) -> Iterator[None]:
    """Given away inside; this process keeps nothing of it."""
    try:
        yield
    finally:
        seat.given()


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes started inside never get SIGINT: Ctrl-C goes to the whole terminal, but is for the trainer alone."""
    resource_tracker.ensure_running()  # it would unblock the signal when started inside
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
