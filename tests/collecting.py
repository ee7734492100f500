"""The environment, the policies and the pytest marks that all tests of TorchRL's collectors use.

The collectors' worker processes can import this module. If TorchRL or gymnasium is missing, it skips the test module
that imports it.
"""

from __future__ import annotations

import multiprocessing
import warnings
from typing import Any

import pytest
import torch
from skipping import not_tested
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import gymnasium  # noqa: F401
        import torchrl.collectors._multi_base
        from torchrl.envs import GymEnv
        from torchrl.modules import RandomPolicy

        import weightsync.torchrl.collectors  # noqa: F401 - by its import the collectors take our schemes
except ImportError as error:
    not_tested("TORCHRL'S COLLECTORS ON OUR SCHEMES", f"{error} (pip install 'weightsync[torchrl,rl]')")

#: The marks of every test that runs one of TorchRL's collectors.
MARKS = [
    pytest.mark.torchrl,
    # Warnings of TorchRL, gymnasium and their dependencies, which we cannot fix.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]


def start_workers_by(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make collectors start their workers by this method. Forking costs a tenth of the time of spawning."""
    context = multiprocessing.get_context(method)
    monkeypatch.setattr(torchrl.collectors._multi_base, "_get_mp_ctx", lambda *_: context)


def cartpole() -> Any:
    return GymEnv("CartPole-v1")


def tensordict(module: nn.Module) -> Any:
    """The weights of a module as a TensorDict, the form that TorchRL's collectors take."""
    return TensorDict.from_module(module).data


def policy(action: int) -> TensorDictModule:
    """A policy that always takes this action, because of its bias."""
    net = nn.Linear(4, 2)
    made = TensorDictModule(nn.Sequential(net, nn.Softmax(-1)), in_keys=["observation"], out_keys=["action"])
    choose(made, action)
    return made


def choose(made: TensorDictModule, action: int) -> None:
    """Set the policy's weights so that it always takes this action."""
    net = made.module[0]
    with torch.no_grad():
        net.weight.zero_()
        net.bias.copy_(torch.tensor([40.0, -40.0] if action == 0 else [-40.0, 40.0]))


def chosen(data: Any) -> set[int]:
    """The distinct actions in a batch."""
    return set(data["action"].argmax(-1).flatten().tolist())


def random_policy() -> Any:
    """A policy without weights: a callable that is not an `nn.Module`."""
    return RandomPolicy(cartpole().action_spec)


class WithCritic(TensorDictModule):
    """A policy that takes action 0 at first, with a critic as a second model."""

    def __init__(self) -> None:
        module = policy(0).module
        super().__init__(module, in_keys=["observation"], out_keys=["action"])
        self.critic = nn.Linear(4, 1)
