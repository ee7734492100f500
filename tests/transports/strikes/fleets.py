"""A trainer and two workers of one transport: the interface that the tests of strikes and cuts are written for."""

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

#: What each transport needs. Tests of none of these that take long are marked `slow` beside their case.
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
    """Which fleet a test is to have."""

    transport: str
    at: WorkerPoint | TrainerPoint | str
    #: Whether one of its processes dies.
    dies: bool
    #: Whether its trainer is struck.
    led: bool


#: A function that a process is asked to call, and its arguments.
Order = tuple[Callable[..., None], tuple[Any, ...]]


class Process(abc.ABC):
    """A process that does what the test tells it, one thing after another."""

    pid: int

    @abc.abstractmethod
    def tell(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have it call a function with its setup, and go on."""

    @abc.abstractmethod
    def answered(self) -> bool:
        """Whether `answer` would not wait."""

    @abc.abstractmethod
    def answer(self) -> Any:
        """What came of it."""

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Have it call a function, and wait for what comes of it."""
        self.tell(function, *arguments)
        return self.answer()

    def is_struck(self) -> bool:
        """Whether it is stopped, or dead."""
        return bool(struck(self.pid))

    def stop(self) -> None:
        """SIGSTOP it, and wait until it is stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        gone_or_stopped(self.pid)

    def resume(self) -> None:
        """SIGCONT it."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL it, and wait until it is dead."""
        os.kill(self.pid, signal.SIGKILL)
        gone_or_stopped(self.pid)


class Child(Process):
    """A process of the test's own, as `Crew` starts them."""

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
        """Let it return, or kill it."""
        self._worker.end()


class LocalTrainer(Process):
    """The test's own process, whose calls run in a thread. It is never struck."""

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
    """A trainer and two workers of one transport. Worker 0 is the one who is struck."""

    trainer: Any
    victim: Any
    other: Any
    #: Where payloads are on their way in a worker, and in a trainer.
    worker_payload: tuple[Place, ...]
    trainer_payload: tuple[Place, ...] = ()
    #: What becomes of a worker that was killed before its handshake.
    unmet = LOST
    #: The outcomes of a worker that was killed after its answer, which may be lost with it.
    answered: tuple[OutcomeKind, ...] = (APPLIED, LOST)
    #: Whether a worker's call of `receive` is what reads its links.
    receives = True

    @abc.abstractmethod
    def join(self, worker: Any) -> Order:
        """What makes a worker's receiver."""

    @abc.abstractmethod
    def lead(self) -> Order:
        """What makes a trainer's sender."""

    @abc.abstractmethod
    def readmit(self) -> str:
        """Have a living worker in the victim's place, joined; or say why there is none."""

    def successor(self) -> Any:
        """A process that can replace a dead trainer."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027 - most have nothing
        """Leave nothing behind that the fixtures of a test do not end."""

    def outlast_stops(self) -> None:  # noqa: B027 - most have nothing
        """Have nobody given up for a stop: on a busy machine one lasts longer than the test wants."""

    def start_receiver(self, worker: Any, strike: Strike | None = None) -> None:
        """Have a worker make its receiver, and wait for it, unless it is struck first."""
        order = (start_receiver, *self.join(worker), strike)
        if strike is not None and strike.at is WorkerPoint.AHEAD:
            worker.tell(*order)
            gone_or_stopped(worker.pid)
        else:
            worker.do(*order)

    def start_sender(self, trainer: Any, strike: Strike | None = None) -> None:
        """Have a trainer make its sender; do not wait for it, if it is struck meanwhile."""
        order = (start_sender, *self.lead(), strike)
        if strike is not None and strike.at is TrainerPoint.CONNECT:
            trainer.tell(*order)
        else:
            trainer.do(*order)

    def follow(self, worker: Any, version: int) -> None:
        """Have a worker receive until that version is served."""
        if self.receives:
            worker.tell(follow, version)

    def followed(self, worker: Any, polling: bool = False) -> None:
        """Wait until it is; ``polling``: the trainer polls meanwhile."""
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
        """Make both receivers and the sender, and have both workers serve version 1."""
        for worker in (self.victim, self.other):
            self.start_receiver(worker)
        self.start_sender(self.trainer)
        self.send_to_all(1)

    def send_to_all(self, version: int) -> None:
        """A send that both workers apply."""
        for worker in (self.victim, self.other):
            self.follow(worker, version)
        report = self.trainer.do(send, float(version))
        assert report.ok, report
        for worker in (self.victim, self.other):
            self.followed(worker)
            assert (version, {float(version)}) == worker.do(holds)

    def send_without_the_victim(self, version: int) -> SyncReport:
        """A send that costs the deadline: the other worker has all the time it needs, the victim then a short one."""
        self.follow(self.other, version)
        self.trainer.do(send_async, float(version))
        self.followed(self.other, polling=True)
        report: SyncReport = self.trainer.do(wait_async, SHORT)[0]
        return report

    def goes_on(self, version: int) -> None:
        """The next send works, or says precisely why not, and works without the dead."""
        why_not = self.readmit()
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
        """Its worker is removed, and the other is served."""
        self.trainer.do(remove_worker, 0)
        self.follow(self.other, version)
        assert self.trainer.do(send, float(version)).ok
        self.followed(self.other)
        assert (version, {float(version)}) == self.other.do(holds)


def kinds(report: SyncReport) -> tuple[OutcomeKind, OutcomeKind]:
    """The outcomes of the victim's update and of the other's."""
    return report[0].kind, report[1].kind
