"""How the soak's trainer starts workers and reaches them: over pipes, a store or RPC, or as Ray actors."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any, Protocol

from weightsync import MissingExtraError
from weightsync.soak.worker import Look, Request, SchemeName, SoakActor, join_rpc, leave_rpc, rpc_name, work

#: Seconds in which an actor must have started: it imports torch first, on a machine that may be busy.
_START_S = 300.0
#: Seconds in which a process must have ended that was told to.
_PROCESS_S = 60.0
#: How many workers over RPC can be killed: nobody joins its world later, so those that take their places wait in it.
_SPARES = 2


class Process(Protocol):
    """A worker's process."""

    @property
    def pid(self) -> int | None:
        """Its id."""

    def is_alive(self) -> bool:
        """Whether it runs."""

    def kill(self) -> None:
        """Send it SIGKILL."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended."""

    def close(self) -> None:
        """Release what is kept of it."""


class Control(Protocol):
    """Asks a worker, and carries no weights. What the worker is gone for raises EOFError or OSError."""

    def send(self, request: Request) -> None:
        """Ask."""

    def poll(self, timeout: float) -> bool:
        """Whether the answer has come within so many seconds."""

    def recv(self) -> Any:
        """The answer."""

    def close(self) -> None:
        """Ask no more."""


@dataclass(slots=True)
class Member:
    """A worker, as the trainer holds it."""

    process: Process
    control: Control
    #: What it has said last.
    looked: Look = field(default_factory=lambda: Look(None, 0.0, 0, 0, 0))


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
        control, far = self._context.Pipe()
        arguments = self._scheme, index, self._nbytes, far, theirs
        process = self._context.Process(target=work, args=arguments, name=f"soak-{index}", daemon=True)
        process.start()
        far.close()
        if isinstance(theirs, Connection):
            theirs.close()
        return Member(process, control), ours

    def relink(self, index: int, member: Member) -> Any:
        """A new link to a worker that runs; returns how the trainer reaches it."""
        ours, theirs = self._context.Pipe()
        assert isinstance(member.control, Connection)
        with theirs, contextlib.suppress(OSError):
            member.control.send(Request.TAKE_LINK)
            send_handle(member.control, theirs.fileno(), member.process.pid)
            member.control.recv()
        return ours

    def dismiss(self, member: Member) -> None:
        """Have a worker end."""
        with contextlib.suppress(OSError):
            member.control.send(Request.STOP)

    def reached(self, endpoints: Sequence[Any], processes: Sequence[Process]) -> Mapping[str, Any]:
        """What `init_on_sender` is given."""
        return {"pipes": list(endpoints), "processes": list(processes)}

    def watched(self, member: Member) -> Process | None:
        """The process whose death the sender shall notice by itself; None: its link notices."""
        return member.process

    def _link(self, index: int) -> tuple[Any, Any]:
        """What trainer and worker are given."""
        return self._context.Pipe()


class StoreMembers(PipeMembers):
    """Workers as processes that meet the trainer at a store of torch.distributed."""

    _store: Any = None

    def open(self) -> None:
        """Start the store."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415 - for this scheme

        self._store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)

    def close(self) -> None:
        """End the store."""
        self._store = None

    def relink(self, index: int, member: Member) -> Any:
        """The worker listens at the store for further links."""
        return self._store, index + 1

    def reached(self, endpoints: Sequence[Any], processes: Sequence[Process]) -> Mapping[str, Any]:
        """The store, and how many workers come to it."""
        return {"store": self._store, "num_workers": len(endpoints), "processes": list(processes)}

    def _link(self, index: int) -> tuple[Any, Any]:
        return (self._store, index + 1), self._store.port


class RpcMembers(PipeMembers):
    """Workers as processes of one world of torch's RPC. All are started at once, with spares for those that die."""

    def open(self) -> None:
        """Start all processes."""
        self._cleanup = contextlib.ExitStack()
        folder = self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="weightsync-soak-"))
        world = f"file://{folder}/rendezvous", 1 + self._workers + _SPARES
        self._waiting: deque[tuple[int, Member]] = deque()
        self._cleanup.callback(self._dismiss_waiting)
        for rank in range(1, world[1]):
            control, far = self._context.Pipe()
            arguments = self._scheme, rank - 1, self._nbytes, far, world
            process = self._context.Process(target=work, args=arguments, name=rpc_name(rank), daemon=True)
            process.start()
            far.close()
            self._waiting.append((rank, Member(process, control)))
        self._names: dict[int, str] = {}
        join_rpc(0, *world)
        self._cleanup.callback(leave_rpc)

    def close(self) -> None:
        """End the world, and those that wait in it."""
        self._cleanup.close()

    def _dismiss_waiting(self) -> None:
        for _, member in self._waiting:
            self.dismiss(member)
        for _, member in self._waiting:
            member.control.close()
            member.process.join(_PROCESS_S)
            member.process.kill()
            member.process.join()
            member.process.close()

    @property
    def can_start(self) -> bool:
        """Whether somebody still waits."""
        return bool(self._waiting)

    def start(self, index: int) -> tuple[Member, Any]:
        """The next that waits."""
        rank, member = self._waiting.popleft()
        self._names[index] = rpc_name(rank)
        return member, self._names[index]

    def relink(self, index: int, member: Member) -> Any:
        """A link is a series of calls: the same process takes another."""
        return self._names[index]

    def reached(self, endpoints: Sequence[Any], processes: Sequence[Process]) -> Mapping[str, Any]:
        """Their names."""
        return {"collector_infos": list(endpoints)}


