"""The schemes whose workers join a world once per run: torch's RPC, and Ray.

The world, and the workers in it, stay for the whole run; each case has models of its own in them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import nn

from weightsync import TransportError, WeightSyncActor
from weightsync.bench.contenders import Contender, Situation
from weightsync.bench.floors import Local
from weightsync.bench.judging import Floor
from weightsync.bench.models import digest_of, digest_of_model, make_model
from weightsync.bench.processes import Ask, Workers
from weightsync.bench.schemes import Sending, make_scheme, serve_requests, variants
from weightsync.bench.settings import START_TIMEOUT, BenchError, Payload, SchemeName
from weightsync.bench.watching import forget, watch
from weightsync.local_workers import Failure, join_rpc, joined_rpc, report_failures, rpc_address, rpc_name, running_ray


class RpcWorld:
    """A world of torch's RPC with the trainer and the most workers that any case needs."""

    def __init__(self, workers: int) -> None:
        self._cleanup = contextlib.ExitStack()
        with self._cleanup:
            address, size = self._cleanup.enter_context(rpc_address()), workers + 1
            members = Workers("rpc", stay_in_rpc, [(address, rank, size) for rank in range(1, size)])
            self._cleanup.callback(members.close)
            members.start()
            try:
                self._cleanup.enter_context(joined_rpc(address, size, START_TIMEOUT, START_TIMEOUT))
            except TransportError as error:
                raise BenchError(f"rpc: {error}") from error
            members.gather()
            self._cleanup = self._cleanup.pop_all()

    def contenders(self, situation: Situation) -> Iterator[Contender]:
        """The scheme with each verification, and its floor."""
        names = [rpc_name(rank + 1) for rank in range(situation.workers)]
        yield RpcFloor(situation, names)
        for verify in variants(situation):
            yield RpcScheme(verify, situation, names)

    def close(self) -> None:
        """Leave the world, and end its workers."""
        self._cleanup.close()


class RpcScheme(Sending):
    """The RPC scheme, with a model of its own in each worker."""

    def __init__(self, verify: str, situation: Situation, names: list[str]) -> None:
        self._names, self._model = names, f"{situation.model_id}-{verify}"
        for name in names:
            _call(name, start_serving, self._model, situation.payload, situation.settings.device.worker, verify)
        situation.cleanup.callback(self._release)
        scheme = make_scheme(SchemeName.RPC, verify)
        situation.cleanup.callback(scheme.close)
        scheme.init_on_sender(self._model, model=situation.source.model, collector_infos=names)
        super().__init__(SchemeName.RPC, verify, situation, scheme.get_sender())

    def digests(self) -> Mapping[int, str]:
        """The digest of each worker's model."""
        return {index: _call(name, ask_serving, self._model, Ask.DIGEST) for index, name in enumerate(self._names)}

    def _release(self) -> None:
        for name in self._names:
            with contextlib.suppress(RuntimeError):  # that worker has ended
                _call(name, stop_serving, self._model)


class RpcFloor(Local):
    """One `rpc_sync` of a flat tensor to each worker, one after another."""

    def __init__(self, situation: Situation, names: list[str]) -> None:
        flat = situation.source.flat.cpu()
        self._names = names
        super().__init__(Floor.RPC, lambda: [_call(name, take_flat, flat) for name in names], flat, flat)

    def digests(self) -> Mapping[int, str]:
        """The digest of what each worker received."""
        return {index: _call(name, digest_of_flat) for index, name in enumerate(self._names)}


def _call(name: str, function: Any, *arguments: Any) -> Any:
    from torch.distributed import rpc  # noqa: PLC0415

    answer = rpc.rpc_sync(name, function, args=arguments, timeout=START_TIMEOUT)
    if isinstance(answer, Failure):
        raise BenchError(f"rpc: {name} failed: {answer.reason}\n{answer.remote_traceback}")
    return answer


def stay_in_rpc(channel: Connection, address: str, rank: int, world_size: int) -> None:
    """Run a worker: torch's threads take the calls, until the trainer says stop or is gone."""
    join_rpc(address, rank, world_size, START_TIMEOUT)
    channel.send("ready")
    channel.recv()


#: In a worker: for each model the way to its thread; and the last flat tensor.
_serving: dict[str, tuple[Connection, threading.Thread]] = {}
_flat: list[torch.Tensor] = []


def start_serving(model_id: str, payload: Payload, device: str, verify: str) -> Any:
    """Start a thread that receives one model's versions; called in the worker, by RPC."""
    near, far = Pipe()
    thread = threading.Thread(target=_serve, args=(far, model_id, payload, device, verify), daemon=True)
    _serving[model_id] = near, thread
    thread.start()
    return near.recv()


def _serve(channel: Connection, model_id: str, payload: Payload, device: str, verify: str) -> None:
    with channel, report_failures(channel), make_scheme(SchemeName.RPC, verify) as scheme:
        model = make_model(payload, device)
        scheme.init_on_worker(model_id, model=model)
        channel.send("ready")
        serve_requests(scheme.get_receiver(), model, channel)


