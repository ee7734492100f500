"""What each worker does: it acts with the weights it receives, and proves by digest which version it serves."""

from __future__ import annotations

import os

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from weightsync import WeightReceiver, Worker
from weightsync.demo.learning import Bools, Chunk, Floats, Ints, Policy
from weightsync.demo.state import Proof, Settings

#: The number of environments over all workers; each worker gets an equal share, at least one.
_ENVIRONMENTS = 16
#: Steps of each environment in one chunk of experience.
_CHUNK_STEPS = 32


def act(worker: Worker, settings: Settings) -> None:
    """What each worker does whose weights the group brings."""
    act_with(worker, worker.receiver, settings)


def act_with(worker: Worker, receiver: WeightReceiver, settings: Settings) -> None:
    """Collect experience until the trainer says stop, then prove which weights this receiver's model serves."""
    torch.set_num_threads(1)
    worker.put(os.getpid())
    rollout = Rollout(worker.index, settings)
    while not worker.stopped:
        worker.put(rollout.collect(receiver))
    worker.put(Proof(receiver.version, receiver.digest()))


class Rollout:
    """The environments of one worker."""

    def __init__(self, index: int, settings: Settings) -> None:
        seed = settings.seed * 1000 + index * 100
        self._generator = torch.Generator().manual_seed(seed)
        count = max(1, _ENVIRONMENTS // settings.workers)
        self._environments = gymnasium.make_vec(
            "CartPole-v1", count, vectorization_mode="sync", vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP}
        )
        self._observations: Floats = self._environments.reset(seed=seed)[0]
        self._returns = np.zeros(count)

    def collect(self, receiver: WeightReceiver) -> Chunk:
        """Act for one chunk of experience."""
        policy = receiver.model
        assert isinstance(policy, Policy)
        steps, versions, returns = [], [], []
        for _ in range(_CHUNK_STEPS):
            seen = self._observations
            with receiver.serving() as version:  # no new version becomes live in here
                actions, logs = policy.act(seen, self._generator)
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
