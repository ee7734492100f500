"""The interface of a fleet: a trainer and two workers over one transport, for the tests of strikes and cuts."""

from __future__ import annotations

import abc
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from fleet import PATIENCE, Worker
from striking import (
    SHORT,
    Place,
    Strike,
    TrainerPoint,
    WorkerPoint,
    follow,
    gone_or_stopped,
    holds,
    poll,
    remove_worker,
    send,
    send_async,
    start_receiver,
    start_sender,
    struck,
    wait_async,
)

from weightsync import OutcomeKind, SyncReport
from weightsync.clock import Deadline

APPLIED, LOST, TIMED_OUT = OutcomeKind.APPLIED, OutcomeKind.LOST, OutcomeKind.TIMED_OUT

#: The marks that each transport needs. Slow tests over other transports are marked `slow` at their cases.
MARKS: dict[str, tuple[Any, ...]] = {
    "ray": (
        pytest.mark.ray,
        pytest.mark.timeout(300),
        # Ray's C++ and its background threads leave sockets and files to the garbage collector.
        pytest.mark.filterwarnings("ignore::ResourceWarning"),
    ),
    "rpc": (pytest.mark.rpc,),
    "store": (pytest.mark.gloo,),
    "fanout": (pytest.mark.gloo,),
}


@dataclass(frozen=True)
class Wanted:
    """The fleet that a test asks for."""

    transport: str
    at: WorkerPoint | TrainerPoint | str
    #: Whether one of its processes dies.
    dies: bool
    #: Whether its trainer is struck, so that the trainer needs a process of its own.
    led: bool


#: A function for a process to call, and its arguments.
Order = tuple[Callable[..., None], tuple[Any, ...]]


