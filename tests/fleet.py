"""Worker processes for tests, and the functions that tests run in them.

Processes of any start method can import everything here. A worker that does not answer within `PATIENCE` fails the
test.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from constant_models import constants, filled, large, small  # noqa: F401 - tests import them from here
from torch import nn

from weightsync import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, WeightReceiver, WeightSender
from weightsync.engine import recorder

#: Seconds after which a test gives up. Only a failing test waits so long.
PATIENCE = 60.0
SCHEMES = {"pipe": MultiProcessWeightSyncScheme, "shared": SharedMemWeightSyncScheme}


@pytest.fixture(params=list(SCHEMES.values()), ids=list(SCHEMES))
def scheme_class(request: pytest.FixtureRequest) -> Any:
    """Each scheme over pipes, in turn."""
    return request.param


def functions_called(call: Callable[[], object]) -> list[CodeType]:
    """The code of the Python functions that run in this thread during a call, in order, with garbage collection off."""
    found: list[CodeType] = []
    note_calls(call, lambda frame: found.append(frame.f_code))
    return found


def note_calls(call: Callable[[], object], note: Callable[[FrameType], object]) -> None:
    """Make a call, and pass ``note`` the frame of each Python function that begins in this thread meanwhile."""

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            note(frame)

    before = sys.getprofile()
    gc.disable()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
        gc.enable()


# ------------------------------------------------------------------------------------ both ends in one process


class Pair:
    """A sender and its receivers in this process, over real pipes: one thread can drive both ends."""

    #: Seconds for which a receiver waits for a version.
    arrival = 0.0

    def __init__(self, scheme_class: Any, workers: int = 1, model: Callable[..., nn.Module] = small) -> None:
        self.pipes = [multiprocessing.Pipe() for _ in range(workers)]
        self.source = model(1.0)
        self.models = [model(0.0) for _ in range(workers)]
        self.scheme = scheme_class()
        self.scheme.init_on_sender("policy", pipes=[ours for ours, _ in self.pipes], model=self.source)
        self.sender: WeightSender = self.scheme.get_sender()
        self.schemes = [scheme_class() for _ in range(workers)]
        for scheme, (_, theirs), destination in zip(self.schemes, self.pipes, self.models, strict=True):
            scheme.init_on_worker("policy", pipe=theirs, model=destination)
        self.receivers: list[WeightReceiver] = [scheme.get_receiver() for scheme in self.schemes]

    @property
    def receiver(self) -> WeightReceiver:
        return self.receivers[0]

    @property
    def model(self) -> nn.Module:
        return self.models[0]

    def sync(self, weights: Any = None, worker_ids: Any = None) -> Any:
        """Send to these workers, or to all, let their receivers apply the version, and return the report."""
        targets = self.sender.send_async(weights, worker_ids).outcomes
        for index, receiver in enumerate(self.receivers):
            receiver.receive(timeout=self.arrival if index in targets else 0.0)
        return self.sender.wait_async(timeout=PATIENCE)

    def close(self) -> None:
        self.scheme.close()
        for scheme in self.schemes:
            scheme.close()
        for ours, theirs in self.pipes:
            ours.close()
            theirs.close()


@pytest.fixture
def pair(scheme_class: Any) -> Iterator[Pair]:
    """A sender and one receiver in this process."""
    made = Pair(scheme_class)
    yield made
    made.close()


@pytest.fixture
def three(scheme_class: Any) -> Iterator[Pair]:
    """A sender and three receivers in this process."""
    made = Pair(scheme_class, workers=3)
    yield made
    made.close()


# ------------------------------------------------------------------------------------- workers as processes


class WorkerSetup:
    """The objects of a worker process: the first argument of every function that a test runs in it."""

    def __init__(self, scheme: Any, pipe: Any) -> None:
        self.scheme = scheme
        self.pipe = pipe
        self.model: Any = None
        self.receiver: Any = None
        self.kept: dict[str, Any] = {}


def work(control: Any, scheme: Any, pipe: Any) -> None:
    """Main function of a worker process: run each requested function, until told to end or the test is gone."""
    torch.set_num_threads(1)
    setup = WorkerSetup(scheme, pipe)
    with contextlib.suppress(EOFError, ConnectionError):
        while (asked := control.recv()) is not None:
            function, arguments = asked
            try:
                control.send((True, function(setup, *arguments)))
            except Exception as error:  # noqa: BLE001 - passed to the test
                control.send((False, error))


class Worker:
    """A worker process, as the test sees it."""

    def __init__(self, context: Any, scheme: Any, hold: Any = None) -> None:
        self.pipe, theirs = context.Pipe()
        self._control, far = context.Pipe()
        self.process = context.Process(target=work, args=(far, scheme, hold or theirs), daemon=True)
        self.process.start()
        theirs.close()
        far.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Request a function call in the worker, without waiting for the answer."""
        self._control.send((function, arguments))

    def answered(self) -> bool:
        """Whether the answer has arrived, so that `answer` returns at once."""
        return self._control.poll(0)

    def answer(self) -> Any:
        """Wait for the result of the oldest unanswered request. Raises the error if the function raised one."""
        assert self._control.poll(PATIENCE), f"{self.process} does not answer"
        fine, value = self._control.recv()
        if not fine:
            raise value
        return value

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the worker, and wait for its result."""
        self.tell(function, *arguments)
        return self.answer()

    def stop(self) -> None:
        """Send SIGSTOP, and wait until the process has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED) if _is_our_child(self.pid) else _await_state(self.pid, "T")

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self.process.kill()
        self.process.join(PATIENCE)

    def end(self) -> None:
        """Tell the process to end, and kill it if it does not."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGCONT)
            self._control.send(None)
        self._control.close()
        self.process.join(5)
        self.kill()
        with contextlib.suppress(OSError):
            self.pipe.close()


def _is_our_child(pid: int) -> bool:
    return stat_of(pid)[1] == str(os.getpid())


def stat_of(pid: int | str) -> list[str]:
    """The fields of /proc/pid/stat from the third on: the state of the process, its parent and so on."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()


