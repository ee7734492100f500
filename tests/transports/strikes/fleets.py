"""A trainer and two workers of one transport: the interface that strikes and cuts are written for, and its adapters."""

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
import ray_fleet
import rpc_fleet
import store_fleet
from fleet import PATIENCE, Crew, Worker, join
from striking import (
    Place,
    Strike,
    TrainerPoint,
    WorkerPoint,
    add_worker,
    follow,
    gone_or_stopped,
    megabytes,
    poll,
    start_receiver,
    start_sender,
    struck,
)

from weightsync import (
    MultiProcessWeightSyncScheme,
    OutcomeKind,
    RayWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncActor,
)
from weightsync.clock import Deadline
from weightsync.engine import applier
from weightsync.transports import rpc
from weightsync.transports.base import Link, Payloads
from weightsync.transports.pipe import framing, link
from weightsync.transports.ray import client as call_clients
from weightsync.transports.store import stream

#: What each transport needs; over pipes most points run with every `pytest`.
MARKS: dict[str, tuple[Any, ...]] = {
    "ray": (
        pytest.mark.slow,
        pytest.mark.ray,
        pytest.mark.timeout(300),
        # Ray's C++ and its background threads leave what they do not close to the collector.
        pytest.mark.filterwarnings("ignore::ResourceWarning"),
    ),
    "rpc": (pytest.mark.slow, pytest.mark.rpc),
    "store": (pytest.mark.slow, pytest.mark.gloo),
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


#: A function that a process is told to call, and its arguments.
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
        self._told: list[Future[Any]] = []

    def tell(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._told.append(self._thread.submit(function, self.setup, *arguments))

    def answered(self) -> bool:
        return self._told[0].done()

    def answer(self) -> Any:
        return self._told.pop(0).result(PATIENCE)

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
    unmet = OutcomeKind.LOST
    #: What becomes of a worker that was killed after its answer, which may be lost with it.
    answered: tuple[OutcomeKind, ...] = (OutcomeKind.APPLIED, OutcomeKind.LOST)
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
        """A process that can be the trainer in the place of one that is dead."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027 - most have nothing
        """Leave nothing behind that the fixtures of a test do not end."""

    def start_receiver(self, worker: Any, strike: Strike | None = None) -> None:
        """Have a worker make its receiver, and wait for it, unless it is struck first."""
        told = (start_receiver, *self.join(worker), strike)
        if strike is not None and strike.at is WorkerPoint.AHEAD:
            worker.tell(*told)
            gone_or_stopped(worker.pid)
        else:
            worker.do(*told)

    def start_sender(self, trainer: Any, strike: Strike | None = None) -> None:
        """Have a trainer make its sender; do not wait for it, if it is struck meanwhile."""
        told = (start_sender, *self.lead(), strike)
        if strike is not None and strike.at is TrainerPoint.CONNECT:
            trainer.tell(*told)
        else:
            trainer.do(*told)

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


# ------------------------------------------------------------------------------------------------------- pipes


class InlineScheme(MultiProcessWeightSyncScheme):
    """All payloads go through the pipe itself, as over connections that pass no memory."""

    def lay_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        return link.PipeLink(endpoint, model_id, peer=peer, payloads=Payloads.INLINE)


PIPES = {"pipe": MultiProcessWeightSyncScheme, "shared": SharedMemWeightSyncScheme, "inline": InlineScheme}


class PipeFleet(Fleet):
    """Two children of the test, which is the trainer."""

    # The message is read; of the payload, nothing is read, or mapped.
    worker_payload = (Place(framing.__name__, "Inflow", "_memory_for"), Place(link.__name__, "Mapped", "find"))
    answered = (OutcomeKind.APPLIED,)

    def __init__(self, crew: Crew, scheme_class: Any) -> None:
        self._crew, self._scheme_class = crew, scheme_class
        self.trainer = LocalTrainer()
        self.victim, self.other = (Child(worker) for worker in crew.start(scheme_class(), 2))

    def join(self, worker: Any) -> Order:
        return join, (megabytes,)

    def lead(self) -> Order:
        return lead_over_pipes, (self._scheme_class(), [self.victim.pipe, self.other.pipe])

    def readmit(self) -> str:
        (worker,) = self._crew.start(self._scheme_class())
        self.victim = Child(worker)
        self.start_receiver(self.victim)
        self.trainer.do(add_worker, 0, lambda _: worker.pipe)
        return ""

    def close(self) -> None:
        self.trainer.close()


def lead_over_pipes(setup: Any, scheme: Any, pipes: list[Any]) -> None:
    setup.model = megabytes()
    setup.schemes.append(scheme)
    scheme.init_on_sender("policy", pipes=pipes, model=setup.model)
    setup.kept["sender"] = scheme.get_sender()


# --------------------------------------------------------------------------------------------------------- Ray


class StrikableActor(ray_fleet.Bench, WeightSyncActor):
    """An actor that may be struck, and may lead."""

    def start_over(self) -> None:
        for scheme in getattr(self, "schemes", []):
            scheme.close()
        self.schemes: list[Any] = []
        super().start_over()


class Actor(Process):
    """An actor, told as a process is. Ray may restart it once it is dead: `RayFleet.readmit` finds its next life."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.pid = ray_fleet.ray.get(handle.pid.remote(), timeout=PATIENCE)
        ray_fleet.ray.get(handle.start_over.remote(), timeout=PATIENCE)
        self._told: list[Any] = []

    def tell(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._told.append(self.handle.do.options(max_task_retries=0).remote(function, *arguments))

    def answered(self) -> bool:
        return bool(ray_fleet.ray.wait(self._told[:1], timeout=0)[0])

    def answer(self) -> Any:
        return ray_fleet.ray.get(self._told.pop(0), timeout=PATIENCE)


class RayFleet(Fleet):
    """Two actors, and a trainer in the test's process or in an actor of its own.

    An actor reads nothing by itself: it comes to a point in the call that brings the weights.
    """

    worker_payload = (Place(applier.__name__, "Applier", "verified", after=True),)
    trainer_payload = (Place(call_clients.__name__, "ActorCallClient", "_begin", after=True),)
    receives = False

    def __init__(self, victim: Any, other: Any, leader: Any = None, spare: Any = None) -> None:
        self._spare, self._local = spare, LocalTrainer()
        self.victim, self.other = Actor(victim), Actor(other)
        self.trainer = self.leader = self._local if leader is None else Actor(leader)

    def join(self, worker: Any) -> Order:
        return join_by_calls, ()

    def lead(self) -> Order:
        return lead_actors, ([self.victim.handle, self.other.handle],)

    def readmit(self) -> str:
        handle = self.victim.handle if self._spare is None else self._spare
        self.victim = Actor(handle)
        self.start_receiver(self.victim)
        self.trainer.do(add_worker, 0, lambda _: handle)
        return ""

    def successor(self) -> Any:
        return self._local

    def close(self) -> None:
        self._local.close()


def join_by_calls(setup: Any) -> None:
    """Make a receiver that calls drive."""
    setup.model = setup.policy = megabytes()
    scheme = RayWeightSyncScheme()
    setup.schemes.append(scheme)
    scheme.init_on_worker("policy", model=setup.model)
    setup.receiver = scheme.get_receiver()


def lead_actors(setup: Any, actors: list[Any]) -> None:
    setup.model = megabytes()
    scheme = RayWeightSyncScheme()
    setup.schemes.append(scheme)
    scheme.init_on_sender("policy", remote_collectors=actors, model=setup.model)
    setup.kept["sender"] = scheme.get_sender()


# --------------------------------------------------------------------------------------------------------- RPC


class RpcFleet(Fleet):
    """Four ranks: the trainer, two workers, and one more. No rank can take the place of one that died."""

    worker_payload = (Place(rpc.__name__, "", "_payload_of"),)
    trainer_payload = (Place(rpc.__name__, "", "begin", after=True),)

    def __init__(self, world: rpc_fleet.World) -> None:
        self.trainer = Child(world.trainer)
        self.victim, self.other, self._heir = (Child(worker) for worker in world.workers)

    def join(self, worker: Any) -> Order:
        return rpc_fleet.listen, (megabytes,)

    def lead(self) -> Order:
        return rpc_fleet.command, (["w0", "w1"], megabytes)

    def readmit(self) -> str:
        self.trainer.do(add_worker, 0, w0)
        return "cannot replace a rank that died"

    def successor(self) -> Any:
        return self._heir

    def retire(self) -> None:
        """Leave the world as it was; everybody lives."""
        for process in (self.trainer, self.victim, self.other):
            process.do(rpc_fleet.retire)


def w0(_: Any) -> str:
    return "w0"


# ------------------------------------------------------------------------------------------- torch.distributed

#: So that a payload of 4 MiB has a middle.
PIECE_NBYTES = 2**20


class StoreFleet(Fleet):
    """A store hosted by the test, a trainer and two workers, all on connections of their own."""

    worker_payload = (Place(stream.__name__, "Stream", "_read_piece", time=2),)
    trainer_payload = (Place(stream.__name__, "Stream", "_write_piece", time=2),)
    # Nobody knows that it was ever there.
    unmet = OutcomeKind.TIMED_OUT

    def __init__(self, crew: Crew, port: int, victims_port: int | None = None) -> None:
        self._crew, self._port = crew, port
        #: Where the victim reaches the store.
        self._victims_port = victims_port or port
        self.trainer, self.victim, self.other = (self._start() for _ in range(3))

    def _start(self) -> Child:
        (worker,) = self._crew.start(None)
        worker.do(small_pieces)
        return Child(worker)

    def join(self, worker: Any) -> Order:
        port, rank = (self._port, 2) if worker is self.other else (self._victims_port, 1)
        return store_fleet.meet, (port, rank, megabytes)

    def lead(self) -> Order:
        return store_fleet.lead, (self._port, 2, megabytes)

    def readmit(self) -> str:
        self.victim, self._victims_port = self._start(), self._port
        self.start_receiver(self.victim)
        self.trainer.do(add_worker, 0, endpoint)
        return ""

    def successor(self) -> Child:
        return self._start()


def small_pieces(_: Any) -> None:
    stream.PIECE_NBYTES = PIECE_NBYTES  # type: ignore[misc]


def endpoint(setup: Any) -> Any:
    return setup.kept["store"], 1
