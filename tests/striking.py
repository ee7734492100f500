"""Who is struck in the middle of a send, and where: each point enumerated, and hit exactly, by the victim's own hand.

What is asked of every transport stands here (`KilledWorker` ...); what a transport has of its own is its `Field`.
"""

from __future__ import annotations

import abc
import contextlib
import enum
import importlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fleet import PATIENCE, filled, stat_of
from torch import nn

from weightsync import OutcomeKind, SyncReport
from weightsync.clock import Deadline
from weightsync.protocol._tables import ReceiverInput, SenderInput, State

#: Seconds that a send waits for somebody who is stopped; and within which a death is noticed on a busy machine.
SHORT = 0.5
SOON = 10.0


class Blow(enum.IntEnum):
    """What somebody is struck with."""

    KILL = signal.SIGKILL
    STOP = signal.SIGSTOP


class At(enum.StrEnum):
    """Where a worker is struck."""

    AHEAD = "before the handshake"
    HANDSHAKE = "at the handshake"
    PAYLOAD = "mid-payload"
    ARRIVED = "before applying"
    APPLIED = "before the answer"
    ANSWERED = "after the answer"
    IDLE = "idle"
    OUTSTANDING = "while send_async is outstanding"


class TrainerAt(enum.StrEnum):
    """Where a trainer is struck."""

    CONNECT = "before its hello leaves"
    DISPATCH = "before the dispatch"
    PAYLOAD = "mid-payload"
    ANSWERED = "after the first answer"
    IDLE = "idle"
    OUTSTANDING = "while send_async is outstanding"


_RECEIVED = {
    At.HANDSHAKE: ReceiverInput.CONNECT,
    At.ARRIVED: ReceiverInput.UPDATE,
    At.APPLIED: ReceiverInput.APPLIED,
    At.ANSWERED: ReceiverInput.ANSWERED,
}
_SENT = {
    TrainerAt.CONNECT: SenderInput.CONNECT,
    TrainerAt.DISPATCH: SenderInput.SEND,
    TrainerAt.ANSWERED: SenderInput.REPLY,
}
#: Struck from without.
FROM_WITHOUT = (At.IDLE, At.OUTSTANDING, TrainerAt.IDLE, TrainerAt.OUTSTANDING)


