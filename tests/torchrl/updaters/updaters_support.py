"""Helpers for the tests of updaters: weights, a recording updater, and a collector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from tensordict import TensorDict

from weightsync import WeightUpdaterBase


def weights(fill: float = 1.0) -> TensorDict:
    """Weights of 12 bytes whose every element is this number."""
    return TensorDict({"layer": {"weight": torch.full((2,), fill), "bias": torch.full((1,), fill)}}, batch_size=[])


def constant(of: Any) -> set[float]:
    """The distinct values in a TensorDict."""
    return {value for tensor in of.values(True, True) for value in tensor.flatten().tolist()}


class Recorder(WeightUpdaterBase):
    """Records each step of a push, and runs a given function for each worker. Its constructor does not call super's."""

    def __init__(self, ids: Sequence[Any] | None = None, **does: Callable[[], Any]) -> None:
        self.ids = ids
        self.does = does
        self.log: list[Any] = []
        self.skipped: set[Any] = set()

    def all_worker_ids(self) -> Sequence[Any] | None:
        return self.ids

    def _get_server_weights(self) -> TensorDict:
        self.log.append("get")
        return weights()

    def _maybe_map_weights(self, server_weights: Any) -> Any:
        self.log.append(("map", server_weights))
        return server_weights

    def _skip_update(self, worker_id: Any) -> bool:
        self.log.append(("skip?", worker_id))
        return worker_id in self.skipped

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> Any:
        self.log.append(("sync", worker_id, server_weights))
        return self.does.get(f"worker_{worker_id}", lambda: None)()

    @property
    def synced(self) -> list[Any]:
        """The workers that were called, in order."""
        return [entry[1] for entry in self.log if entry[0] == "sync"]


class Collector:
    """A collector with only the method that an updater calls."""

    def __init__(self) -> None:
        self.version = 0

    def increment_version(self) -> None:
        self.version += 1


class Pending:
    """Calls that end when the test resolves their futures."""

    def __init__(self) -> None:
        self.futures: list[Future[None]] = []

    def __call__(self) -> Future[None]:
        self.futures.append(Future())
        return self.futures[-1]


def raises(error: BaseException) -> Callable[[], Any]:
    """A function that raises."""

    def function() -> None:
        raise error

    return function
