"""Worker processes: starting them, asking them, and ending them. None outlives the run, however it ends."""

from __future__ import annotations

import contextlib
import enum
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.multiprocessing  # teaches multiprocessing to pickle tensors

from weightsync.bench.settings import START_TIMEOUT, BenchError

#: How many seconds workers have to end by themselves.
_STOP_TIMEOUT = 3.0


class Ask(enum.Enum):
    """A request to a worker, over a pipe of its own beside what is measured."""

    #: The digest of the weights that it has now.
    DIGEST = "digest"
    #: How many Python calls the next version costs: answers at once, and with the number after that version.
    CALLS = "calls"
    STOP = "stop"


def start_forkserver(modules: Sequence[str]) -> None:
    """Start the process that workers are forked from. It imports their modules once for all of them."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
    resource_tracker.ensure_running()  # if it started below, it would unblock the signal
    # Ctrl-C goes to all processes of the terminal, but only the trainer should handle it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Workers:
    """Worker processes on this machine, each with a pipe for requests. The first answer of each is "ready"."""

    def __init__(
        self, name: str, work: Callable[..., None], arguments: Sequence[tuple[Any, ...]], method: str = "forkserver"
    ) -> None:
        self._name = name
        context: Any = multiprocessing.get_context(method)
        pipes = [context.Pipe() for _ in arguments]
        self.channels: list[connection.Connection] = [near for near, _ in pipes]
        self._far_ends = [far for _, far in pipes]
        self.processes: list[BaseProcess] = [
            context.Process(target=enter, args=(work, far, *own), name=f"{name}-{index}", daemon=True)
            for index, (far, own) in enumerate(zip(self._far_ends, arguments, strict=True))
        ]

    def start(self) -> None:
        """Start the processes. They have not said that they are ready yet.

        Raises BenchError: a process could not be started.
        """
        for process, far in zip(self.processes, self._far_ends, strict=True):
            with far:  # closed in this process, so that the pipe ends with the worker
                process.start()

    def gather(self) -> dict[int, Any]:
        """The next answer of each worker. Raises BenchError: one failed, ended, or did not answer."""
        return {index: self.answer_of(index) for index in range(len(self.channels))}

    def ask(self, request: Ask) -> dict[int, Any]:
        """Ask every worker, and return the answers."""
        for index, channel in enumerate(self.channels):
            try:
                channel.send(request)
            except OSError as error:
                raise BenchError(f"{self._name}: worker {index} has ended.") from error
        return self.gather()

    def ask_one(self, index: int, request: Ask) -> Any:
        """Ask one worker, and return its answer."""
        self.channels[index].send(request)
        return self.answer_of(index)

    def answer_of(self, index: int) -> Any:
        """The next answer of one worker."""
        try:
            if not self.channels[index].poll(START_TIMEOUT):
                raise BenchError(f"{self._name}: worker {index} has not answered within {START_TIMEOUT:g} s.")
            answer = self.channels[index].recv()
        except (EOFError, OSError) as error:
            raise BenchError(f"{self._name}: worker {index} has ended.") from error
        if isinstance(answer, Failure):
            raise BenchError(f"{self._name}: worker {index} failed: {answer}")
        return answer

    def close(self) -> None:
        """Ask all workers to stop, and kill those that do not."""
        running = [process for process in self.processes if process.pid is not None]
        until = time.monotonic() + _STOP_TIMEOUT
        try:
            for channel in self.channels:
                with contextlib.suppress(OSError):
                    channel.send(Ask.STOP)
            for process in running:
                process.join(max(0.0, until - time.monotonic()))
        finally:
            for process in running:
                process.kill()
                process.join()
            for channel in (*self.channels, *self._far_ends):
                channel.close()


class Failure(str):
    """A worker's last answer: the error that ended it, with its traceback."""


@contextlib.contextmanager
def failures_sent(channel: connection.Connection) -> Iterator[None]:
    """Report an error of a worker to the trainer, if that is still there."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is
        with contextlib.suppress(OSError):
            channel.send(Failure(f"{type(error).__name__}: {error}\n{traceback.format_exc().rstrip()}"))


def enter(work: Callable[..., None], channel: connection.Connection, *arguments: Any) -> None:
    """Run a worker process until its function returns or the trainer is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C, and then ends the workers
    torch.set_num_threads(1)
    with failures_sent(channel):
        work(channel, *arguments)
    # Threads of TorchRL's and of torch's RPC would keep the process.
    sys.stdout.flush()
    os._exit(0)


def calls_of(action: Callable[[], object]) -> int:
    """How many calls of Python functions an action makes in this thread."""
    count = 0

    def tick(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(tick)
    try:
        action()
    finally:
        sys.setprofile(before)
    return count


@contextlib.contextmanager
def environment(words: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment that are not set, for this process and what it starts."""
    new = {name: value for name, value in words.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)
