"""What TorchRL's collectors collect, importable by their workers."""

from __future__ import annotations

from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn


def cartpole() -> Any:
    from torchrl.envs import GymEnv  # noqa: PLC0415 - only where TorchRL is installed

    return GymEnv("CartPole-v1")


def policy(action: int) -> TensorDictModule:
    """Always takes that action: its bias says so."""
    net = nn.Linear(4, 2)
    made = TensorDictModule(nn.Sequential(net, nn.Softmax(-1)), in_keys=["observation"], out_keys=["action"])
    choose(made, action)
    return made


def choose(made: TensorDictModule, action: int) -> None:
    """From now on it takes that action."""
    net = made.module[0]
    with torch.no_grad():
        net.weight.zero_()
        net.bias.copy_(torch.tensor([40.0, -40.0] if action == 0 else [-40.0, 40.0]))


def chosen(data: Any) -> set[int]:
    """The actions in a batch."""
    return set(data["action"].argmax(-1).flatten().tolist())


def random_policy() -> Any:
    """A policy without weights: a callable that is no module."""
    from torchrl.modules import RandomPolicy  # noqa: PLC0415 - only where TorchRL is installed

    return RandomPolicy(cartpole().action_spec)


class WithCritic(TensorDictModule):
    """A policy that takes action 0 at first, and has a second model beside it."""

    def __init__(self) -> None:
        module = policy(0).module
        super().__init__(module, in_keys=["observation"], out_keys=["action"])
        self.critic = nn.Linear(4, 1)
