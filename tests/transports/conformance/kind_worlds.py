"""Worlds of real processes for weights of every kind: a trainer and two workers, over each transport.

Each kind is a model with its own id, so that one world carries all kinds. The trainer and the workers run functions
that take a `WorkerSetup`, in the test's process, in a child process or in a Ray actor.
"""

from __future__ import annotations

import abc
import copy
import importlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from fleet import PATIENCE, Worker, WorkerSetup
from torch.distributed import TCPStore
from weight_kinds import BY_NAME, expected, nudge, snapshot
from world_adapters import enter_rpc

from weightsync import (
    DistributedWeightSyncScheme,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
    SyncReport,
    WeightSyncActor,
    WeightSyncError,
    WorkerLostError,
)
from weightsync.weights import packing

WORKERS = 2
ALL_WORKERS = tuple(range(WORKERS))


# ----------------------------------------------------------------------------- functions that run in the trainer


def begin(setup: WorkerSetup, model_id: str, workers: tuple[int, ...] = (0,), **given: Any) -> None:
    """Create a model's sender for these workers without connecting it; ``given`` is passed to `init_on_sender`."""
    setup.kept[model_id] = scheme = setup.kept["make"]()
    scheme.init_on_sender(model_id, **{**setup.kept["reach"](workers), **given})


def begin_kind(setup: WorkerSetup, model_id: str, kind: str) -> None:
    """Create the sender of a kind for the first worker, and the first source of its weights."""
    begin(setup, model_id)
    setup.kept["source of " + model_id] = BY_NAME[kind].source(1)


def begin_cast(setup: WorkerSetup, model_id: str, wire_dtype: Any, workers: tuple[int, ...] = (0,)) -> None:
    """Create the sender of a registered model whose weights are cast to a wire dtype."""
    setup.kept["source of " + model_id] = model = BY_NAME["buffers"].source(1)
    setup.kept[model_id] = scheme = setup.kept["make"](wire_dtype=wire_dtype)
    scheme.init_on_sender(model_id, **setup.kept["reach"](workers), model=model)


def send_cast(setup: WorkerSetup, model_id: str, dtype: torch.dtype, by_scheme: bool) -> tuple[SyncReport, Any, bytes]:
    """Change the registered model and send it. Returns the report, the expected weights and their digest."""
    model, scheme = nudge(setup.kept["source of " + model_id]), setup.kept[model_id]
    report = (scheme if by_scheme else scheme.get_sender()).send(timeout=PATIENCE)
    return report, snapshot(copy.deepcopy(model).to(dtype)), scheme.get_sender().digest()


def refusals(setup: WorkerSetup, model_id: str) -> list[tuple[str, str]]:
    """The errors of two sends to a worker whose model has other dtypes than the weights."""
    errors = []
    for _ in range(2):
        try:
            setup.kept[model_id].get_sender().send(timeout=PATIENCE)
        except WeightSyncError as error:
            errors.append((type(error).__name__, str(error)))
    return errors


def send_kind(setup: WorkerSetup, model_id: str, kind: str) -> tuple[SyncReport, dict[str, Any], bytes]:
    """Send a kind, and change its source afterwards. Returns the report, the expected weights and their digest."""
    source, sender = setup.kept["source of " + model_id], setup.kept[model_id].get_sender()
    wanted = expected(source)
    report = sender.send(source, timeout=PATIENCE)
    setup.kept["source of " + model_id] = BY_NAME[kind].change(source)
    return report, wanted, sender.digest()


def send_what(setup: WorkerSetup, model_id: str, make: Callable[[], Any]) -> SyncReport:
    """Send the weights that ``make`` returns. Returns the report, even of a failed send."""
    report: SyncReport = setup.kept[model_id].get_sender().send(make(), timeout=PATIENCE, on_failure="report")
    return report


def link_state(setup: WorkerSetup, model_id: str) -> tuple[int, str]:
    """The sender's version and the name of its state."""
    sender = setup.kept[model_id].get_sender()
    return sender.version, sender.state.value


def begin_mapped(setup: WorkerSetup, model_id: str, devices: list[str]) -> tuple[list[int], set[str], str]:
    """Create a module's sender with a ``device_map_fn``: each worker gets its own first weights, on its device.

    Returns:
        The worker ids and the types of weights that ``device_map_fn`` was called with, and the scheme's strategy.
    """
    setup.kept["source of " + model_id] = model = BY_NAME["buffers"].source(1).to(devices[0])
    workers, types = [], set()

    def place(worker: int, weights: Any) -> Any:
        workers.append(worker)
        types.add(type(weights).__name__)
        return {name: marked(value, worker).to(devices[worker]) for name, value in weights.items()}

    begin(setup, model_id, ALL_WORKERS, model=model, device_map_fn=place, num_workers=WORKERS)
    return workers, types, setup.kept[model_id].strategy_str


def marked(weights: Any, worker: int) -> Any:
    """The first weights of a worker, made distinct by its id, from a tensor or a TensorDict."""
    return weights + 1 + worker


