"""RPC worlds for tests: a trainer and its workers, one process each, and functions that run in them."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from fleet import PATIENCE, Worker, WorkerSetup, constants, filled, small
from rpc_processes import TCP_ONLY
from torch import nn
from torch.distributed import rpc

from weightsync import RPCWeightSyncScheme, WeightSyncError

_numbers = itertools.count()


class World:
    """One RPC world: ``trainer``, and ``w0``, ``w1`` ... The test's own process is not in it.

    Args:
        context: the multiprocessing context that starts the processes.
        folder: the folder for the file of the store.
        workers: the number of workers.
        over: RPC's timeout in seconds, and TensorPipe's transports and channels.
    """

    def __init__(self, context: Any, folder: Path, workers: int, **over: Any) -> None:
        self.context = context
        self.folder = folder
        self.over = {"rpc_timeout": 60.0, **TCP_ONLY, **over}
        self.strangers: list[Worker] = []
        self.trainer = Worker(context, None)
        self.workers = [Worker(context, None) for _ in range(workers)]
        self.names = [f"w{index}" for index in range(workers)]
        self.begin()

    def begin(self) -> None:
        """Let all processes join a world, with a new store."""
        self.options = {"init_method": f"file://{self.folder}/store{next(_numbers)}", **self.over}
        everybody = [self.trainer, *self.workers]
        for rank, (name, process) in enumerate(zip(["trainer", *self.names], everybody, strict=True)):
            process.tell(enter, name, rank, len(everybody), self.options)
        for process in everybody:
            process.answer()

    def stranger(self) -> Worker:
        """Start one more process, which is in no world yet."""
        self.strangers.append(Worker(self.context, None))
        return self.strangers[-1]

    def end(self) -> None:
        """Kill all processes, since torch cannot shut down a world in which a process has died."""
        for process in {*self.strangers, self.trainer, *self.workers}:
            process.kill()
            process.end()

    @contextlib.contextmanager
    def syncing(self, workers: list[int], make: Callable[..., nn.Module] = small, **given: Any) -> Iterator[Worker]:
        """Make a sender in the trainer and receivers in these workers, and close them afterwards."""
        for worker in workers:
            self.workers[worker].do(listen, make)
        self.trainer.do(command, [self.names[worker] for worker in workers], make, given)
        try:
            yield self.trainer
        finally:
            self.trainer.do(retire)
            for worker in workers:
                if self.workers[worker].process.is_alive():
                    self.workers[worker].do(retire)


# -------------------------------------------------------------------------------------- functions for any process


def enter(setup: WorkerSetup, name: str, rank: int, size: int, options: dict[str, Any]) -> int:
    """Join an RPC world."""
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")  # about its own deprecations
        rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)
    return os.getpid()


def shut_down_rpc(setup: WorkerSetup, graceful: bool = False) -> float:
    """Shut RPC down. Returns how many seconds that took."""
    started = time.monotonic()
    rpc.shutdown(graceful=graceful)
    return time.monotonic() - started


def retire(setup: WorkerSetup) -> None:
    """Close every scheme, sender and receiver of this process."""
    for thing in [setup.scheme, *setup.kept.values()]:
        close = getattr(thing, "close", None)
        if close is not None:
            close()
    setup.scheme, setup.model, setup.receiver, setup.kept = None, None, None, {}


# ---------------------------------------------------------------------------------------- functions for workers


def listen(setup: WorkerSetup, make: Callable[..., nn.Module] = small, model_id: str = "policy") -> None:
    """Make a receiver in this worker."""
    setup.scheme, setup.model = RPCWeightSyncScheme(), make()
    setup.scheme.init_on_worker(model_id, model=setup.model)
    setup.receiver = setup.scheme.get_receiver()
    setup.kept[model_id] = setup.scheme


def shows(setup: WorkerSetup) -> tuple[int | None, set[float]]:
    return setup.receiver.version, constants(setup.model)


def state_dict(setup: WorkerSetup) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in setup.model.state_dict().items()}


# --------------------------------------------------------------------------------------- functions for the trainer


def command(setup: WorkerSetup, names: list[Any], make: Callable[..., nn.Module] = small, given: Any = None) -> None:
    """Make a sender to the workers of these names."""
    setup.scheme, setup.model = RPCWeightSyncScheme(), make(1.0)
    setup.scheme.init_on_sender("policy", collector_infos=names, model=setup.model, **(given or {}))
    setup.kept["sender"] = setup.scheme.get_sender()


def send(setup: WorkerSetup, fill: float | None = None, **options: Any) -> Any:
    """Send the model, after setting all its weights to ``fill`` if given. Returns the report."""
    if fill is not None:
        filled(setup.model, fill)
    return setup.kept["sender"].send(**{"timeout": PATIENCE, **options})


def send_async(setup: WorkerSetup, fill: float, **options: Any) -> Any:
    filled(setup.model, fill)
    return setup.kept["sender"].send_async(**options)


def wait_async(setup: WorkerSetup, **options: Any) -> Any:
    return setup.kept["sender"].wait_async(**{"timeout": PATIENCE, **options})


def sender_state(setup: WorkerSetup) -> tuple[str, int, list[str]]:
    sender = setup.kept["sender"]
    return sender.state.value, sender.version, [entry.link_state.name for entry in sender.workers.values()]


def attempt(setup: WorkerSetup, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function, and return its WeightSyncError, or None if it raises none."""
    try:
        function(setup, *arguments, **options)
    except WeightSyncError as error:
        return error
    return None


def odd(fill: float = 0.0) -> nn.Module:
    """A model with weights of every kind: all dtypes, a 0-dim, an empty and a non-contiguous tensor."""
    model = nn.Module()
    kinds = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64]
    for kind in [*kinds, torch.bool, torch.complex64, torch.float8_e4m3fn]:
        value = torch.full((3, 5), fill).to(kind) if kind is not torch.bool else torch.full((3, 5), bool(fill))
        model.register_buffer(f"of_{str(kind).removeprefix('torch.')}", value)
    model.register_buffer("scalar", torch.tensor(fill))
    model.register_buffer("nothing", torch.zeros(0, 4))
    model.register_buffer("strided", torch.full((4, 6), fill).t())
    return model


def send_odd(setup: WorkerSetup) -> Any:
    setup.model = odd(1.0)
    return setup.kept["sender"].send(setup.model, timeout=PATIENCE)
