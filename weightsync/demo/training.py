"""Proximal policy optimisation, in the trainer's process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from weightsync.demo.policy import Policy
from weightsync.demo.wire import Chunk

_GAMMA = 0.99
_LAMBDA = 0.95
#: What a step is worth: so scaled, values lie between 0 and 1, which the critic learns fast.
_REWARD = 1.0 - _GAMMA
_CLIP = 0.2
_EPOCHS = 8
_MINIBATCH = 256
_CRITIC = 5.0
_LARGEST_GRADIENT = 0.5
_FIRST_RATE = 2e-3
_LAST_RATE = 1e-4
#: Steps of experience over which the learning rate falls from the first to the last.
_PLANNED_STEPS = 120_000


class Training:
    """The policy, its optimiser, and what it has learned from.

    Args:
        seed: for the first weights and for the order of minibatches.
    """

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.policy = Policy()
        self.steps = 0
        self._order = torch.Generator().manual_seed(seed)
        self._optimizer = torch.optim.Adam(self.policy.parameters(), lr=_FIRST_RATE, eps=1e-5)

    def learn(self, chunks: Sequence[Chunk]) -> None:
        """Improve the policy by what was experienced under recent versions of it."""
        self.steps += sum(chunk.steps for chunk in chunks)
        left = max(0.0, 1.0 - self.steps / _PLANNED_STEPS)
        self._optimizer.param_groups[0]["lr"] = _LAST_RATE + left * (_FIRST_RATE - _LAST_RATE)
        batch = [torch.cat(parts) for parts in zip(*(self._prepared(chunk) for chunk in chunks), strict=True)]
        for _ in range(_EPOCHS):
            order = torch.randperm(len(batch[0]), generator=self._order)
            for chosen in torch.split(order, _MINIBATCH):
                self._descend(*(part[chosen] for part in batch))

    @torch.no_grad()
    def _prepared(self, chunk: Chunk) -> tuple[torch.Tensor, ...]:
        """Observations, actions, their log-probabilities, advantages and targets, each step one row."""
        observations = torch.from_numpy(chunk.observations)
        values = self.policy.value(observations)
        going_on = torch.from_numpy(~chunk.fallen) * self.policy.value(torch.from_numpy(chunk.following))
        surprise = (_REWARD + _GAMMA * going_on - values).numpy()
        advantages = np.zeros_like(surprise)
        later = np.zeros_like(surprise[0])
        for t in reversed(range(len(surprise))):
            later = surprise[t] + _GAMMA * _LAMBDA * ~chunk.ended[t] * later
            advantages[t] = later
        gained = torch.from_numpy(advantages)
        return (
            observations.flatten(0, 1),
            torch.from_numpy(chunk.actions).flatten(),
            torch.from_numpy(chunk.log_probabilities).flatten(),
            gained.flatten(),
            (gained + values).flatten(),
        )

    def _descend(
        self,
        observations: torch.Tensor,
        actions: torch.Tensor,
        behaviour: torch.Tensor,
        advantages: torch.Tensor,
        targets: torch.Tensor,
    ) -> None:
        """One step down the clipped loss. Ratios to the behaviour's own probabilities make staleness harmless."""
        logs = torch.log_softmax(self.policy(observations), dim=-1).gather(-1, actions[:, None]).squeeze(-1)
        ratio = (logs - behaviour).exp()
        scaled = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        gain = torch.minimum(ratio * scaled, ratio.clamp(1 - _CLIP, 1 + _CLIP) * scaled).mean()
        error = (self.policy.value(observations) - targets).square().mean()
        self._optimizer.zero_grad()
        (_CRITIC * error - gain).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), _LARGEST_GRADIENT)
        self._optimizer.step()