@dataclass(frozen=True)
class Place:
    """A function of ours in which payloads are on their way: struck as it begins, or, ``after``, as it has ended."""

    module: str
    owner: str
    name: str
    #: Which of its calls.
    time: int = 1
    after: bool = False

    def arm(self, act: Callable[[], None]) -> None:
        """Have ``act`` called there."""
        holder: Any = importlib.import_module(self.module)
        holder = getattr(holder, self.owner) if self.owner else holder
        real, left = getattr(holder, self.name), [self.time]

        def struck(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if not self.after and left[0] == 0:
                act()
            result = real(*arguments, **named)
            if self.after and left[0] == 0:
                act()
            return result

        setattr(holder, self.name, struck)


@dataclass(frozen=True)
class Strike:
    """One blow, once."""

    at: At | TrainerAt
    blow: Blow
    mid_payload: Place

    def now(self) -> None:
        """Be struck, here and now."""
        os.kill(os.getpid(), self.blow)

    def ahead(self) -> None:
        """Be struck before there is a receiver, or be armed for what needs none."""
        if self.at is At.AHEAD:
            self.now()
        elif self.at in (At.PAYLOAD, TrainerAt.PAYLOAD):
            self.mid_payload.arm(self.now)

    def arm(self, machine: Any) -> None:
        """Have this process struck as its machine takes the input that stands for the point."""
        inputs: dict[Any, Any] = {**_RECEIVED, **_SENT}
        if self.at not in inputs:
            return
        left = [1]

        def look(_before: Any, taken: Any, _after: Any) -> None:
            if taken is inputs[self.at] and left[0]:
                left[0] -= 1
                self.now()

        machine.observe(look)


def megabytes(fill: float = 0.0) -> nn.Module:
    """Weights that no pipe and no socket holds at once: 4 MiB."""
    return filled(nn.Linear(1024, 1024), fill)


# ------------------------------------------------------------------------------------------- told to processes


def enlist(setup: Any, join: Callable[..., None], arguments: tuple[Any, ...], strike: Strike | None) -> None:
    """Make a receiver, which may be struck later; or be struck first."""
    if strike is not None:
        strike.ahead()
    join(setup, *arguments)
    if strike is not None:
        strike.arm(setup.receiver.driver.machine)


def take_command(setup: Any, lead: Callable[..., None], arguments: tuple[Any, ...], strike: Strike | None) -> None:
    """Make a sender; armed before its links are laid."""
    if strike is not None and strike.at is TrainerAt.CONNECT:
        sender = importlib.import_module("weightsync.engine.sender_driver")
        real = sender.SenderMachine

        def armed() -> Any:
            machine = real()
            strike.arm(machine)
            return machine

        sender.SenderMachine = armed
    lead(setup, *arguments)


def arm_sender(setup: Any, strike: Strike) -> None:
    """Have the trainer struck in its next send."""
    strike.ahead()
    strike.arm(setup.kept["sender"]._driver.machine)


def follow(setup: Any, version: int) -> int | None:
    """Receive until that version is served, and its answer has left."""
    while (setup.receiver.version or 0) < version:
        assert setup.receiver.receive(timeout=PATIENCE)
    while setup.receiver.state is State.AWAITING_ACK:
        setup.receiver.receive(timeout=0.01)
    served: int | None = setup.receiver.version
    return served


def follow_anew(setup: Any, before: int | None) -> int | None:
    """Receive, through losses, until a version of another sender than that of that incarnation is served."""
    deadline = Deadline(PATIENCE)
    while setup.receiver.incarnation == before:
        assert not deadline.passed, "no version of the new sender has come"
        with contextlib.suppress(ConnectionError):
            setup.receiver.receive(timeout=0.1)
    served: int | None = setup.receiver.version
    return served


def follow_through(setup: Any, version: int) -> int | None:
    """Receive, through losses, until that version is served."""
    deadline = Deadline(PATIENCE)
    while (setup.receiver.version or 0) < version:
        assert not deadline.passed, f"version {version} has not come"
        with contextlib.suppress(ConnectionError):
            setup.receiver.receive(timeout=0.1)
    served: int | None = setup.receiver.version
    return served


def follow_until_gone(setup: Any) -> str:
    """Receive until the sender is gone; what `receive` then said."""
    try:
        while True:
            setup.receiver.receive(timeout=PATIENCE)
    except ConnectionError as error:
        return str(error)


def look(setup: Any) -> bool:
    """Receive for a short while; whether a version went live."""
    return bool(setup.receiver.receive(timeout=SHORT))


def holds(setup: Any) -> tuple[int | None, set[float]]:
    """The version served, and the distinct values of the weights: one, if nothing is torn."""
    receiver = setup.receiver
    values = {float(end) for tensor in setup.model.state_dict().values() for end in tensor.aminmax()}
    return receiver.version, values


def incarnation(setup: Any) -> int | None:
    found: int | None = setup.receiver.incarnation
    return found


def send(setup: Any, fill: float, timeout: float = PATIENCE) -> SyncReport:
    """Send the model filled with that value; the report, whatever is in it."""
    filled(setup.model, fill)
    report: SyncReport = setup.kept["sender"].send(timeout=timeout, on_failure="report")
    return report


def send_async(setup: Any, fill: float) -> None:
    filled(setup.model, fill)
    setup.kept["sender"].send_async()


def wait_async(setup: Any, timeout: float = PATIENCE) -> tuple[SyncReport, float]:
    """Wait for the outstanding update: the report, and the seconds that took."""
    started = time.monotonic()
    return setup.kept["sender"].wait_async(timeout=timeout, on_failure="report"), time.monotonic() - started


def abandon(setup: Any) -> None:
    setup.kept["sender"].abandon()


def remove_worker(setup: Any, worker_id: int) -> None:
    setup.kept["sender"].remove_worker(worker_id)


def add_worker(setup: Any, worker_id: int, endpoint: Callable[[Any], Any]) -> None:
    """Add a worker at the endpoint that a function finds in this process."""
    setup.kept["sender"].add_worker(worker_id, endpoint(setup))


def break_reading(setup: Any, where: str) -> None:
    """Plant a fault in this process's adapter: whatever its link reads next raises what no link may raise."""

    def broken() -> list[Any]:
        raise RuntimeError("a fault of the adapter's own")

    link = setup.receiver.driver.in_force() if where == "worker" else setup.kept["sender"].transports()[0]
    assert link is not None
    link.receive = broken


def version_of(setup: Any) -> int:
    version: int = setup.kept["sender"].version
    return version


# --------------------------------------------------------------------------------------------- a transport's


class Hand(abc.ABC):
    """A process that does what it is told; `fleet.Worker` is one."""

    pid: int

    @abc.abstractmethod
    def tell(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have it do something, and go on."""

    @abc.abstractmethod
    def answer(self) -> Any:
        """What came of it."""

    @abc.abstractmethod
    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Have it do something, and wait for what comes of it."""

    @abc.abstractmethod
    def resume(self) -> None:
        """SIGCONT it."""

    @abc.abstractmethod
    def kill(self) -> None:
        """kill -9 it, and wait until it is dead."""


class Field(abc.ABC):
    """A trainer and two workers of one transport. Worker 0 is the one who is struck."""

    trainer: Any
    victim: Any
    other: Any
    #: Where payloads are on their way in a worker, and in a trainer.
    worker_payload: Place
    trainer_payload: Place
    #: What becomes of a worker that was killed before its handshake.
    unmet = OutcomeKind.LOST
    #: Whether a worker's call of `receive` is what reads its links.
    receives = True

    @abc.abstractmethod
    def join(self, worker: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """What makes a worker's receiver, and its arguments."""

    @abc.abstractmethod
    def lead(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """What makes a trainer's sender, and its arguments."""

    @abc.abstractmethod
    def readmit(self) -> str:
        """Have a living worker in the victim's place, joined; or say why there is none."""

    @abc.abstractmethod
    def successor(self) -> Any:
        """A process that can be the trainer in the place of one that is dead."""

    def enlist(self, worker: Any, strike: Strike | None = None) -> None:
        """Have a worker make its receiver, and wait for it, unless it is struck first."""
        told = (enlist, *self.join(worker), strike)
        if strike is not None and strike.at is At.AHEAD:
            worker.tell(*told)
            gone_or_stopped(worker.pid)
        else:
            worker.do(*told)

    def command(self, trainer: Any, strike: Strike | None = None) -> None:
        """Have a trainer make its sender; only told so, if it is struck meanwhile."""
        told = (take_command, *self.lead(), strike)
        if strike is not None and strike.at is TrainerAt.CONNECT:
            trainer.tell(*told)
        else:
            trainer.do(*told)

    def follow(self, worker: Any, version: int) -> None:
        """Have a worker receive until that version is served."""
        if self.receives:
            worker.tell(follow, version)

    def followed(self, worker: Any) -> None:
        """Wait until it is."""
        if self.receives:
            worker.answer()


def gone_or_stopped(pid: int) -> str:
    """Wait until a process is stopped ("T") or dead; which."""
    deadline = Deadline(PATIENCE)
    while not deadline.passed:
        try:
            state = stat_of(pid)[0]
        except (FileNotFoundError, ProcessLookupError):
            return "dead"
        if state in "TZX":
            return state if state == "T" else "dead"
        time.sleep(0.005)
    raise AssertionError(f"process {pid} never came to where it is struck")


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """What happens in the block takes no longer."""
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    assert took < seconds, f"{took:.1f} s"
