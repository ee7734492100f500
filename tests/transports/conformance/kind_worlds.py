"""Worlds of real processes for weights of every kind: a trainer and two workers, over each transport.

Each kind is a model of its own, so that one world carries them all. What trainer and workers do are functions of a
setup, wherever that is: in the test's process, in one of a crew's, or in an actor.
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
EVERYBODY = tuple(range(WORKERS))


# ---------------------------------------------------------------------------------------- what the trainer is asked


def begin(setup: WorkerSetup, model_id: str, workers: tuple[int, ...] = (0,), **given: Any) -> None:
    """Make the sender of a model to those workers, without connecting; ``given`` is for `init_on_sender`."""
    setup.kept[model_id] = scheme = setup.kept["make"]()
    scheme.init_on_sender(model_id, **{**setup.kept["reach"](workers), **given})


def begin_kind(setup: WorkerSetup, model_id: str, kind: str) -> None:
    """Make the sender of a kind to the first worker, and its first source."""
    begin(setup, model_id)
    setup.kept["source of " + model_id] = BY_NAME[kind].source(1)


def begin_cast(setup: WorkerSetup, model_id: str, wire_dtype: Any, workers: tuple[int, ...] = (0,)) -> None:
    """Make the sender of a registered model that is cast on its way."""
    setup.kept["source of " + model_id] = model = BY_NAME["buffers"].source(1)
    setup.kept[model_id] = scheme = setup.kept["make"](wire_dtype=wire_dtype)
    scheme.init_on_sender(model_id, **setup.kept["reach"](workers), model=model)


def send_cast(setup: WorkerSetup, model_id: str, dtype: torch.dtype, by_scheme: bool) -> tuple[SyncReport, Any, bytes]:
    """Change the registered model and send it: the report, all that was to be served, and its digest."""
    model, scheme = nudge(setup.kept["source of " + model_id]), setup.kept[model_id]
    report = (scheme if by_scheme else scheme.get_sender()).send(timeout=PATIENCE)
    return report, snapshot(copy.deepcopy(model).to(dtype)), scheme.get_sender().digest()


def refusals(setup: WorkerSetup, model_id: str) -> list[tuple[str, str]]:
    """What two sends raise to a worker whose model has other dtypes than what is sent."""
    errors = []
    for _ in range(2):
        try:
            setup.kept[model_id].get_sender().send(timeout=PATIENCE)
        except WeightSyncError as error:
            errors.append((type(error).__name__, str(error)))
    return errors


def send_kind(setup: WorkerSetup, model_id: str, kind: str) -> tuple[SyncReport, dict[str, Any], bytes]:
    """Send a kind and change the source: the report, all that was to be served, and its digest."""
    source, sender = setup.kept["source of " + model_id], setup.kept[model_id].get_sender()
    wanted = expected(source)
    report = sender.send(source, timeout=PATIENCE)
    setup.kept["source of " + model_id] = BY_NAME[kind].change(source)
    return report, wanted, sender.digest()


def send_what(setup: WorkerSetup, model_id: str, make: Callable[[], Any]) -> SyncReport:
    """Send what ``make`` makes; the report, whatever is in it."""
    report: SyncReport = setup.kept[model_id].get_sender().send(make(), timeout=PATIENCE, on_failure="report")
    return report


def link_state(setup: WorkerSetup, model_id: str) -> tuple[int, str]:
    """The sender's version and state."""
    sender = setup.kept[model_id].get_sender()
    return sender.version, sender.state.value


def begin_mapped(setup: WorkerSetup, model_id: str, devices: list[str]) -> tuple[list[int], set[str], str]:
    """Make the sender of a module to all workers, whose first weights differ by worker and lie on its device.

    Returns:
        What the ``device_map_fn`` was called with: each worker's id, and the weights' types; the scheme's strategy.
    """
    setup.kept["source of " + model_id] = model = BY_NAME["buffers"].source(1).to(devices[0])
    workers, types = [], set()

    def place(worker: int, weights: Any) -> Any:
        workers.append(worker)
        types.add(type(weights).__name__)
        return {name: marked(value, worker).to(devices[worker]) for name, value in weights.items()}

    begin(setup, model_id, EVERYBODY, model=model, device_map_fn=place, num_workers=WORKERS)
    return workers, types, setup.kept[model_id].strategy_str