class Process(abc.ABC):
    """A process that runs functions for the test, one after another."""

    pid: int

    @abc.abstractmethod
    def tell(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have the process call a function with its setup, without waiting."""

    @abc.abstractmethod
    def answered(self) -> bool:
        """Whether `answer` would return without waiting."""

    @abc.abstractmethod
    def answer(self) -> Any:
        """Wait for the oldest call's result."""

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Have the process call a function, and wait for the result."""
        self.tell(function, *arguments)
        return self.answer()

    def is_struck(self) -> bool:
        """Whether the process is stopped or dead."""
        return bool(struck(self.pid))

    def stop(self) -> None:
        """Send SIGSTOP, and wait until the process is stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        gone_or_stopped(self.pid)

    def resume(self) -> None:
        """Send SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process is dead."""
        os.kill(self.pid, signal.SIGKILL)
        gone_or_stopped(self.pid)


class Child(Process):
    """A child process of the test, as `Crew` starts them."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self.pid, self.pipe = worker, worker.pid, worker.pipe

    def tell(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._worker.tell(function, *arguments)

    def answered(self) -> bool:
        return self._worker.answered()

    def answer(self) -> Any:
        return self._worker.answer()

    def kill(self) -> None:
        self._worker.kill()

    def end(self) -> None:
        """Let the process return, or kill it."""
        self._worker.end()


class LocalTrainer(Process):
    """The test's process, which runs calls in a thread and is never struck."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.setup = SimpleNamespace(kept={}, schemes=[], model=None)
        self._thread = ThreadPoolExecutor(1)
        self._calls: list[Future[Any]] = []

    def tell(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._calls.append(self._thread.submit(function, self.setup, *arguments))

    def answered(self) -> bool:
        return self._calls[0].done()

    def answer(self) -> Any:
        return self._calls.pop(0).result(PATIENCE)

    def close(self) -> None:
        for scheme in self.setup.schemes:
            scheme.close()
        self._thread.shutdown()


class Fleet(abc.ABC):
    """A trainer and two workers of one transport. Worker 0 is the victim of strikes."""

    trainer: Any
    victim: Any
    other: Any
    #: The functions in which a worker, or a trainer, is in the middle of a payload.
    worker_payload: tuple[Place, ...]
    trainer_payload: tuple[Place, ...] = ()
    #: The outcome of a worker that was killed before its handshake.
    outcome_before_handshake = LOST
    #: The possible outcomes of a worker that was killed after its answer, which may be lost with the worker.
    answered: tuple[OutcomeKind, ...] = (APPLIED, LOST)
    #: Whether workers read their links in `receive`, rather than in calls.
    receives = True

    @abc.abstractmethod
    def receiver_order(self, worker: Any) -> Order:
        """The order that creates a worker's receiver."""

    @abc.abstractmethod
    def sender_order(self) -> Order:
        """The order that creates a trainer's sender."""

    @abc.abstractmethod
    def replace_victim(self) -> str:
        """Add a worker in the victim's place. Returns why that is impossible, or an empty string."""

    def successor(self) -> Any:
        """The process that replaces a dead trainer."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027 - most subclasses need nothing here
        """Close what the fixtures of a test do not end."""

    def outlast_stops(self) -> None:  # noqa: B027 - most subclasses need nothing here
        """Prevent stopped processes from being reported lost: on a busy machine a stop may last long."""

    def start_receiver(self, worker: Any, strike: Strike | None = None) -> None:
        """Have a worker create its receiver. Waits until it has, or until it is struck before that."""
        order = (start_receiver, *self.receiver_order(worker), strike)
        if strike is not None and strike.at is WorkerPoint.AHEAD:
            worker.tell(*order)
            gone_or_stopped(worker.pid)
        else:
            worker.do(*order)

    def start_sender(self, trainer: Any, strike: Strike | None = None) -> None:
        """Have a trainer create its sender. Waits until it has, unless the strike comes meanwhile."""
        order = (start_sender, *self.sender_order(), strike)
        if strike is not None and strike.at is TrainerPoint.CONNECT:
            trainer.tell(*order)
        else:
            trainer.do(*order)

    def follow(self, worker: Any, version: int) -> None:
        """Have a worker receive until it serves this version, without waiting."""
        if self.receives:
            worker.tell(follow, version)

    def followed(self, worker: Any, polling: bool = False) -> None:
        """Wait until the worker serves the version of `follow`; the trainer polls meanwhile if ``polling``."""
        if self.receives:
            if polling:
                self.poll_until(worker.answered)
            worker.answer()

    def poll_until(self, condition: Callable[[], bool]) -> None:
        """Have the trainer poll until the condition holds."""
        deadline = Deadline(PATIENCE)
        while not condition():
            assert not deadline.passed, f"{condition} never came true"
            self.trainer.do(poll)
            time.sleep(0.005)

    def start(self) -> None:
        """Create both receivers and the sender, and send version 1 to both workers."""
        for worker in (self.victim, self.other):
            self.start_receiver(worker)
        self.start_sender(self.trainer)
        self.send_to_all(1)

    def send_to_all(self, version: int) -> None:
        """Send a version, and check that both workers apply it."""
        for worker in (self.victim, self.other):
            self.follow(worker, version)
        report = self.trainer.do(send, float(version))
        assert report.ok, report
        for worker in (self.victim, self.other):
            self.followed(worker)
            assert (version, {float(version)}) == worker.do(holds)

    def send_without_the_victim(self, version: int) -> SyncReport:
        """Send while the victim does not answer: first wait for the other worker, then for a short deadline."""
        self.follow(self.other, version)
        self.trainer.do(send_async, float(version))
        self.followed(self.other, polling=True)
        report: SyncReport = self.trainer.do(wait_async, SHORT)[0]
        return report

    def goes_on(self, version: int) -> None:
        """Check the next send after the victim's loss.

        The send works if a worker can replace the victim. Otherwise its report names the reason, and sends work again
        once the victim is removed.
        """
        why_not = self.replace_victim()
        if not why_not:
            self.send_to_all(version)
            return
        self.follow(self.other, version)
        report = self.trainer.do(send, float(version))
        assert (LOST, APPLIED) == kinds(report)
        assert why_not in report[0].reason
        self.followed(self.other)
        self.goes_on_without_the_victim(version + 1)

    def goes_on_without_the_victim(self, version: int) -> None:
        """Remove the victim from the sender's workers, and check that the other worker applies the next send."""
        self.trainer.do(remove_worker, 0)
        self.follow(self.other, version)
        assert self.trainer.do(send, float(version)).ok
        self.followed(self.other)
        assert (version, {float(version)}) == self.other.do(holds)


def kinds(report: SyncReport) -> tuple[OutcomeKind, OutcomeKind]:
    """The outcomes of the victim's update and of the other's."""
    return report[0].kind, report[1].kind
