"""The schemes whose workers join a world that cannot be left and joined again: torch's RPC, and Ray.

The world, and the workers in it, stay for the whole run; each case has models of its own in them.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import nn

from weightsync import WeightSyncActor
from weightsync.bench.contenders import Contender, Situation
from weightsync.bench.floors import Local
from weightsync.bench.judging import Floor
from weightsync.bench.models import digest_of, digest_of_model, make_model
from weightsync.bench.processes import Ask, Failure, Workers, failures_sent
from weightsync.bench.schemes import Sending, make_scheme, serve_requests, variants
from weightsync.bench.settings import START_TIMEOUT, BenchError, Payload, SchemeName


class RpcWorld:
    """A world of torch's RPC with the trainer and the most workers that any case needs."""

    def __init__(self, workers: int) -> None:
        self._cleanup = contextlib.ExitStack()
        with self._cleanup:
            folder = self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="weightsync-bench-"))
            address, size = f"file://{folder}/rendezvous", workers + 1
            members = Workers("rpc", stay_in_rpc, [(address, rank, size) for rank in range(1, size)])
            self._cleanup.callback(members.close)
            members.start()
            self._join(address, size)
            members.gather()
            self._cleanup = self._cleanup.pop_all()

    def _join(self, address: str, size: int) -> None:
        """Join in a thread, because torch cannot be interrupted and waits long for a worker that has died."""
        from torch.distributed import rpc  # noqa: PLC0415 - only where it is chosen

        joining = threading.Thread(target=join_rpc, args=(address, 0, size), name="join-rpc", daemon=True)
        joining.start()
        joining.join(START_TIMEOUT)
        if joining.is_alive():
            raise BenchError(f"rpc: the workers have not joined torch's RPC within {START_TIMEOUT:g} s.")
        # Leave without waiting for the others: they end with their processes.
        self._cleanup.callback(rpc.shutdown, graceful=False)

    def contenders(self, situation: Situation) -> Iterator[Contender]:
        """The scheme with each verification, and its floor."""
        names = [_rpc_name(rank + 1) for rank in range(situation.workers)]
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
        raise BenchError(f"rpc: {name} failed: {answer}")
    return answer


def _rpc_name(rank: int) -> str:
    return f"worker{rank - 1}" if rank else "trainer"


def join_rpc(address: str, rank: int, world_size: int) -> None:
    """Join torch's RPC, and wait until all other processes have joined."""
    from torch.distributed import rpc  # noqa: PLC0415

    # Over TCP: RPC's shared memory transport polls without pause in every process, also while others are measured.
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=address, rpc_timeout=START_TIMEOUT, _transports=["uv"], _channels=["basic"]
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # from torch itself
        rpc.init_rpc(_rpc_name(rank), rank=rank, world_size=world_size, rpc_backend_options=options)  # type: ignore[no-untyped-call]


def stay_in_rpc(channel: Connection, address: str, rank: int, world_size: int) -> None:
    """Run a worker: torch's threads take the calls, until the trainer says stop or is gone."""
    join_rpc(address, rank, world_size)
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
    with channel, failures_sent(channel), make_scheme(SchemeName.RPC, verify) as scheme:
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
        near.send(Ask.STOP)
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
        import ray  # noqa: PLC0415 - an extra that takes seconds to import

        self._ray: Any = ray
        self._cleanup = contextlib.ExitStack()
        with self._cleanup:
            if not ray.is_initialized():
                self._start()
            actor: Any = ray.remote(num_cpus=0)(RayWorker)
            self._actors: list[Any] = [actor.remote() for _ in range(workers)]
            for each in self._actors:
                self._cleanup.callback(ray.kill, each)
            ray.get([each.drop.remote() for each in self._actors], timeout=START_TIMEOUT)
            self._cleanup = self._cleanup.pop_all()

    def _start(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # A short path, because it contains Ray's sockets, whose paths are limited to 107 characters.
        folder = self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="wsb", ignore_cleanup_errors=True))
        self._cleanup.callback(self._ray.shutdown)
        self._ray.init(
            address="local", include_dashboard=False, log_to_driver=False, logging_level="error", _temp_dir=folder
        )

    def contenders(self, situation: Situation) -> Iterator[Contender]:
        """The scheme with each verification, and its floor."""
        actors = self._actors[: situation.workers]
        situation.cleanup.callback(lambda: self._ray.get([each.drop.remote() for each in actors]))
        yield RayFloor(self._ray, situation, actors)
        for verify in variants(situation):
            yield RayScheme(self._ray, verify, situation, actors)

    def close(self) -> None:
        """End the actors, and Ray if it was started here."""
        self._cleanup.close()


class RayWorker(WeightSyncActor):
    """The worker as a Ray actor. New versions become live between two calls of its methods."""

    def __init__(self) -> None:
        self._models: dict[str, nn.Module] = {}
        self._own = np.zeros(0, np.uint8)

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