def push(setup: WorkerSetup, model_id: str) -> tuple[SyncReport, dict[str, Any]]:
    """Change the registered model, and send it through generation B's `send`. Returns the report and the weights."""
    model = nudge(setup.kept["source of " + model_id])
    return setup.kept[model_id].send(timeout=PATIENCE), snapshot(model)


def pack_as_if_on_a_device(setup: WorkerSetup) -> None:
    """Make this process pack all weights as it packs those on a device, in chunks of 48 bytes."""
    setup.kept["posing"] = posing = pytest.MonkeyPatch()
    posing.setattr(packing, "_on_one_device", bool)
    posing.setattr(packing, "CHUNK", 48)
    packing._chunks.cache_clear()


def pack_normally(setup: WorkerSetup) -> None:
    setup.kept.pop("posing").undo()
    packing._chunks.cache_clear()


def finish(setup: WorkerSetup, model_id: str) -> None:
    """Close a model's scheme."""
    setup.kept.pop(model_id).close()
    setup.kept.pop("source of " + model_id, None)


# ------------------------------------------------------------------------------- functions that run in a worker


def hold(setup: WorkerSetup, model_id: str, make: Callable[[], Any]) -> None:
    """Keep the model that ``make`` returns, and create its receiver unless the worker's actor does so itself."""
    setup.kept["model of " + model_id] = model = make()
    if "listen" in setup.kept:
        scheme = setup.kept["make"]()
        scheme.init_on_worker(model_id, model=model, **setup.kept["listen"])
        setup.kept[model_id] = scheme


def hold_kind(setup: WorkerSetup, model_id: str, kind: str) -> None:
    hold(setup, model_id, lambda: BY_NAME[kind].destination(2))


def change_model(setup: WorkerSetup, model_id: str, change: Callable[[Any], Any]) -> None:
    """Change a model by hand."""
    change(setup.kept["model of " + model_id])


def take(setup: WorkerSetup, model_id: str) -> bool:
    """Receive one version."""
    return bool(setup.kept[model_id].get_receiver().receive(timeout=PATIENCE))


def take_and_return_error(setup: WorkerSetup, model_id: str) -> str:
    """Try to receive a version, and return the error's message."""
    try:
        take(setup, model_id)
    except WeightSyncError as error:
        return str(error)
    return ""


def meet(setup: WorkerSetup, model_id: str) -> None:
    """Call generation B's `connect`, from which on a worker applies versions in the background."""
    setup.kept[model_id].connect(timeout=PATIENCE)


def serves(setup: WorkerSetup, model_id: str) -> tuple[dict[str, Any], bytes]:
    """All weights that are served, bit by bit, and their digest."""
    receiver = _receiver(setup, model_id)
    with receiver.serving():
        return snapshot(setup.kept["model of " + model_id]), receiver.digest()


def _receiver(setup: WorkerSetup, model_id: str) -> Any:
    return setup.kept["receiver"](model_id) if "receiver" in setup.kept else setup.kept[model_id].get_receiver()


def leave(setup: WorkerSetup, model_id: str) -> None:
    """Close a model's receiver, and drop the model."""
    _receiver(setup, model_id).close()
    del setup.kept["model of " + model_id]


# ------------------------------------------------------------------------------------------------------ worlds


class World(abc.ABC):
    """A trainer and two workers, which run functions on request: see ``do``, ``tell`` and ``answer``."""

    trainer: Any
    workers: list[Any]

    def send(self, model_id: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Have the trainer send, and the first worker receive. Returns the trainer's result."""
        worker = self.workers[0]
        worker.tell(take, model_id)
        result = self.trainer.do(function, model_id, *arguments)
        assert worker.answer()
        return result

    def refuse(self, model_id: str) -> list[tuple[str, str]]:
        """Have the trainer send twice to the first worker, which cannot take the weights. Returns the sends' errors."""
        self.workers[0].tell(take_and_return_error, model_id)
        errors: list[tuple[str, str]] = self.trainer.do(refusals, model_id)
        why = self.workers[0].answer()
        assert "its handshake was refused" in why, why
        return errors

    def connect(self, model_id: str) -> None:
        """Have the trainer and both workers connect, as in generation B."""
        for worker in self.workers:
            worker.tell(meet, model_id)
        self.trainer.do(meet, model_id)
        for worker in self.workers:
            worker.answer()

    def refusal_of(self, model_id: str, make: Callable[[], Any]) -> str:
        """The error for a worker whose model, made by ``make``, cannot take weights."""
        try:
            self.workers[0].do(hold, model_id, make)
        except WeightSyncError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def forget(self, model_id: str, workers: tuple[int, ...] = (0,)) -> None:
        """Close a model's schemes, and drop its weights."""
        self.trainer.do(finish, model_id)
        for worker in workers:
            self.workers[worker].do(leave, model_id)

    @abc.abstractmethod
    def end(self) -> None:
        """End all processes and actors of this world."""


class _Here:
    """A trainer in the test's process."""

    def __init__(self, **kept: Any) -> None:
        self.setup = WorkerSetup(None, None)
        self.setup.kept |= kept

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.setup, *arguments)


