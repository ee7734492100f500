"""Updaters without remote calls: weights are copied in this process, or moved by other code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from weightsync.errors import ConfigurationError
from weightsync.torchrl.updaters.base import WeightUpdaterBase
from weightsync.torchrl.updaters.calls import WorkerId
from weightsync.weights.reading import read_live
from weightsync.weights.strategy import WeightStrategy


class VanillaWeightUpdater(WeightUpdaterBase):
    """Copies weights into those of a policy in this process.

    There is one worker, this process, with id 0 in reports. The weights must fit in names, shapes and dtypes. If they
    do not, the outcome is REFUSED and nothing was changed. A forward pass that runs in another thread during the copy
    may see both old and new tensors.

    Args:
        weight_getter: returns the weights of a push without weights.
        policy_weights: the weights to overwrite in place.

    Raises:
        ConfigurationError: ``weight_getter`` cannot be called, or ``policy_weights`` is of another type.
    """

    def __init__(
        self,
        *,
        weight_getter: Callable[[], TensorDictBase] | None = None,
        policy_weights: TensorDictBase,
    ) -> None:
        self.weight_getter = require_getter(weight_getter, "weight_getter")
        if not isinstance(policy_weights, TensorDictBase | Mapping | nn.Module):
            raise ConfigurationError(
                f"policy_weights= is of type {type(policy_weights).__name__}: give the TensorDict or the dict of "
                "tensors to write into."
            )
        self.policy_weights = policy_weights
        # If a policy was given, its modules' extra state is written too.
        self._destination: TensorDictBase | nn.Module = policy_weights

    @classmethod
    def from_policy(cls, policy: nn.Module) -> Self:
        """An updater that writes to this policy, in place."""
        live = TensorDict(dict(read_live(policy).tensors), batch_size=[]).unflatten_keys(".")
        updater = cls(policy_weights=live)
        updater._destination = policy
        return updater

    def _get_server_weights(self) -> Any:
        return got(self, self.weight_getter, "weight_getter=")

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        WeightStrategy().apply_weights(self._destination, server_weights)


class MultiProcessedWeightUpdater(WeightUpdaterBase):
    """Copies weights into buffers that workers share with this process: one buffer per device or worker.

    Each buffer is written in place, while workers may be reading it. So APPLIED means that the buffer holds the new
    weights, and says nothing about any worker: one that computes during the copy can see tensors of two versions, or a
    torn tensor, without any error (G2, G3, G4 and G12 do not hold). If that matters use `SharedMemWeightSyncScheme`,
    whose workers take a whole version between two forward passes. Weights that do not fit a buffer leave it unchanged.

    Args:
        get_server_weights: returns the weights of a push without weights.
        policy_weights: device or worker's id to its buffer.

    Raises:
        ConfigurationError: ``get_server_weights`` cannot be called, or ``policy_weights`` is not a dict of buffers.
    """

    def __init__(
        self,
        *,
        get_server_weights: Callable[[], TensorDictBase] | None,
        policy_weights: dict[torch.device, TensorDictBase],
    ) -> None:
        self.weights_getter = require_getter(get_server_weights, "get_server_weights")
        if not isinstance(policy_weights, Mapping) or isinstance(policy_weights, TensorDictBase):
            raise ConfigurationError(
                f"policy_weights= is of type {type(policy_weights).__name__}: give a dict that maps each device or "
                "worker's id to its buffer."
            )
        self._policy_weights: Mapping[Any, TensorDictBase] = policy_weights

    def all_worker_ids(self) -> list[int] | list[torch.device]:
        """The devices or ids of the buffers."""
        return list(self._policy_weights)

    def _call(self, weights: Any, worker: WorkerId) -> None:
        """Fill a buffer. Its id may be None: TorchRL's collectors use None where no device was given."""
        self._sync_weights_with_worker(worker, weights)  # type: ignore[arg-type]

    def _get_server_weights(self) -> Any:
        return got(self, self.weights_getter, "get_server_weights=")

    def _sync_weights_with_worker(self, worker_id: int | torch.device, server_weights: Any) -> None:  # type: ignore[override]
        WeightStrategy().apply_weights(self._policy_weights[worker_id], server_weights)


class RemoteModuleWeightUpdater(WeightUpdaterBase):
    """For modules that other code updates: accepts weights, and sends nothing.

    Its reports say SKIPPED, since no worker was called. Weights must be passed. To move weights, derive from
    `WeightUpdaterBase`.
    """

    _why_skipped = "other code moves its weights"

    def __init__(self) -> None:
        pass

    def all_worker_ids(self) -> None:
        """None: the workers are unknown here."""

    def _skips(self, worker: WorkerId) -> bool:
        return True

    def _get_server_weights(self) -> Any:
        return got(self, None, "")

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        return


_Getter = TypeVar("_Getter", bound=Callable[[], Any] | None)


def require_getter(getter: _Getter, argument: str) -> _Getter:
    """Check that this is a function that returns weights, or None.

    Raises:
        ConfigurationError: it cannot be called.
    """
    if getter is not None and not callable(getter):
        raise ConfigurationError(
            f"{argument}= is of type {type(getter).__name__}: give a function without arguments that returns the "
            "weights, or None."
        )
    return getter


def got(updater: WeightUpdaterBase, getter: Callable[[], Any] | None, argument: str) -> Any:
    """The weights that the getter returns.

    Raises:
        ConfigurationError: there is no getter, or it returned None.
    """
    weights = None if getter is None else getter()
    if weights is None:
        why = (
            "its getter returned None"
            if getter
            else f"it has no {argument}"
            if argument
            else "it has no way to find any"
        )
        raise ConfigurationError(
            f"push_weights() was given no weights, and {type(updater).__name__} has none to send: {why}. Pass them. "
            "Nothing was pushed."
        )
    return weights
