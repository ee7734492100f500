"""Groups over all kinds of members: processes, Ray actors, and the ranks of a torch.distributed world."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from multiprocessing.context import ForkServerContext
from typing import Any

import group_workers as workers
import pytest
import torch
from group_worlds import WORLD, Make, World
from torch import nn

from weightsync import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, WorkerGroup
from weightsync.group.worker import MakeModel


@pytest.fixture
def model() -> nn.Module:
    model = workers.policy()
    with torch.no_grad():
        model.weight.fill_(1.0)  # type: ignore[operator]
    return model


@pytest.fixture
def make(model: nn.Module, forkserver: ForkServerContext) -> Make:
    """A function that makes groups of processes."""
    return lambda run, count=1, **options: WorkerGroup(run, model, count, ctx=forkserver, **options)


@pytest.fixture
def make_over(request: pytest.FixtureRequest, make: Make, model: nn.Module) -> Iterator[Make]:
    """A function that makes groups of the members that the test is parametrized with."""
    match request.param:
        case "shared":
            yield partial(make, scheme=SharedMemWeightSyncScheme())
        case "pipes":
            yield partial(make, scheme=MultiProcessWeightSyncScheme())
        case "ray":
            yield lambda run, count=1, **options: WorkerGroup(run, model, count, scheme="ray", **options)
        case "ranks":
            with contextlib.closing(World(request.getfixturevalue("forkserver"))) as world:
                request.node.stash[WORLD] = world
                yield partial(_over_ranks, world, model)


def _over_ranks(
    world: World, model: nn.Module, run: Any, count: int = 1, rank_model: MakeModel = workers.policy, **options: Any
) -> WorkerGroup:
    world.start(run, count, rank_model)
    return WorkerGroup(None, model, scheme="distributed", **options)