def _await_state(pid: int, state: str) -> None:
    """Wait until every thread of the process is in this state, since a signal stops one after another."""
    while any(each != state for each in _states_of(pid)):
        os.sched_yield()


def _states_of(pid: int) -> Iterator[str]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            yield stat_of(f"{pid}/task/{task.name}")[0]


class Crew:
    """Starts workers, and ends all of them at the end of the test."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.workers: list[Worker] = []

    def start(self, scheme: Any, count: int = 1) -> list[Worker]:
        started = [Worker(self.context, scheme) for _ in range(count)]
        self.workers += started
        return started

    def lead(self, scheme: Any, workers: list[Worker]) -> Worker:
        """Start a process with the trainer's ends of the pipes to ``workers``, and close these ends here."""
        leader = Worker(self.context, scheme, [worker.pipe for worker in workers])
        for worker in workers:
            worker.pipe.close()
        self.workers.append(leader)
        return leader

    def end(self) -> None:
        for worker in self.workers:
            worker.end()


@pytest.fixture
def crew(forkserver: Any) -> Iterator[Crew]:
    """A crew whose workers are started by forkserver."""
    made = Crew(forkserver)
    yield made
    made.end()


# ------------------------------------------------------------------------------ functions to run in workers


def join(setup: WorkerSetup, make: Callable[..., nn.Module] = small) -> None:
    """Initialise the worker's side."""
    setup.model = make()
    setup.scheme.init_on_worker("policy", pipe=setup.pipe, model=setup.model)
    setup.receiver = setup.scheme.get_receiver()


def receive(setup: WorkerSetup, timeout: float | None = PATIENCE) -> bool:
    return bool(setup.receiver.receive(timeout=timeout))


def serve(setup: WorkerSetup, version: int) -> int | None:
    """Receive until this version or a newer one is served. Returns the version."""
    while (setup.receiver.version or 0) < version:
        assert setup.receiver.receive(timeout=PATIENCE)
    return setup.receiver.version


def serve_until_gone(setup: WorkerSetup) -> str:
    """Receive until the sender is gone. Returns the message of the error."""
    try:
        while True:
            setup.receiver.receive(timeout=None)
    except ConnectionError as error:
        return str(error)


def shows(setup: WorkerSetup) -> tuple[str, int | None, set[float], bytes]:
    """The receiver's state and version, the distinct values of the weights, and the digest."""
    receiver = setup.receiver
    return receiver.state.value, receiver.version, constants(setup.model), receiver.digest()


def command(setup: WorkerSetup, make: Callable[..., nn.Module] = small, fill: float = 1.0) -> None:
    """Initialise the trainer's side, in a process started by `Crew.lead`."""
    setup.model = make(fill)
    setup.scheme.init_on_sender("policy", pipes=setup.pipe, model=setup.model)
    setup.kept["sender"] = setup.scheme.get_sender()


def publish(setup: WorkerSetup, times: int = 1) -> int:
    """Send this many times. Returns the last version."""
    version = 0
    for _ in range(times):
        version = setup.kept["sender"].send(timeout=PATIENCE).version
    return version


def leave(setup: WorkerSetup) -> None:
    setup.receiver.close()


# ----------------------------------------------------------------------------------------- what is left behind


def descriptors() -> dict[str, str]:
    """The open descriptors of this process, except the trace file of the test."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found[entry.name] = os.readlink(entry)
    return {fd: name for fd, name in found.items() if not Path(name).match(recorder.PATTERN)}


def opened_since(before: dict[str, str]) -> dict[str, str]:
    """The descriptors that this process has opened since ``before``, regardless of those closed since."""
    return {fd: name for fd, name in descriptors().items() if before.get(fd) != name}


def descriptors_of(inode: int) -> list[str]:
    """The descriptors of this process for one file; other threads may open and close others meanwhile."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += [name] * (os.stat(f"/proc/self/fd/{name}").st_ino == inode)
    return found


def segments(pid: int | str = "self") -> int:
    """The number of weightsync segments of which a process has a descriptor."""
    held = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd:weightsync" in os.readlink(entry):
                held.add(entry.stat().st_ino)
    return len(held)


def mapped(pid: int | str = "self") -> int:
    """The number of distinct weightsync segments that a process maps."""
    lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    return len({line.split()[4] for line in lines if "memfd:weightsync" in line})


def free_port() -> int:
    """A free port, outside the range from which the kernel assigns ports, so that it stays free until it is used."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    ports = range(max(1026, first - 8192), first) or range(1026, 65536)
    while True:
        port = random.SystemRandom().choice(ports)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def raw(connection: Any) -> Connection:
    """A second connection over the same descriptor, for writing bytes that the library never writes."""
    return Connection(os.dup(connection.fileno()))
