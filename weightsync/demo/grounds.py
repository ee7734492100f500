"""Where the trainer and its worker processes find each other, scheme by scheme."""

from __future__ import annotations

import contextlib
import enum
import importlib
import multiprocessing
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Protocol

from weightsync import ConfigurationError, TransportError
from weightsync.demo.settings import MODEL_ID, START_TIMEOUT, SchemeName

if TYPE_CHECKING:
    from torch import nn

    from weightsync import WeightReceiver, WeightSyncScheme


#: All are on this machine.
_HOST = "127.0.0.1"


class Seat(Protocol):
    """A worker's place. It travels to the worker's process when that is started."""

    def take(self, scheme: WeightSyncScheme, model: nn.Module) -> WeightReceiver:
        """Initialise the worker's side."""

    def leave(self) -> None:
        """The worker ends."""

    def given(self) -> None:
        """In the trainer: the worker has it now."""


class Ground(Protocol):
    """The trainer's side of it."""

    def seat(self, index: int) -> Seat:
        """Make a worker's place."""

    def arguments(self, gathered: Callable[[], None], processes: Sequence[BaseProcess]) -> dict[str, Any]:
        """What `init_on_sender` is to be given, now that all workers are started.

        Args:
            gathered: returns once each of them is about to take its seat, or raises.
            processes: theirs.
        """

    def close(self) -> None:
        """Let go of it all; the workers have ended."""


@dataclass(frozen=True, slots=True)
class PipeSeat:
    """A worker's end of a pipe."""

    pipe: Connection

    def take(self, scheme: WeightSyncScheme, model: nn.Module) -> WeightReceiver:
        """Initialise the worker's side."""
        scheme.init_on_worker(MODEL_ID, pipe=self.pipe, model=model)
        return scheme.get_receiver()

    def leave(self) -> None:
        """Close it."""
        self.pipe.close()

    def given(self) -> None:
        """Close the trainer's copy of it."""
        self.pipe.close()


class Pipes:
    """One pipe a worker."""

    def __init__(self) -> None:
        self._ours: list[Connection] = []

    def seat(self, index: int) -> Seat:
        """Lay a pipe."""
        ours, theirs = multiprocessing.Pipe()
        self._ours.append(ours)
        return PipeSeat(theirs)

    def arguments(self, gathered: Callable[[], None], processes: Sequence[BaseProcess]) -> dict[str, Any]:
        """Our ends, and who holds the others."""
        return {"pipes": self._ours, "processes": processes}

    def close(self) -> None:
        """Close our ends."""
        for pipe in self._ours:
            with contextlib.suppress(OSError):
                pipe.close()


@dataclass(frozen=True, slots=True)
class StoreSeat:
    """Where the trainer's store is, and which rank the worker has there."""

    port: int
    rank: int

    def take(self, scheme: WeightSyncScheme, model: nn.Module) -> WeightReceiver:
        """Initialise the worker's side."""
        scheme.init_on_worker(MODEL_ID, store=_store(self.port, _Role.WORKER), rank=self.rank, model=model)
        return scheme.get_receiver()

    def leave(self) -> None:
        """The store's end is collected."""

    def given(self) -> None:
        """The trainer holds nothing of it."""


class Stores:
    """A store of the trainer's; each worker has a rank.

    Args:
        workers: how many.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._store: Any = _store(0, _Role.TRAINER)

    def seat(self, index: int) -> Seat:
        """Worker i is rank i + 1."""
        return StoreSeat(self._store.port, index + 1)

    def arguments(self, gathered: Callable[[], None], processes: Sequence[BaseProcess]) -> dict[str, Any]:
        """The store, how many there are, and who they are."""
        return {"store": self._store, "num_workers": self._workers, "processes": processes}

    def close(self) -> None:
        """Let the store go."""
        self._store = None


class _Role(enum.Enum):
    TRAINER = "trainer"
    WORKER = "worker"


def _store(port: int, role: _Role) -> Any:
    distributed: Any = importlib.import_module("torch.distributed")
    limit = timedelta(seconds=START_TIMEOUT)
    return distributed.TCPStore(_HOST, port, None, role is _Role.TRAINER, limit, wait_for_workers=False)


@dataclass(frozen=True, slots=True)
class RpcSeat:
    """A worker's rank in a world of `torch.distributed.rpc`."""

    meeting: str
    rank: int
    world: int

    def take(self, scheme: WeightSyncScheme, model: nn.Module) -> WeightReceiver:
        """Initialise the worker's side, and join the world."""
        scheme.init_on_worker(MODEL_ID, model=model)
        _join(self.meeting, self.rank, self.world)
        return scheme.get_receiver()

    def leave(self) -> None:
        """Leave the world."""
        _leave()

    def given(self) -> None:
        """The trainer holds nothing of it."""