class OverPipes(World):
    """Workers reached by pipes, which all models share."""

    def __init__(self, context: Any, make: Any) -> None:
        self.workers = [Worker(context, None) for _ in ALL_WORKERS]
        self.trainer = _Here(make=make, reach=self._reach)
        for worker in self.workers:
            worker.do(_behind_pipe, make)
            worker.do(hold, KEPT_OPEN, dict)
        self.trainer.do(begin, KEPT_OPEN, ALL_WORKERS)

    def _reach(self, workers: tuple[int, ...]) -> dict[str, Any]:
        return {"pipes": [self.workers[worker].pipe for worker in workers]}

    def end(self) -> None:
        self.trainer.do(finish, KEPT_OPEN)
        for process in self.workers:
            process.kill()
            process.end()


#: The id of a model that keeps the pipes open: a connection closes with the last model that uses it.
KEPT_OPEN = "kept open"


def _behind_pipe(setup: WorkerSetup, make: Any) -> None:
    setup.kept |= {"make": make, "listen": {"pipe": setup.pipe}}


class _Processes(World):
    """A trainer and workers in child processes, since RPC and its threads outlive a test."""

    def __init__(self, context: Any, enter: Callable[[WorkerSetup, int, Any], None], where: Any) -> None:
        self.trainer, *self.workers = everybody = [Worker(context, None) for _ in range(1 + WORKERS)]
        for rank, process in enumerate(everybody):
            process.tell(enter, rank, where)
        for process in everybody:
            process.answer()

    def end(self) -> None:
        for process in [self.trainer, *self.workers]:
            process.kill()
            process.end()


class OverRpc(_Processes):
    """An RPC world whose store is a file in the given folder."""

    def __init__(self, context: Any, folder: str) -> None:
        super().__init__(context, _into_rpc, folder)


def _into_rpc(setup: WorkerSetup, rank: int, folder: str) -> None:
    enter_rpc(folder, f"rank-{rank}", rank, 1 + WORKERS)
    setup.kept |= {"make": RPCWeightSyncScheme, "listen": {}}
    setup.kept["reach"] = lambda workers: {"collector_infos": [f"rank-{1 + worker}" for worker in workers]}


class OverStore(_Processes):
    """Links over torch.distributed with gloo, through a store in the test's process."""

    def __init__(self, context: Any) -> None:
        self.store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        super().__init__(context, _to_store, self.store.port)


def _to_store(setup: WorkerSetup, rank: int, port: int) -> None:
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
    setup.kept |= {"make": DistributedWeightSyncScheme, "listen": {"store": store, "rank": rank}}
    setup.kept["reach"] = lambda workers: {"store": store, "num_workers": len(workers)}


class OverRay(World):
    """Ray actors with `WeightSyncActor`, and a trainer in this process. The trainer's calls make actors receive."""

    def __init__(self) -> None:
        self._ray = importlib.import_module("ray")
        self._actors = [self._ray.remote(num_cpus=0)(Holder).remote() for _ in ALL_WORKERS]
        # No timeout here: processes that start at once may take minutes, and the test has its own timeout.
        self._ray.get([actor.starts.remote() for actor in self._actors])
        self.workers = [_Actor(self._ray, actor) for actor in self._actors]
        self.trainer = _Here(make=RayWeightSyncScheme, reach=self._reach)

    def _reach(self, workers: tuple[int, ...]) -> dict[str, Any]:
        return {"remote_collectors": [self._actors[worker] for worker in workers]}

    def send(self, model_id: str, function: Callable[..., Any], *arguments: Any) -> Any:
        return self.trainer.do(function, model_id, *arguments)

    def refuse(self, model_id: str) -> list[tuple[str, str]]:
        errors: list[tuple[str, str]] = self.trainer.do(refusals, model_id)
        return errors

    def connect(self, model_id: str) -> None:
        self.trainer.do(meet, model_id)

    def refusal_of(self, model_id: str, make: Callable[[], Any]) -> str:
        """An actor raises the error at the handshake or at the update: read it from the send's error or report."""
        super().refusal_of(model_id, make)
        self.trainer.do(begin, model_id)
        try:
            outcome = self.trainer.do(send_what, model_id, lambda: BY_NAME["module"].source(1))[0]
        except WorkerLostError as lost:
            return str(lost)
        finally:
            self.trainer.do(finish, model_id)
        return f"{outcome.kind.name}: {outcome.reason}"

    def end(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)


class Holder(WeightSyncActor):
    """An actor that holds models by their ids."""

    def __init__(self) -> None:
        self.setup = WorkerSetup(None, None)
        self.setup.kept["receiver"] = self.weight_receiver

    def starts(self) -> None:
        """Return once the actor has started."""

    def get_model(self, model_id: str) -> Any:
        return self.setup.kept.get("model of " + model_id)

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.setup, *arguments)


class _Actor:
    """The test's handle of an actor."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._actor = actor

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._ray.get(self._actor.do.remote(function, *arguments), timeout=PATIENCE)
