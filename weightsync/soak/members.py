"""How the soak's trainer starts workers and reaches them: over pipes, a store or RPC, or as Ray actors."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

from weightsync.local_workers import (
    LocalWorker,
    LocalWorkerError,
    SchemeName,
    joined_rpc,
    rpc_address,
    rpc_name,
    running_ray,
    stop,
    store,
)
from weightsync.soak.worker import Look, Request, SoakActor, work

#: Seconds in which an actor must have started: it imports torch first, on a machine that may be busy.
_START_S = 300.0
#: How many seconds a process has to start, to answer, or to end.
PROCESS_S = 60.0
#: How many workers over RPC can be killed: nobody joins its world later, so those that take their places wait in it.
_SPARES = 2


@dataclass(slots=True)
class Member:
    """A worker, as the trainer holds it."""

    worker: LocalWorker | ActorWorker
    #: What it has said last.
    looked: Look = field(default_factory=lambda: Look(None, 0.0, 0, 0))


class PipeMembers:
    """Workers as processes that are reached over pipes.

    Args:
        scheme: the scheme to soak.
        nbytes: the size of the weights.
        context: starts the processes.
        workers: how many work at once.
    """

    def __init__(self, scheme: SchemeName, nbytes: int, context: ForkServerContext, workers: int) -> None:
        self._scheme, self._nbytes, self._context, self._workers = scheme, nbytes, context, workers

    def open(self) -> None:
        """Make what all workers need."""

    def close(self) -> None:
        """Release it."""

    @property
    def can_start(self) -> bool:
        """Whether a worker that is killed can be replaced."""
        return True

    def start(self, index: int) -> tuple[Member, Any]:
        """Start a worker; returns it, and how the trainer reaches it: what `add_worker` takes."""
        ours, theirs = self._link(index)
        worker = self._worker(index, theirs)
        if isinstance(theirs, Connection):
            theirs.close()
        return Member(worker), ours

    def _worker(self, index: int, endpoint: Any) -> LocalWorker:
        """A new worker process, which runs."""
        worker = LocalWorker(f"worker {index}", work, (self._scheme, index, self._nbytes, endpoint), self._context)
        worker.start()
        return worker

    def relink(self, index: int, member: Member) -> Any:
        """A new link to a worker that runs; returns how the trainer reaches it."""
        ours, theirs = self._context.Pipe()
        worker = member.worker
        assert isinstance(worker, LocalWorker)
        with theirs, contextlib.suppress(OSError):
            worker.ask(Request.TAKE_LINK)
            send_handle(worker.channel, theirs.fileno(), worker.pid)
            worker.answer(PROCESS_S)
        return ours

    def dismiss(self, member: Member) -> None:
        """Have a worker end."""
        with contextlib.suppress(OSError):
            member.worker.ask(None)

    def init_arguments(self, endpoints: Sequence[Any], processes: Sequence[Any]) -> Mapping[str, Any]:
        """The keywords by which `init_on_sender` reaches the workers."""
        return {"pipes": list(endpoints), "processes": list(processes)}

    def watched(self, member: Member) -> Any:
        """The process to watch for the sender. None: the link reports its death."""
        assert isinstance(member.worker, LocalWorker)
        return member.worker.process

    def _link(self, index: int) -> tuple[Any, Any]:
        """What trainer and worker are given."""
        return self._context.Pipe()


class StoreMembers(PipeMembers):
    """Workers as processes that reach the trainer through a torch.distributed store."""

    _store: Any = None

    def open(self) -> None:
        """Start the store."""
        self._store = store()

    def close(self) -> None:
        """End the store."""
        self._store = None

    def relink(self, index: int, member: Member) -> Any:
        """The worker listens at the store for further links."""
        return self._store, index + 1

    def init_arguments(self, endpoints: Sequence[Any], processes: Sequence[Any]) -> Mapping[str, Any]:
        """The store, and how many workers come to it: see `PipeMembers.init_arguments`."""
        return {"store": self._store, "num_workers": len(endpoints), "processes": list(processes)}

    def _link(self, index: int) -> tuple[Any, Any]:
        return (self._store, index + 1), self._store.port


class RpcMembers(PipeMembers):
    """Workers as processes of one world of torch's RPC. All are started at once, with spares for those that die."""

    def open(self) -> None:
        """Start all processes."""
        self._cleanup = contextlib.ExitStack()
        world = self._cleanup.enter_context(rpc_address()), 1 + self._workers + _SPARES
        self._waiting: deque[tuple[int, LocalWorker]] = deque()
        self._cleanup.callback(lambda: stop([worker for _, worker in self._waiting]))
        for rank in range(1, world[1]):
            self._waiting.append((rank, self._worker(rank - 1, world)))
        self._names: dict[int, str] = {}
        self._cleanup.enter_context(joined_rpc(*world, _START_S))

    def close(self) -> None:
        """End the world, and those that wait in it."""
        self._cleanup.close()

    @property
    def can_start(self) -> bool:
        """Whether somebody still waits."""
        return bool(self._waiting)

    def start(self, index: int) -> tuple[Member, Any]:
        """The next that waits."""
        rank, worker = self._waiting.popleft()
        self._names[index] = rpc_name(rank)
        return Member(worker), self._names[index]

    def relink(self, index: int, member: Member) -> Any:
        """A link is a series of calls: the same process takes another."""
        return self._names[index]

    def init_arguments(self, endpoints: Sequence[Any], processes: Sequence[Any]) -> Mapping[str, Any]:
        """Their names in the world: see `PipeMembers.init_arguments`."""
        return {"collector_infos": list(endpoints)}