def marked(weights: Any, worker: int) -> Any:
    """A worker's own first weights, of a tensor or a TensorDict."""
    return weights + 1 + worker


def push(setup: WorkerSetup, model_id: str) -> tuple[SyncReport, dict[str, Any]]:
    """Change the registered model, and send it by the second generation's verb."""
    model = nudge(setup.kept["source of " + model_id])
    return setup.kept[model_id].send(timeout=PATIENCE), snapshot(model)


def pose(setup: WorkerSetup) -> None:
    """From now on all weights of this process go the way of those on a device, in pieces of 48 bytes."""
    setup.kept["posing"] = posing = pytest.MonkeyPatch()
    posing.setattr(packing, "_on_one_device", bool)
    posing.setattr(packing, "CHUNK", 48)
    packing._chunks.cache_clear()


def drop_the_pose(setup: WorkerSetup) -> None:
    setup.kept.pop("posing").undo()
    packing._chunks.cache_clear()


def finish(setup: WorkerSetup, model_id: str) -> None:
    """Close a model's scheme."""
    setup.kept.pop(model_id).close()
    setup.kept.pop("source of " + model_id, None)


# ------------------------------------------------------------------------------------------ what a worker is asked


def hold(setup: WorkerSetup, model_id: str, make: Callable[[], Any]) -> None:
    """Have the model that ``make`` makes, and listen for its weights where calls do not do that by themselves."""
    setup.kept["model of " + model_id] = model = make()
    if "listen" in setup.kept:
        scheme = setup.kept["make"]()
        scheme.init_on_worker(model_id, model=model, **setup.kept["listen"])
        setup.kept[model_id] = scheme


def hold_kind(setup: WorkerSetup, model_id: str, kind: str) -> None:
    hold(setup, model_id, lambda: BY_NAME[kind].destination(2))


def change_model(setup: WorkerSetup, model_id: str, change: Callable[[Any], Any]) -> None:
    """Do something to a model by hand."""
    change(setup.kept["model of " + model_id])


def take(setup: WorkerSetup, model_id: str) -> bool:
    """Receive one version."""
    return bool(setup.kept[model_id].get_receiver().receive(timeout=PATIENCE))


def take_in_vain(setup: WorkerSetup, model_id: str) -> str:
    """Why nothing can be received."""
    try:
        take(setup, model_id)
    except WeightSyncError as error:
        return str(error)
    return ""


def meet(setup: WorkerSetup, model_id: str) -> None:
    """The second generation's `connect`; from then on versions go live in the background."""
    setup.kept[model_id].connect(timeout=PATIENCE)


def serves(setup: WorkerSetup, model_id: str) -> tuple[dict[str, Any], bytes]:
    """All that is served, bit by bit, and its digest."""
    receiver = _receiver(setup, model_id)
    with receiver.serving():
        return snapshot(setup.kept["model of " + model_id]), receiver.digest()


def _receiver(setup: WorkerSetup, model_id: str) -> Any:
    return setup.kept["receiver"](model_id) if "receiver" in setup.kept else setup.kept[model_id].get_receiver()


def leave(setup: WorkerSetup, model_id: str) -> None:
    """Close a model's receiver, and let go of the model."""
    _receiver(setup, model_id).close()
    del setup.kept["model of " + model_id]


# ------------------------------------------------------------------------------------------------------ worlds


