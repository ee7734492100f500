"""The points of a send at which a process is killed or stopped, and the functions that a fleet's processes run.

A process sends the signal to itself, exactly at the point. See `fleets.Fleet` for the transports.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fleet import PATIENCE, filled, stat_of
from torch import nn

from weightsync import SyncReport
from weightsync.clock import Deadline
from weightsync.engine import parts
from weightsync.protocol._tables import ReceiverInput, SenderInput, State
from weightsync.weights.tree_digest import CHUNK

#: The deadline, in seconds, of a send to a stopped process.
SHORT = 0.5


class Signal(enum.IntEnum):
    """The signal of a strike."""

    KILL = signal.SIGKILL
    STOP = signal.SIGSTOP


class WorkerPoint(enum.StrEnum):
    """The points of a send at which a worker is struck."""

    AHEAD = "before the handshake"
    HANDSHAKE = "at the handshake"
    PAYLOAD = "mid-payload"
    ARRIVED = "before applying"
    APPLIED = "before the answer"
    ANSWERED = "after the answer"
    IDLE = "idle"
    OUTSTANDING = "while send_async is outstanding"


class TrainerPoint(enum.StrEnum):
    """The points of a send at which a trainer is struck."""

    CONNECT = "before its hello leaves"
    DISPATCH = "before the dispatch"
    PAYLOAD = "mid-payload"
    ANSWERED = "after the first answer"
    IDLE = "idle"
    OUTSTANDING = "while send_async is outstanding"


_RECEIVED = {
    WorkerPoint.HANDSHAKE: ReceiverInput.CONNECT,
    WorkerPoint.ARRIVED: ReceiverInput.UPDATE,
    WorkerPoint.APPLIED: ReceiverInput.APPLIED,
    WorkerPoint.ANSWERED: ReceiverInput.ANSWERED,
}
_SENT = {
    TrainerPoint.CONNECT: SenderInput.CONNECT,
    TrainerPoint.DISPATCH: SenderInput.SEND,
    TrainerPoint.ANSWERED: SenderInput.REPLY,
}
#: The points at which the test sends the signal from outside the process.
STRUCK_FROM_OUTSIDE = (WorkerPoint.IDLE, WorkerPoint.OUTSTANDING, TrainerPoint.IDLE, TrainerPoint.OUTSTANDING)


@dataclass(frozen=True)
class Place:
    """A function in the middle of a payload: the strike comes as it begins, or as it returns if ``after``."""

    module: str
    owner: str
    name: str
    #: The number of the call at which the strike comes, from 1.
    time: int = 1
    after: bool = False

    def arm(self, act: Callable[[], None]) -> None:
        """Patch the function so that it calls ``act`` there."""
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
    """One signal, at one point, once."""

    at: WorkerPoint | TrainerPoint
    sent: Signal
    #: The candidates for a strike in mid-payload: the first of these functions that is called strikes.
    mid_payload: tuple[Place, ...]

    def now(self) -> None:
        """Send the signal to this process."""
        os.kill(os.getpid(), self.sent)

    def ahead(self) -> None:
        """Strike before the receiver exists, or arm the functions of a strike in mid-payload."""
        if self.at is WorkerPoint.AHEAD:
            self.now()
        elif self.at in (WorkerPoint.PAYLOAD, TrainerPoint.PAYLOAD):
            once = self._once()
            for place in self.mid_payload:
                place.arm(once)

    def _once(self) -> Callable[[], None]:
        left = [1]

        def struck() -> None:
            if left[0]:
                left[0] -= 1
                self.now()

        return struck

    def arm(self, machine: Any) -> None:
        """Strike this process when its machine takes the input that stands for the point."""
        inputs: dict[Any, Any] = {**_RECEIVED, **_SENT}
        if self.at not in inputs:
            return
        once = self._once()

        def look(_before: Any, taken: Any, _after: Any) -> None:
            if taken is inputs[self.at]:
                once()

        machine.observe(look)


def megabytes(fill: float = 0.0) -> nn.Module:
    """Weights of 4 MiB, more than the buffers of a pipe or a socket hold."""
    return filled(nn.Linear(1024, 1024), fill)


# -------------------------------------------------------------------------------- functions run in the processes


def start_receiver(setup: Any, join: Callable[..., None], arguments: tuple[Any, ...], strike: Strike | None) -> None:
    """Create the receiver, and arm its strike. A strike before the handshake comes first."""
    if strike is not None:
        strike.ahead()
    join(setup, *arguments)
    if strike is not None:
        strike.arm(setup.receiver.driver.machine)


def start_sender(setup: Any, lead: Callable[..., None], arguments: tuple[Any, ...], strike: Strike | None) -> None:
    """Create the sender. A strike at CONNECT is armed before its links are created."""
    if strike is not None and strike.at is TrainerPoint.CONNECT:
        sender = importlib.import_module("weightsync.engine.sender_driver")
        real = sender.SenderMachine

        def armed() -> Any:
            machine = real()
            strike.arm(machine)
            return machine

        sender.SenderMachine = armed
    lead(setup, *arguments)


def arm_sender(setup: Any, strike: Strike) -> None:
    """Arm a strike of the trainer in its next send."""
    strike.ahead()
    strike.arm(setup.kept["sender"]._driver.machine)


def arm_payload(setup: Any, strike: Strike) -> None:
    """Arm a strike of this process in the middle of the next payload."""
    strike.ahead()


def in_parts(setup: Any) -> None:
    """Make this trainer send payloads in parts of one chunk each."""
    for name, nbytes in (("LEAST_PART", CHUNK), ("LEAST_NBYTES", 2 * CHUNK), ("LEAST_IF_BUSY", 2 * CHUNK)):
        setattr(parts, name, nbytes)


def follow(setup: Any, version: int) -> int | None:
    """Receive until this version is served and acked. Returns the version served."""
    while (setup.receiver.version or 0) < version:
        assert setup.receiver.receive(timeout=PATIENCE)
    while setup.receiver.state is State.AWAITING_ACK:
        setup.receiver.receive(timeout=0.01)
    served: int | None = setup.receiver.version
    return served


def follow_anew(setup: Any, before: int | None) -> int | None:
    """Receive, through losses, until a version of a sender with another incarnation is served."""
    deadline = Deadline(PATIENCE)
    while setup.receiver.incarnation == before:
        assert not deadline.passed, "no version of the new sender has come"
        with contextlib.suppress(ConnectionError):
            setup.receiver.receive(timeout=0.1)
    served: int | None = setup.receiver.version
    return served


def follow_through(setup: Any, version: int) -> int | None:
    """Receive, through losses of links, until this version is served. Returns the version served."""
    deadline = Deadline(PATIENCE)
    while (setup.receiver.version or 0) < version:
        assert not deadline.passed, f"version {version} has not come"
        with contextlib.suppress(ConnectionError):
            setup.receiver.receive(timeout=0.1)
    served: int | None = setup.receiver.version
    return served


def look(setup: Any) -> bool:
    """Receive for a short while. Returns whether a version went live."""
    return bool(setup.receiver.receive(timeout=SHORT))


def holds(setup: Any) -> tuple[int | None, set[float]]:
    """The version served, and the distinct values of the weights: a single one unless the weights are torn."""
    receiver = setup.receiver
    values = {float(end) for tensor in setup.model.state_dict().values() for end in tensor.aminmax()}
    return receiver.version, values


def incarnation(setup: Any) -> int | None:
    found: int | None = setup.receiver.incarnation
    return found


def send(setup: Any, fill: float, timeout: float = PATIENCE) -> SyncReport:
    """Fill the model with a value, and send it. Returns the report, even of a failed send."""
    filled(setup.model, fill)
    report: SyncReport = setup.kept["sender"].send(timeout=timeout, on_failure="report")
    return report


def send_async(setup: Any, fill: float) -> None:
    filled(setup.model, fill)
    setup.kept["sender"].send_async()


def refill(setup: Any, fill: float) -> None:
    """Overwrite the trainer's model after a send."""
    filled(setup.model, fill)