class RayMembers(PipeMembers):
    """Workers as Ray actors. Ray is started for them unless it runs in this process already."""

    def __init__(self, scheme: SchemeName, nbytes: int, context: ForkServerContext, workers: int) -> None:
        super().__init__(scheme, nbytes, context, workers)
        self._cleanup = contextlib.ExitStack()
        self._actors: list[Any] = []

    def open(self) -> None:
        """Start Ray."""
        ray = running_ray("weightsync soak --scheme ray", object_store_memory=200 * 2**20)
        self._ray = self._cleanup.enter_context(ray)

    def close(self) -> None:
        """End the actors, and Ray if it was started here."""
        with self._cleanup:
            for actor in self._actors:
                self._ray.kill(actor)
            self._actors.clear()

    def start(self, index: int) -> tuple[Member, Any]:
        """Start an actor."""
        actor = self._ray.remote(num_cpus=0)(SoakActor).remote(self._nbytes)
        self._actors.append(actor)
        pid = self._ray.get(actor.pid.remote(), timeout=_START_S)
        return Member(ActorWorker(self._ray, actor, pid)), actor

    def relink(self, index: int, member: Member) -> Any:
        """A link is a series of calls: the same actor takes another."""
        assert isinstance(member.worker, ActorWorker)
        return member.worker.actor

    def dismiss(self, member: Member) -> None:
        """Kill the actor, which never ends on its own."""
        member.worker.kill()

    def init_arguments(self, endpoints: Sequence[Any], processes: Sequence[Any]) -> Mapping[str, Any]:
        """The actors: see `PipeMembers.init_arguments`."""
        return {"remote_collectors": list(endpoints)}

    def watched(self, member: Member) -> None:
        """Ray reports a dead actor."""


class ActorWorker:
    """A Ray actor, asked by calls. Its process is not a child of this one."""

    def __init__(self, ray: Any, actor: Any, pid: int) -> None:
        self.actor, self.pid = actor, pid
        self._ray = ray
        self._asked: Any = None

    def ask(self, request: Request | None) -> None:
        """Send a request: see `LocalWorker.ask`."""
        self._asked = self.actor.ask.remote(request)

    def answer(self, timeout: float) -> Any:
        """The answer: see `LocalWorker.answer`."""
        try:
            return self._ray.get(self._asked, timeout=timeout)
        except self._ray.exceptions.RayError as error:
            raise LocalWorkerError(f"the actor of process {self.pid}", f"gave no answer: {error}") from error

    def is_alive(self) -> bool:
        """Whether the process runs."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state != "Z"

    def kill(self) -> None:
        """Send the process SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def join(self, timeout: float) -> None:
        """Wait until the process has ended."""
        until = time.monotonic() + timeout
        while self.is_alive() and time.monotonic() < until:
            time.sleep(0.01)

    def close(self) -> None:
        """The actor ends with the others."""


MEMBERS: Mapping[SchemeName, type[PipeMembers]] = {
    SchemeName.SHARED: PipeMembers,
    SchemeName.PROCESS: PipeMembers,
    SchemeName.DISTRIBUTED: StoreMembers,
    SchemeName.RPC: RpcMembers,
    SchemeName.RAY: RayMembers,
}
