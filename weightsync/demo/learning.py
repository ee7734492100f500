"""The policy, and its training by proximal policy optimisation (PPO)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_HIDDEN = 64
#: Values that cart position, cart velocity, pole angle and pole velocity seldom exceed in a good episode.
_OBSERVATION_SCALE = (2.4, 2.0, 0.21, 2.0)
_ACTIONS = 2
_GAMMA = 0.99
_LAMBDA = 0.95
#: The reward of a step, chosen so that values lie between 0 and 1, which the critic learns quickly.
_REWARD = 1.0 - _GAMMA
_CLIP = 0.2
_EPOCHS = 8
_MINIBATCH = 256
_CRITIC = 5.0
_LARGEST_GRADIENT = 0.5
#: The learning rate falls from the first to the last over so many updates.
_FIRST_RATE, _LAST_RATE, _PLANNED_UPDATES = 2e-3, 1e-4, 200


class Policy(nn.Module):
    """Actor and critic over CartPole's observations."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(_OBSERVATION_SCALE))
        self.actor = _network(_ACTIONS, gain=0.01)
        self.critic = _network(1, gain=1.0)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        """The logits of the actions, shape (n, 2), for observations of shape (n, 4)."""
        return cast(torch.Tensor, self.actor(observations / self.scale))

    def value(self, observations: torch.Tensor) -> torch.Tensor:
        """The expected discounted return, shape (n,)."""
        return cast(torch.Tensor, self.critic(observations / self.scale)).squeeze(-1)

    @torch.no_grad()
    def act(self, observations: Floats, generator: torch.Generator) -> tuple[Ints, Floats]:
        """Draw an action for each observation; return the actions and their log-probabilities."""
        logs = torch.log_softmax(self(torch.from_numpy(observations)), dim=-1)
        actions = torch.multinomial(logs.exp(), 1, generator=generator)
        return actions.squeeze(-1).numpy(), logs.gather(-1, actions).squeeze(-1).numpy()


def _network(outputs: int, gain: float) -> nn.Sequential:
    layers = nn.Linear(len(_OBSERVATION_SCALE), _HIDDEN), nn.Linear(_HIDDEN, _HIDDEN), nn.Linear(_HIDDEN, outputs)
    for layer, scale in zip(layers, (math.sqrt(2), math.sqrt(2), gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    first, second, last = layers
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Experience of one worker: T steps of K environments, and the version that chose the actions of each step."""

    #: Shape (T, K, 4), before and after the step.
    observations: Floats
    next_observations: Floats
    #: Shape (T, K).
    actions: Ints
    log_probabilities: Floats
    #: Whether the pole fell, and whether the episode ended, by a fall or by time.
    terminated: Bools
    done: Bools
    #: Shape (T,).
    versions: Ints
    #: Returns of the episodes that ended in this chunk.
    returns: Sequence[float]
    #: The state of the worker's receiver.
    state: str

    @property
    def steps(self) -> int:
        """How many transitions it holds."""
        return int(self.actions.size)


class Learner:
    """The policy and its optimiser."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.policy = Policy()
        self._generator = torch.Generator().manual_seed(seed)
        self._optimizer = torch.optim.Adam(self.policy.parameters(), lr=_FIRST_RATE, eps=1e-5)
        fall = _LAST_RATE / _FIRST_RATE
        self._rate = torch.optim.lr_scheduler.LinearLR(self._optimizer, 1.0, fall, _PLANNED_UPDATES)

    def learn(self, chunks: Sequence[Chunk]) -> None:
        """Improve the policy with experience that workers collected under recent versions of it."""
        batch = [torch.cat(parts) for parts in zip(*(self._prepare(chunk) for chunk in chunks), strict=True)]
        for _ in range(_EPOCHS):
            order = torch.randperm(len(batch[0]), generator=self._generator)
            for chosen in torch.split(order, _MINIBATCH):
                self._descend([part[chosen] for part in batch])
        self._rate.step()

    @torch.no_grad()
    def _prepare(self, chunk: Chunk) -> tuple[torch.Tensor, ...]:
        """Return observations, actions, their log-probabilities, advantages and targets, one row per step."""
        observations = torch.tensor(chunk.observations)  # copied, because arrays from Ray are read-only
        values = self.policy.value(observations)
        next_values = self.policy.value(torch.tensor(chunk.next_observations)) * torch.tensor(~chunk.terminated)
        errors = (_REWARD + _GAMMA * next_values - values).numpy()
        advantages = np.zeros_like(errors)
        later = np.zeros_like(errors[0])
        for t in reversed(range(len(errors))):
            later = errors[t] + _GAMMA * _LAMBDA * ~chunk.done[t] * later
            advantages[t] = later
        gained = torch.from_numpy(advantages)
        columns = (torch.tensor(chunk.actions), torch.tensor(chunk.log_probabilities), gained, gained + values)
        return observations.flatten(0, 1), *(column.flatten() for column in columns)

    def _descend(self, batch: Sequence[torch.Tensor]) -> None:
        """Take one step on the clipped loss. Ratios to the behaviour's probabilities account for stale experience."""
        observations, actions, behaviour, advantages, targets = batch
        logs = torch.log_softmax(self.policy(observations), dim=-1).gather(-1, actions[:, None]).squeeze(-1)
        ratio = (logs - behaviour).exp()
        scaled = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        gain = torch.minimum(ratio * scaled, ratio.clamp(1 - _CLIP, 1 + _CLIP) * scaled).mean()
        error = (self.policy.value(observations) - targets).square().mean()
        self._optimizer.zero_grad()
        (_CRITIC * error - gain).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), _LARGEST_GRADIENT)
        self._optimizer.step()
