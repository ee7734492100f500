"""What each worker does: it acts with the weights it receives, and proves by digest which version it serves."""

from __future__ import annotations

import os

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from weightsync import Worker
from weightsync.demo.joined import JoinedWorker
from weightsync.demo.learning import Bools, Chunk, Floats, Ints, Policy
from weightsync.demo.state import CHUNK_STEPS, ENVIRONMENTS, Proof, Settings


def act(worker: Worker | JoinedWorker, settings: Settings) -> None:
    """Collect experience until the trainer says stop, then prove which weights this worker serves."""
    torch.set_num_threads(1)
    worker.put(os.getpid())
    rollout = Rollout(worker.index, settings)
    while not worker.stopped:
        worker.put(rollout.collect(worker))
    worker.put(Proof(worker.receiver.version, worker.receiver.digest()))


class Rollout:
    """The environments of one worker."""

    def __init__(self, index: int, settings: Settings) -> None:
        seed = settings.seed * 1000 + index * 100
        self._generator = torch.Generator().manual_seed(seed)
        count = max(1, ENVIRONMENTS // settings.workers)
        self._environments = gymnasium.make_vec(
            "CartPole-v1", count, vectorization_mode="sync", vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP}
        )
        self._observations: Floats = self._environments.reset(seed=seed)[0]
        self._returns = np.zeros(count)

    def collect(self, worker: Worker | JoinedWorker) -> Chunk:
        """Act for one chunk of experience."""
        policy = worker.model
        assert isinstance(policy, Policy)
        steps, versions, returns = [], [], []
        for _ in range(CHUNK_STEPS):
            seen = self._observations
            with worker.step() as version:  # no new version becomes live in here
                actions, logs = policy.act(seen, self._generator)
            following, terminated, done = self._step(actions)
            steps.append((seen, following, actions, logs, terminated, done))
            versions.append(version)
            returns += self._returns[done].tolist()
            self._returns[done] = 0.0
        names = ("observations", "next_observations", "actions", "log_probabilities", "terminated", "done")
        arrays = {name: np.stack(part) for name, part in zip(names, zip(*steps, strict=True), strict=True)}
        return Chunk(**arrays, versions=np.array(versions), returns=returns, state=worker.receiver.state.value)

    def _step(self, actions: Ints) -> tuple[Floats, Bools, Bools]:
        """Return the observations before any reset, which poles fell, and which episodes ended."""
        self._observations, rewards, terminated, truncated, infos = self._environments.step(actions)
        self._returns += rewards
        done = terminated | truncated
        following = self._observations.copy()
        if done.any():
            following[done] = np.stack(infos["final_obs"][done])
        return following, terminated, done