class RpcWorld:
    """A world of `torch.distributed.rpc`; the trainer is rank 0.

    Args:
        workers: how many.

    Raises:
        ConfigurationError: this process was in such a world before. torch numbers the worlds of a process, and new
            processes would wait for each other in the first.
    """

    _joined = threading.Event()

    def __init__(self, workers: int) -> None:
        if self._joined.is_set():
            raise ConfigurationError(
                "--scheme rpc runs once a process: a world of torch's RPC cannot be left for another with new workers."
            )
        self._world = workers + 1
        self._folder = tempfile.mkdtemp(prefix="weightsync-demo-")

    @property
    def _meeting(self) -> str:
        return f"file://{self._folder}/meeting"

    def seat(self, index: int) -> Seat:
        """Worker i is rank i + 1."""
        return RpcSeat(self._meeting, index + 1, self._world)

    def arguments(self, gathered: Callable[[], None], processes: Sequence[BaseProcess]) -> dict[str, Any]:
        """The workers' names, once all have joined.

        Raises:
            TransportError: they have not.
        """
        # torch would wait half an hour for one that never comes.
        gathered()
        self._joined.set()
        _join(self._meeting, 0, self._world)
        return {"collector_infos": [_name(rank) for rank in range(1, self._world)]}

    def close(self) -> None:
        """Leave the world."""
        _leave()
        shutil.rmtree(self._folder, ignore_errors=True)


def _name(rank: int) -> str:
    return f"worker{rank - 1}" if rank else "trainer"


def _join(meeting: str, rank: int, world: int) -> None:
    """Join a world, in a thread of its own: torch cannot be interrupted there, and gives up after half an hour.

    Raises:
        TransportError: it failed, or took too long.
    """
    end: Future[None] = Future()
    threading.Thread(target=_join_now, args=(meeting, rank, world, end), name="join", daemon=True).start()
    try:
        end.result(START_TIMEOUT)
    except (RuntimeError, TimeoutError) as error:
        raise TransportError(f"{_name(rank)} could not join the others' world of RPC: {error!r}") from error


def _join_now(meeting: str, rank: int, world: int, end: Future[None]) -> None:
    rpc: Any = importlib.import_module("torch.distributed.rpc")
    options = rpc.TensorPipeRpcBackendOptions(init_method=meeting, rpc_timeout=START_TIMEOUT)
    try:
        with warnings.catch_warnings():
            # Of torch's own making: it is how init_rpc meets the others.
            warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
            rpc.init_rpc(_name(rank), rank=rank, world_size=world, rpc_backend_options=options)
    except RuntimeError as error:
        end.set_exception(error)
    else:
        end.set_result(None)


def _leave() -> None:
    rpc: Any = importlib.import_module("torch.distributed.rpc")
    with contextlib.suppress(RuntimeError):  # it was never joined
        # Without waiting for the others: some of them may be dead.
        rpc.shutdown(graceful=False)


def ground_for(scheme: SchemeName, workers: int) -> Ground:
    """The ground on which a scheme's processes meet."""
    match scheme:
        case SchemeName.SHARED | SchemeName.PIPE:
            return Pipes()
        case SchemeName.DISTRIBUTED:
            return Stores(workers)
        case SchemeName.RPC:
            return RpcWorld(workers)
        case SchemeName.RAY:
            raise ConfigurationError("over Ray the workers are actors, and no processes of ours.")
