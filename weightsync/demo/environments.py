"""The environments that one worker steps side by side."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np

from weightsync import MissingExtraError
from weightsync.demo.wire import Bools, Floats, Ints

ENVIRONMENT = "CartPole-v1"


def require_gymnasium() -> None:
    """Make sure that there are environments to be had.

    Raises:
        MissingExtraError: gymnasium is not installed.
    """
    if importlib.util.find_spec("gymnasium") is None:
        raise MissingExtraError("rl", "weightsync demo")


class Environments:
    """Several CartPoles; each begins a new episode as soon as one ends.

    Args:
        count: how many.
        seed: the first one's seed; the others follow it.
    """

    def __init__(self, count: int, seed: int) -> None:
        gymnasium: Any = importlib.import_module("gymnasium")
        self._all = [gymnasium.make(ENVIRONMENT) for _ in range(count)]
        self._returns = [0.0] * count
        #: What each environment shows now, shape (count, 4).
        self.observations: Floats = np.stack(
            [environment.reset(seed=seed + i)[0] for i, environment in enumerate(self._all)]
        )

    def step(self, actions: Ints) -> tuple[Floats, Bools, Bools, list[float]]:
        """Step each environment once.

        Returns:
            What they show before any new episode begins, shape (count, 4); which poles fell; which episodes ended,
            by a fall or by time; and the returns of those that ended.
        """
        following = np.empty_like(self.observations)
        fallen, ended = np.zeros((2, len(self._all)), dtype=np.bool_)
        returns: list[float] = []
        for i, environment in enumerate(self._all):
            following[i], reward, fallen[i], late, _ = environment.step(int(actions[i]))
            self._returns[i] += float(reward)
            ended[i] = fallen[i] or late
            self.observations[i] = following[i]
            if ended[i]:
                returns.append(self._returns[i])
                self._returns[i] = 0.0
                self.observations[i] = environment.reset()[0]
        return following, fallen, ended, returns

    def close(self) -> None:
        """Close them all."""
        for environment in self._all:
            environment.close()
