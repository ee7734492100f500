"""Groups over all kinds of members: processes, Ray actors, and the ranks of a torch.distributed world."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.context import ForkServerContext
from typing import Any

import group_workers as workers
import pytest
import torch
import torch.distributed as dist
from torch import nn

from weightsync import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, WorkerGroup
from weightsync.clock import Deadline
from weightsync.group.worker import MakeModel

Make = Callable[..., WorkerGroup]

_RAY = [
    pytest.mark.ray,
    pytest.mark.timeout(300),  # an actor takes seconds to start, and minutes on a busy machine
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
SHARED, PIPES = "shared", "pipes"
RANKS = pytest.param("ranks", marks=pytest.mark.gloo)
RAY = pytest.param("ray", marks=_RAY)


@pytest.fixture
def model() -> nn.Module:
    model = workers.policy()
    with torch.no_grad():
        model.weight.fill_(1.0)  # type: ignore[operator]
    return model


@pytest.fixture
def make(model: nn.Module, forkserver: ForkServerContext) -> Make:
    """Makes a group over processes."""
    return lambda run, count=1, **options: WorkerGroup(run, model, count, ctx=forkserver, **options)


@pytest.fixture
def make_over(request: pytest.FixtureRequest, make: Make, model: nn.Module) -> Iterator[Make]:
    """Makes a group over the members that the test is parametrized with."""
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


def await_results(group: WorkerGroup, count: int = 1) -> None:
    """Wait until so many results have come, and take none."""
    while len(group._members.results) < count:
        group._members.wait(Deadline(60.0))
        group._members.pump()


class World:
    """A world whose rank 0 is the test, and whose other ranks are workers."""

    def __init__(self, context: ForkServerContext) -> None:
        self._context = context
        self.processes: list[Any] = []

    def start(self, run: Any, count: int, make_model: MakeModel = workers.policy) -> dist.TCPStore:
        """Make it. Returns its store."""
        store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        for rank in range(1, count + 1):
            arguments = rank, count + 1, store.port, run, make_model
            self.processes.append(self._context.Process(target=workers.be_rank, args=arguments))
            self.processes[-1].start()
        dist.init_process_group("gloo", store=store, rank=0, world_size=count + 1)
        return store

    def codes(self) -> list[int | None]:
        """The exit codes of the ranks, which end by themselves."""
        for process in self.processes:
            process.join(60)
        return [process.exitcode for process in self.processes]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
            process.close()
        if dist.is_initialized():
            dist.destroy_process_group()


WORLD = pytest.StashKey[World]()
