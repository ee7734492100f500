"""Classes of Ray actors for tests, and functions that run in them."""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
import time
from importlib.util import find_spec
from typing import Any

import torch
from constant_models import constants_of, filled, small  # noqa: F401 - tests import them from here
from tensordict import TensorDict
from unpicklable import NotUnpickled

from weightsync import RayWeightSyncScheme, WeightSyncActor
from weightsync.schemes import ray_server

INSTALLED = find_spec("ray.actor") is not None if find_spec("ray") else False
ray: Any = importlib.import_module("ray") if INSTALLED else None

#: Seconds after which a test gives up. Only a failing test waits so long.
PATIENCE = 120.0


class Bench:
    """Base of the actors: a policy, and a method that runs any function of a test."""

    def __init__(self) -> None:
        self.start_over()

    def start_over(self) -> None:
        """Reset the actor: close all receivers, and make a new policy."""
        for actor_server in list(ray_server._servers.values()):
            if actor_server.receiver is not None:
                actor_server.receiver.close()  # also ends its background thread
        ray_server._servers.clear()
        self.kept: dict[str, Any] = {}
        self.policy: Any = small()
        self.module: Any = None

    def do(self, function: Any, *arguments: Any) -> Any:
        """Call a function of the test with this actor."""
        return function(self, *arguments)

    def shows(self) -> set[float]:
        """The distinct values of the policy's weights."""
        return constants_of(self.policy.state_dict())

    def sleep(self, seconds: float) -> None:
        """Block the actor, so that the next call waits."""
        time.sleep(seconds)

    def pid(self) -> int:
        return os.getpid()


class WorkerSetup(Bench, WeightSyncActor):
    """An actor that has a weightsync receiver by its base class alone."""

    def version(self, model_id: str = "policy") -> int | None:
        return self.weight_receiver(model_id).version


class Threads(Bench, WeightSyncActor):
    """An actor with a weightsync receiver, for use with several threads."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()
        self.inside = threading.Event()

    def serve(self) -> tuple[set[float], set[float]]:
        """Hold the version being served until `open_gate`. Returns the values of the weights before and after."""
        with self.weight_receiver().serving():
            before = self.shows()
            self.inside.set()
            assert self.released.wait(PATIENCE)
            return before, self.shows()

    def is_inside(self) -> bool:
        return self.inside.wait(PATIENCE)

    def open_gate(self) -> None:
        self.released.set()


class Loop(WeightSyncActor):
    """An async actor with a weightsync receiver."""

    def __init__(self) -> None:
        self.policy = small()
        self.released = asyncio.Event()

    async def shows(self) -> set[float]:
        return constants_of(self.policy.state_dict())

    async def hold(self) -> None:
        with self.weight_receiver().serving():
            await self.released.wait()

    async def let_go(self) -> None:
        self.released.set()


class Plain(Bench):
    """An actor without a weightsync receiver, whose method takes weights."""

    def update_policy_weights_(self, policy_or_weights: Any) -> str:
        if "raise" in self.kept:
            raise ValueError("these weights are not for me")
        if "raise StopIteration" in self.kept:
            next(iter(()))
        if "raise with parts" in self.kept:
            raise NotUnpickled("these weights are not for me", 2)
        self.kept["type"] = type(policy_or_weights).__name__
        self.kept["calls"] = self.kept.get("calls", 0) + 1
        if not isinstance(policy_or_weights, dict):
            policy_or_weights = policy_or_weights.flatten_keys(".").to_dict()
        self.policy.load_state_dict(policy_or_weights)
        return "whatever it returns"


class Collector(Bench):
    """An actor with the method of TorchRL's collectors, which takes TensorDicts."""

    def update_policy_weights_(self, policy_or_weights: Any = None, *, worker_ids: Any = None, **_: Any) -> None:
        TensorDict.from_module(self.policy).data.update_(policy_or_weights.data)


class BareActor(Bench):
    """An actor without a method that takes weights."""


class Module:
    """An actor like those of TorchRL's RayModuleTransform, without a weightsync receiver."""

    def __init__(self) -> None:
        self.module = small()

    def _update_weights_tensordict(self, params: TensorDict) -> None:
        params.data.to_module(self.module)

    def _update_weights_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        self.module.load_state_dict(state_dict)

    def shows(self) -> set[float]:
        return constants_of(self.module.state_dict())


def set_policy(actor: Bench, make: Any, *arguments: Any) -> None:
    actor.policy = make(*arguments)


def state(actor: Bench) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in actor.policy.state_dict().items()}


def init_by_hand(actor: Bench, how: str) -> str:
    """Initialise the worker's side inside the actor, as a user may do before the first call."""
    scheme = RayWeightSyncScheme()
    if how == "model":
        scheme.init_on_worker("policy", model=actor.policy)
    else:
        scheme.init_on_worker("policy", context=actor)
    actor.kept["scheme"] = scheme
    return scheme.get_receiver().state.value