def poll(setup: Any) -> None:
    setup.kept["sender"].poll()


def state(setup: Any) -> State:
    """The sender's state."""
    found: State = setup.kept["sender"].state
    return found


def close(setup: Any) -> None:
    """Close the sender."""
    setup.kept["sender"].close()


def wait_async(setup: Any, timeout: float = PATIENCE) -> tuple[SyncReport, float]:
    """Wait for the outstanding update. Returns the report and the seconds waited."""
    started = time.monotonic()
    return setup.kept["sender"].wait_async(timeout=timeout, on_failure="report"), time.monotonic() - started


def abandon(setup: Any) -> None:
    setup.kept["sender"].abandon()


def remove_worker(setup: Any, worker_id: int) -> None:
    setup.kept["sender"].remove_worker(worker_id)


def add_worker(setup: Any, worker_id: int, endpoint: Callable[[Any], Any]) -> None:
    """Add a worker at the endpoint that ``endpoint`` returns in this process."""
    setup.kept["sender"].add_worker(worker_id, endpoint(setup))


def break_reading(setup: Any, where: str) -> None:
    """Make the next read of this process's link raise an error that no link may raise."""

    def broken() -> list[Any]:
        raise RuntimeError("a fault of the adapter's own")

    link = setup.receiver.driver.current_link() if where == "worker" else setup.kept["sender"].transports()[0]
    assert link is not None
    link.receive = broken


def struck(pid: int) -> str:
    """Return "stopped" or "dead" if the process is, and otherwise an empty string."""
    try:
        state = stat_of(pid)[0]
    except (FileNotFoundError, ProcessLookupError):
        return "dead"
    return {"T": "stopped", "Z": "dead", "X": "dead"}.get(state, "")


def gone_or_stopped(pid: int) -> str:
    """Wait until a process is stopped or dead. Returns "stopped" or "dead"."""
    deadline = Deadline(PATIENCE)
    while not deadline.passed:
        if found := struck(pid):
            return found
        time.sleep(0.005)
    raise AssertionError(f"process {pid} was neither stopped nor killed")