class World(abc.ABC):
    """A trainer and two workers, which do what they are asked: ``do``, ``tell`` and ``answer``."""

    trainer: Any
    workers: list[Any]

    def send(self, model_id: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Have the trainer send to the first worker, which receives."""
        worker = self.workers[0]
        worker.tell(take, model_id)
        result = self.trainer.do(function, model_id, *arguments)
        assert worker.answer()
        return result

    def refuse(self, model_id: str) -> list[tuple[str, str]]:
        """Have the first worker refuse every update. Returns what the trainer gets from each send."""
        self.workers[0].tell(take_in_vain, model_id)
        errors: list[tuple[str, str]] = self.trainer.do(refusals, model_id)
        why = self.workers[0].answer()
        assert "its handshake was refused" in why, why
        return errors

    def connect(self, model_id: str) -> None:
        """Have everybody connect, as the second generation does."""
        for worker in self.workers:
            worker.tell(meet, model_id)
        self.trainer.do(meet, model_id)
        for worker in self.workers:
            worker.answer()

    def refusal_of(self, model_id: str, make: Callable[[], Any]) -> str:
        """What is said of a worker whose own model, made by ``make``, cannot take weights."""
        try:
            self.workers[0].do(hold, model_id, make)
        except WeightSyncError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def forget(self, model_id: str, workers: tuple[int, ...] = (0,)) -> None:
        """Close a model's schemes, and let go of its weights."""
        self.trainer.do(finish, model_id)
        for worker in workers:
            self.workers[worker].do(leave, model_id)

    @abc.abstractmethod
    def end(self) -> None:
        """Nothing of it is left."""


class _Here:
    """A trainer in the test's own process."""

    def __init__(self, **kept: Any) -> None:
        self.setup = WorkerSetup(None, None)
        self.setup.kept |= kept

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.setup, *arguments)


class OverPipes(World):
    """Workers behind pipes, which all models share."""

    def __init__(self, context: Any, make: Any) -> None:
        self.workers = [Worker(context, None) for _ in EVERYBODY]
        self.trainer = _Here(make=make, reach=self._reach)
        for worker in self.workers:
            worker.do(_behind_pipe, make)
            worker.do(hold, KEPT_OPEN, dict)
        self.trainer.do(begin, KEPT_OPEN, EVERYBODY)

    def _reach(self, workers: tuple[int, ...]) -> dict[str, Any]:
        return {"pipes": [self.workers[worker].pipe for worker in workers]}

    def end(self) -> None:
        self.trainer.do(finish, KEPT_OPEN)
        for process in self.workers:
            process.kill()
            process.end()


#: A connection closes with the last of the models that share it: this one stays.
KEPT_OPEN = "kept open"


def _behind_pipe(setup: WorkerSetup, make: Any) -> None:
    setup.kept |= {"make": make, "listen": {"pipe": setup.pipe}}


class _Processes(World):
    """All of them processes of a crew's: neither RPC nor its threads end with a test."""

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
    """One RPC world, whose store is a file of that folder."""

    def __init__(self, context: Any, folder: str) -> None:
        super().__init__(context, _into_rpc, folder)


def _into_rpc(setup: WorkerSetup, rank: int, folder: str) -> None:
    enter_rpc(folder, f"rank-{rank}", rank, 1 + WORKERS)
    setup.kept |= {"make": RPCWeightSyncScheme, "listen": {}}
    setup.kept["reach"] = lambda workers: {"collector_infos": [f"rank-{1 + worker}" for worker in workers]}


class OverStore(_Processes):
    """A store of the test's process, and gloo pairs."""

    def __init__(self, context: Any) -> None:
        self.store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        super().__init__(context, _to_store, self.store.port)


def _to_store(setup: WorkerSetup, rank: int, port: int) -> None:
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
    setup.kept |= {"make": DistributedWeightSyncScheme, "listen": {"store": store, "rank": rank}}
    setup.kept["reach"] = lambda workers: {"store": store, "num_workers": len(workers)}


class OverRay(World):
    """Actors of our mixin, whose calls receive; the trainer is in this process, which is connected to Ray."""

    def __init__(self) -> None:
        self._ray = importlib.import_module("ray")
        self._actors = [self._ray.remote(num_cpus=0)(Holder).remote() for _ in EVERYBODY]
        # Starting a process takes seconds, and minutes where many do so at once: the test's own timeout ends it.
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
        """It is said when the handshake comes, or weights: before the send, or by its report."""
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
    """An actor that holds models, by their ids."""

    def __init__(self) -> None:
        self.setup = WorkerSetup(None, None)
        self.setup.kept["receiver"] = self.weight_receiver

    def starts(self) -> None:
        """Nothing, once it has started."""

    def get_model(self, model_id: str) -> Any:
        return self.setup.kept.get("model of " + model_id)

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.setup, *arguments)


class _Actor:
    """An actor, from the test's side."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._actor = actor

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._ray.get(self._actor.do.remote(function, *arguments), timeout=PATIENCE)
