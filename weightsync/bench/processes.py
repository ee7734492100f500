"""The workers of a contender as one, counting calls, and variables of the environment."""

from __future__ import annotations

import contextlib
import enum
import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch.multiprocessing  # noqa: F401 - teaches multiprocessing to pickle tensors

from weightsync.bench.settings import START_TIMEOUT, BenchError
from weightsync.bench.watching import forget, watch
from weightsync.local_workers import LocalWorker, LocalWorkerError, stop


class Ask(enum.Enum):
    """A request to a worker, over a pipe of its own beside what is measured. None instead of one ends the worker."""

    #: The digest of the weights that it has now.
    DIGEST = "digest"
    #: How many Python calls the next version costs: answers at once, and with the number after that version.
    CALLS = "calls"


class Workers:
    """Worker processes on this machine. The first answer of each is "ready"."""

    def __init__(
        self, name: str, work: Callable[..., None], arguments: Sequence[tuple[Any, ...]], method: str = "forkserver"
    ) -> None:
        context = multiprocessing.get_context(method)
        self._workers = [
            LocalWorker(f"{name}: worker {index}", work, own, context) for index, own in enumerate(arguments)
        ]

    @property
    def processes(self) -> list[Any]:
        """The processes, for a scheme that watches them."""
        return [worker.process for worker in self._workers]

    @property
    def channels(self) -> list[Connection]:
        """The pipe of each worker."""
        return [worker.channel for worker in self._workers]

    def start(self) -> None:
        """Start the processes. They have not said that they are ready yet."""
        for worker in self._workers:
            worker.start()
            watch(worker.pid, worker.name)

    def gather(self) -> dict[int, Any]:
        """The next answer of each worker. Raises BenchError: one failed, ended, or did not answer."""
        return {index: self.answer_of(index) for index in range(len(self._workers))}

    def ask(self, request: Ask) -> dict[int, Any]:
        """Ask every worker, and return the answers."""
        with _as_bench_errors():
            for worker in self._workers:
                worker.ask(request)
        return self.gather()

    def ask_one(self, index: int, request: Ask) -> Any:
        """Ask one worker, and return its answer."""
        with _as_bench_errors():
            self._workers[index].ask(request)
        return self.answer_of(index)

    def answer_of(self, index: int) -> Any:
        """The next answer of one worker."""
        with _as_bench_errors():
            return self._workers[index].answer(START_TIMEOUT)

    def close(self) -> None:
        """Ask all workers to stop, and kill those that do not."""
        for worker in self._workers:
            forget(worker.process.pid)
        stop(self._workers)


@contextlib.contextmanager
def _as_bench_errors() -> Iterator[None]:
    try:
        yield
    except LocalWorkerError as error:
        raise BenchError(str(error)) from error


def calls_of(action: Callable[[], object]) -> int:
    """How many calls of Python functions an action makes in this thread, the garbage collector's left out."""
    count = 0

    def tick(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    gc.disable()
    sys.setprofile(tick)
    try:
        action()
    finally:
        sys.setprofile(before)
        gc.enable()
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
