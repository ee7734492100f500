"""The kinds of members, and a world of ranks, for the tests of groups."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

import group_workers as workers
import pytest
import torch.distributed as dist

from weightsync import WorkerGroup
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


def await_results(group: WorkerGroup, count: int = 1) -> None:
    """Wait until this many results have arrived, without taking any."""
    while len(group._members.results) < count:
        group._members.wait(Deadline(60.0))
        group._members.pump()


class World:
    """A world whose rank 0 is the test, and whose other ranks are workers."""

    def __init__(self, context: ForkServerContext) -> None:
        self._context = context
        self.processes: list[Any] = []
        #: The pipes on which the ranks write their stacks.
        self._dumps: list[Connection] = []

    def start(self, run: Any, count: int, make_model: MakeModel = workers.policy) -> dist.TCPStore:
        """Start the ranks. Returns the store."""
        store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        for rank in range(1, count + 1):
            dumps, dump_to = self._context.Pipe(duplex=False)
            self._dumps.append(dumps)
            given, asked = (rank, count + 1, store.port, run, make_model), {"dump_to": dump_to}
            self.processes.append(self._context.Process(target=workers.run_rank, args=given, kwargs=asked))
            self.processes[-1].start()
            dump_to.close()
        dist.init_process_group("gloo", store=store, rank=0, world_size=count + 1)
        return store

    def codes(self) -> list[int | None]:
        """The exit codes of the ranks, which must end by themselves. Fails with the stacks of any that does not."""
        for process in self.processes:
            process.join(60)
        hung = [rank for rank, process in enumerate(self.processes) if process.exitcode is None]
        if hung:
            pytest.fail("\n\n".join(f"rank {rank + 1} has not ended:\n{self._stacks(rank)}" for rank in hung))
        return [process.exitcode for process in self.processes]

    def _stacks(self, rank: int) -> str:
        """The stacks of a rank's threads; empty if the rank does not write them."""
        said = b""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.processes[rank].pid, workers.DUMP)
        while self._dumps[rank].poll(10) and (piece := os.read(self._dumps[rank].fileno(), 1 << 16)):
            said += piece
        return said.decode()

    def close(self) -> None:
        for dumps in self._dumps:
            dumps.close()
        for process in self.processes:
            process.kill()
            process.join()
            process.close()
        if dist.is_initialized():
            dist.destroy_process_group()


WORLD = pytest.StashKey[World]()
