"""The policy that is trained and synchronised: a small actor and a small critic."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import nn

from weightsync.demo.wire import Floats, Ints

_HIDDEN = 64
#: Cart position, its velocity, pole angle, its velocity: what they seldom exceed in a good episode.
_SPREAD = (2.4, 2.0, 0.21, 2.0)
_ACTIONS = 2


class Policy(nn.Module):
    """Actor and critic over CartPole's observations, which are scaled to about -1 to 1 first."""

    spread: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("spread", torch.tensor(_SPREAD))
        self.actor = _network(_ACTIONS, gain=0.01)
        self.critic = _network(1, gain=1.0)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        """The logits of the actions, shape (n, 2), for observations of shape (n, 4)."""
        return cast(torch.Tensor, self.actor(observations / self.spread))

    def value(self, observations: torch.Tensor) -> torch.Tensor:
        """The expected discounted return, shape (n,)."""
        return cast(torch.Tensor, self.critic(observations / self.spread)).squeeze(-1)

    @torch.no_grad()
    def act(self, observations: Floats, generator: torch.Generator) -> tuple[Ints, Floats]:
        """Draw an action for each observation.

        Returns:
            The actions and their log-probabilities, both of shape (n,).
        """
        logs = torch.log_softmax(self(torch.from_numpy(observations)), dim=-1)
        actions = torch.multinomial(logs.exp(), 1, generator=generator)
        return actions.squeeze(-1).numpy(), logs.gather(-1, actions).squeeze(-1).numpy()


def _network(outputs: int, gain: float) -> nn.Sequential:
    layers = nn.Linear(len(_SPREAD), _HIDDEN), nn.Linear(_HIDDEN, _HIDDEN), nn.Linear(_HIDDEN, outputs)
    for layer, scale in zip(layers, (math.sqrt(2), math.sqrt(2), gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    first, second, last = layers
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last)