def ask_serving(model_id: str, request: Ask) -> Any:
    """Ask a model's thread; called in the worker, by RPC."""
    near, _ = _serving[model_id]
    near.send(request)
    return near.recv()


def stop_serving(model_id: str) -> None:
    """End a model's thread; called in the worker, by RPC."""
    near, thread = _serving.pop(model_id)
    with near, contextlib.suppress(OSError):
        near.send(None)
        thread.join(START_TIMEOUT)
    _flat.clear()


def take_flat(tensor: torch.Tensor) -> None:
    """Take a flat tensor; called in the worker, by RPC."""
    _flat[:] = [tensor]


def digest_of_flat() -> str:
    """The digest of the last flat tensor; called in the worker, by RPC."""
    return digest_of(*_flat)


class RayCluster:
    """Ray with the most actors that any case needs. It is started here unless it already runs in this process."""

    def __init__(self, workers: int) -> None:
        self._cleanup = contextlib.ExitStack()
        with self._cleanup:
            ray = self._ray = self._cleanup.enter_context(running_ray("weightsync bench"))
            actor: Any = ray.remote(num_cpus=0)(RayWorker)
            self._actors: list[Any] = [actor.remote() for _ in range(workers)]
            for each in self._actors:
                self._cleanup.callback(ray.kill, each)
            self._watch(ray.get([each.place.remote() for each in self._actors], timeout=START_TIMEOUT))
            self._cleanup = self._cleanup.pop_all()

    def contenders(self, situation: Situation) -> Iterator[Contender]:
        """The scheme with each verification, and its floor."""
        actors = self._actors[: situation.workers]
        situation.cleanup.callback(self._drop, actors)
        yield RayFloor(self._ray, situation, actors)
        for verify in variants(situation):
            yield RayScheme(self._ray, verify, situation, actors)

    def _watch(self, places: list[tuple[str, int]]) -> None:
        here = self._ray.get_runtime_context().get_node_id()
        for index, (node, pid) in enumerate(places):
            if node == here:
                watch(pid, f"ray: worker {index}")
                self._cleanup.callback(forget, pid)

    def _drop(self, actors: list[Any]) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):  # that actor has ended
            self._ray.get([each.drop.remote() for each in actors])

    def close(self) -> None:
        """End the actors, and Ray if it was started here."""
        self._cleanup.close()


class RayWorker(WeightSyncActor):
    """The worker as a Ray actor. New versions become live between two calls of its methods."""

    def __init__(self) -> None:
        self._models: dict[str, nn.Module] = {}
        self._own = np.zeros(0, np.uint8)

    def place(self) -> tuple[str, int]:
        """The node and the id of this process."""
        import ray  # noqa: PLC0415 - an extra

        return ray.get_runtime_context().get_node_id(), os.getpid()

    def make(self, model_id: str, payload: Payload, device: str) -> None:
        """Make a model to receive into."""
        self._models[model_id] = make_model(payload, device)

    def get_model(self, model_id: str) -> nn.Module:
        """The model of that id."""
        return self._models[model_id]

    def digest(self, model_id: str) -> str:
        """The digest of a model's weights."""
        return digest_of_model(self._models[model_id])

    def copy_out(self, array: np.ndarray[Any, Any]) -> None:
        """Copy a flat array into memory of this process."""
        if self._own.shape != array.shape:
            self._own = np.zeros_like(array)
        np.copyto(self._own, array)

    def digest_of_flat(self) -> str:
        """The digest of the last flat array."""
        return digest_of(torch.from_numpy(self._own))

    def drop(self) -> None:
        """Let all models go."""
        self._models.clear()
        self._own = np.zeros(0, np.uint8)


class RayScheme(Sending):
    """The Ray scheme, with a model of its own in each actor."""

    def __init__(self, ray: Any, verify: str, situation: Situation, actors: list[Any]) -> None:
        self._ray, self._actors, self._model = ray, actors, f"{situation.model_id}-{verify}"
        device = situation.settings.device.worker
        ray.get([each.make.remote(self._model, situation.payload, device) for each in actors])
        scheme = make_scheme(SchemeName.RAY, verify)
        situation.cleanup.callback(scheme.close)
        scheme.init_on_sender(self._model, model=situation.source.model, remote_collectors=actors)
        super().__init__(SchemeName.RAY, verify, situation, scheme.get_sender())

    def digests(self) -> Mapping[int, str]:
        """The digest of each actor's model."""
        return dict(enumerate(self._ray.get([each.digest.remote(self._model) for each in self._actors])))


class RayFloor(Local):
    """One put of a flat numpy array, and a copy out of it in each actor, all at once."""

    def __init__(self, ray: Any, situation: Situation, actors: list[Any]) -> None:
        flat = situation.source.flat.cpu()
        self._ray, self._actors = ray, actors
        super().__init__(Floor.RAY, self._put, flat, flat)

    def _put(self) -> None:
        reference = self._ray.put(self._target.numpy())
        self._ray.get([each.copy_out.remote(reference) for each in self._actors])

    def digests(self) -> Mapping[int, str]:
        """The digest of each actor's copy."""
        return dict(enumerate(self._ray.get([each.digest_of_flat.remote() for each in self._actors])))