class RayMembers(PipeMembers):
    """Workers as Ray actors. Ray is started for them unless it runs in this process already."""

    def __init__(self, scheme: SchemeName, nbytes: int, context: ForkServerContext, workers: int) -> None:
        super().__init__(scheme, nbytes, context, workers)
        try:
            import ray  # noqa: PLC0415 - an extra that takes seconds to import
            import ray.exceptions  # noqa: PLC0415
        except ImportError as error:
            raise MissingExtraError("ray", "weightsync soak --scheme ray") from error
        self._ray: Any = ray
        self._cleanup = contextlib.ExitStack()
        self._actors: list[Any] = []

    def open(self) -> None:
        """Start Ray."""
        if self._ray.is_initialized():
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # A short path: it has Ray's sockets, whose paths may have 107 characters.
        folder = tempfile.TemporaryDirectory(prefix="ws", dir="/tmp", ignore_cleanup_errors=True)
        self._cleanup.enter_context(folder)
        self._cleanup.callback(self._ray.shutdown)
        settings: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
        self._ray.init(address="local", object_store_memory=200 * 2**20, _temp_dir=folder.name, **settings)

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
        return Member(_ActorProcess(pid), _ActorControl(self._ray, actor)), actor

    def relink(self, index: int, member: Member) -> Any:
        """A link is a series of calls: the same actor takes another."""
        assert isinstance(member.control, _ActorControl)
        return member.control.actor

    def dismiss(self, member: Member) -> None:
        """Kill the actor, which never ends by itself."""
        member.process.kill()

    def reached(self, endpoints: Sequence[Any], processes: Sequence[Process]) -> Mapping[str, Any]:
        """The actors."""
        return {"remote_collectors": list(endpoints)}

    def watched(self, member: Member) -> None:
        """Ray reports a dead actor."""


class _ActorProcess:
    """The process of a Ray actor, which is not this process's child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def is_alive(self) -> bool:
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state != "Z"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def join(self, timeout: float | None = None) -> None:
        until = None if timeout is None else time.monotonic() + timeout
        while self.is_alive() and (until is None or time.monotonic() < until):
            time.sleep(0.01)

    def close(self) -> None:
        """There is nothing to release."""


class _ActorControl:
    """Asks a Ray actor by calls."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self.actor = actor
        self._ray = ray
        self._asked: Any = None

    def send(self, request: Request) -> None:
        self._asked = self.actor.ask.remote(request)

    def poll(self, timeout: float) -> bool:
        return bool(self._ray.wait([self._asked], timeout=timeout)[0])

    def recv(self) -> Any:
        try:
            return self._ray.get(self._asked)
        except self._ray.exceptions.RayError as error:
            raise EOFError(str(error)) from error

    def close(self) -> None:
        """The actor ends with the others."""


MEMBERS: Mapping[SchemeName, type[PipeMembers]] = {
    SchemeName.SHARED: PipeMembers,
    SchemeName.PROCESS: PipeMembers,
    SchemeName.DISTRIBUTED: StoreMembers,
    SchemeName.RPC: RpcMembers,
    SchemeName.RAY: RayMembers,
}
