"""A worker process: it acts with the weights it receives, and proves by digest which version it serves."""

from __future__ import annotations

import enum
import os
import signal
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from weightsync import SenderClosed, TransportError, WeightReceiver, WeightSyncActor, WeightSyncScheme
from weightsync.demo.learning import Bools, Chunk, Floats, Ints, Policy
from weightsync.demo.state import CHUNK_STEPS, ENVIRONMENTS, MODEL_ID, START_TIMEOUT, Proof, SchemeName, Settings

#: How many seconds a worker waits for a new version before it checks for a request.
_PAUSE = 0.002


class Request(enum.Enum):
    """A request from the trainer to a worker."""

    COLLECT = "collect"
    PROVE = "prove"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker's last answer: the error that ended it."""

    reason: str
    traceback: str


class Rollout:
    """A policy that acts in its own environments."""

    def __init__(self, index: int, settings: Settings) -> None:
        torch.set_num_threads(1)
        self.policy = Policy()
        seed = settings.seed * 1000 + index * 100
        self._generator = torch.Generator().manual_seed(seed)
        count = max(1, ENVIRONMENTS // settings.workers)
        self._environments = gymnasium.make_vec(
            "CartPole-v1", count, vectorization_mode="sync", vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP}
        )
        self._observations: Floats = self._environments.reset(seed=seed)[0]
        self._returns = np.zeros(count)

    def answer(self, request: Request, receiver: WeightReceiver) -> Chunk | Proof:
        """Handle a request of the trainer."""
        if request is Request.PROVE:
            return Proof(receiver.version, receiver.digest())
        return self._collect(receiver)

    def _collect(self, receiver: WeightReceiver) -> Chunk:
        steps, versions, returns = [], [], []
        for _ in range(CHUNK_STEPS):
            receiver.receive(timeout=0)  # a new version becomes live here, between two steps
            seen = self._observations
            with receiver.serving() as version:  # and none becomes live in here
                actions, logs = self.policy.act(seen, self._generator)
            following, terminated, done = self._step(actions)
            steps.append((seen, following, actions, logs, terminated, done))
            versions.append(version)
            returns += self._returns[done].tolist()
            self._returns[done] = 0.0
        names = ("observations", "next_observations", "actions", "log_probabilities", "terminated", "done")
        arrays = {name: np.stack(part) for name, part in zip(names, zip(*steps, strict=True), strict=True)}
        return Chunk(**arrays, versions=np.array(versions), returns=returns, state=receiver.state.value)

    def _step(self, actions: Ints) -> tuple[Floats, Bools, Bools]:
        """Return the observations before any reset, which poles fell, and which episodes ended."""
        self._observations, rewards, terminated, truncated, infos = self._environments.step(actions)
        self._returns += rewards
        done = terminated | truncated
        following = self._observations.copy()
        if done.any():
            following[done] = np.stack(infos["final_obs"][done])
        return following, terminated, done


def work(
    index: int, settings: Settings, scheme: WeightSyncScheme, channel: Connection, rpc_address: str | None
) -> None:
    """Run worker process `index` until it is asked to stop or the trainer is gone.

    Args:
        channel: carries requests and answers, but no weights; the first answer is this process's id.
        rpc_address: the rendezvous address of torch's RPC, for that scheme; else None.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C, and then stops the workers
    try:
        rollout = Rollout(index, settings)
        channel.send(os.getpid())
        with scheme:
            # With torch.distributed, the trainer is rank 0 and worker i is rank i + 1.
            number = index + 1 if settings.scheme is SchemeName.DISTRIBUTED else index
            scheme.init_on_worker(MODEL_ID, model=rollout.policy, worker_idx=number)
            if rpc_address is not None:
                join_rpc(rpc_address, index + 1, settings.workers + 1)
            _serve(rollout, scheme.get_receiver(), channel)
    except (OSError, EOFError, TransportError, SenderClosed):
        pass  # the trainer is gone
    except Exception as error:  # noqa: BLE001 - any error is reported to the trainer
        channel.send(Failure(f"{type(error).__name__}: {error}", traceback.format_exc()))


def _serve(rollout: Rollout, receiver: WeightReceiver, channel: Connection) -> None:
    while True:
        receiver.receive(timeout=_PAUSE)
        if channel.poll():
            request = channel.recv()
            if request is Request.STOP:
                return
            channel.send(rollout.answer(request, receiver))


class RayWorker(WeightSyncActor):
    """The worker as a Ray actor. New versions of `policy` become live between two calls of its methods."""

    def __init__(self, index: int, settings: Settings) -> None:
        self._rollout = Rollout(index, settings)
        self.policy = self._rollout.policy

    def pid(self) -> int:
        """The id of this process."""
        return os.getpid()

    def answer(self, request: Request) -> Chunk | Proof:
        """Handle a request of the trainer."""
        return self._rollout.answer(request, self.weight_receiver(MODEL_ID))


def rpc_name(rank: int) -> str:
    """The name of a process in torch's RPC; the trainer is rank 0."""
    return f"worker{rank - 1}" if rank else "trainer"


def join_rpc(address: str, rank: int, world_size: int) -> None:
    """Join torch's RPC, and wait until all other processes have joined."""
    from torch.distributed import rpc  # noqa: PLC0415 - only this scheme needs it

    options = rpc.TensorPipeRpcBackendOptions(init_method=address, rpc_timeout=START_TIMEOUT)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # from torch itself
        rpc.init_rpc(rpc_name(rank), rank=rank, world_size=world_size, rpc_backend_options=options)  # type: ignore[no-untyped-call]
