"""Functions that the workers of the tests' groups run, and models that they act with."""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import multiprocessing
import os
import queue
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import nn

from weightsync import EventKind, SenderClosed, StaleWeightsError, SyncEvent, Worker, WorkerGroup, run_worker
from weightsync.group.worker import MakeModel

#: The signal on which a rank writes the stacks of its threads.
DUMP = signal.SIGUSR1


def policy() -> nn.Module:
    return nn.Linear(1, 1, bias=False)


def biased() -> nn.Module:
    """A policy with a weight and a bias, whose output is their sum."""
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(0.0)
    return model


class Adapted(nn.Module):
    """A policy whose output is the sum of a weight, which is 1, and an adapter."""

    def __init__(self, adapter: float) -> None:
        super().__init__()
        self.base, self.lora_a = policy(), policy()
        with torch.no_grad():
            self.base.weight.fill_(1.0)  # type: ignore[operator]
            self.lora_a.weight.fill_(adapter)  # type: ignore[operator]

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = self.base(observation) + self.lora_a(observation)
        return summed

    def merge_and_unload(self) -> nn.Module:
        with torch.no_grad():
            self.base.weight.add_(self.lora_a.weight)  # type: ignore[operator]
        return self.base


class MergedInPlace(nn.Linear):
    """A policy that is merged in place: the names of its weights stay the same."""

    def merge_and_unload(self) -> nn.Module:
        return self


def act(worker: Worker) -> None:
    """Put outputs of the model, which are its weight, until the group stops."""
    while not worker.stopped:
        worker.put(worker.model(torch.ones(1)).item())


class Late:
    """An object whose unpickling in a worker waits for a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], Late], tuple[str]]:
        return _late, (self.path,)


def _late(path: str) -> Late:
    for _ in range(500):
        if os.path.exists(path):
            return Late(path)
        time.sleep(0.01)
    raise TimeoutError(f"{path} did not come")


def act_with(_given: object, worker: Worker) -> None:
    """Act, with an argument that the trainer has bound to this function."""
    act(worker)


def fail_or_count_threads(worker: Worker) -> None:
    """Fail as worker 0. As any other worker, put the number of threads that torch uses, without a step."""
    if worker.index == 0:
        raise ValueError("a pole fell")
    while not worker.stopped:
        worker.put(torch.get_num_threads())


def act_twice(worker: Worker) -> None:
    """Put two results, and return."""
    for _ in range(2):
        worker.put(worker.model(torch.ones(1)).item())


def fail_in_first_life(worker: Worker) -> None:
    """Put a result, and fail after it in the first life: by an exception (worker 0) or by a signal."""
    worker.put((worker.restarts, worker.model(torch.ones(1)).item()))
    if worker.restarts == 0:
        if worker.index == 0:
            raise ValueError("a pole fell")
        os.kill(os.getpid(), signal.SIGKILL)


def fail_when_released(worker: Worker) -> None:
    """As `fail_in_first_life`, but with a capacity of 1 fail only after the trainer has taken the result."""
    worker.put((worker.restarts, worker.model(torch.ones(1)).item()))
    if worker.restarts == 0:
        worker.put("released")
        if worker.index == 0:
            raise ValueError("a pole fell")
        os.kill(os.getpid(), signal.SIGKILL)


def act_once_and_wait(worker: Worker) -> None:
    """In an actor: put one result, and in the first life wait until the group stops."""
    cpus = importlib.import_module("ray").get_runtime_context().get_assigned_resources()
    worker.put((os.getpid(), cpus, worker.restarts, worker.model(torch.ones(1)).item()))
    while worker.restarts == 0 and not worker.stopped:
        time.sleep(0.01)


def put_pids_and_hang(worker: Worker) -> None:
    """Put the process ids of this worker and of its child, ignore SIGTERM, and never return."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "600"])
    worker.put((os.getpid(), child.pid))
    while True:
        time.sleep(600)


def stop_itself(worker: Worker) -> None:
    """Put the id of this process, and stop the process by SIGSTOP."""
    worker.put((os.getpid(),))
    os.kill(os.getpid(), signal.SIGSTOP)


def put_unpicklable_result(worker: Worker) -> None:
    worker.put(lambda: 3)


def put_forever(worker: Worker) -> None:
    """Put large results without end, and check nothing else."""
    while True:
        worker.put(bytes(1 << 20))


def end_slowly(worker: Worker) -> None:
    try:
        put_forever(worker)
    finally:
        time.sleep(0.2)


def put_after_late_join(worker: Worker) -> None:
    """Put results if called at all: the group closes while this rank joins it."""
    put_forever(worker)


def hang_in_first_life(worker: Worker) -> None:
    """Put one result, and hang after it in the first life."""
    worker.put(worker.restarts)
    while worker.restarts == 0:
        time.sleep(600)


def step_over_swaps(worker: Worker) -> None:
    """For each pair of versions: act with the first, wait for the next, act again, and put both outputs."""
    while not worker.stopped:
        with worker.step() as first:
            one = worker.model(torch.ones(1)).item()
        while worker.version == first and not worker.stopped:
            time.sleep(0.001)
        worker.put((one, worker.model(torch.ones(1)).item()))
        worker.put("no step since")


def hold_a_step(worker: Worker) -> None:
    """Hold one version in a step until the trainer has dispatched the next one, and then take another step."""
    with worker.step() as held:
        worker.put("holding")
        worker.put("released")  # waits for room, until the trainer has taken the first result
        assert worker._steps._behind == 1, "it has not heard of the next version, which was announced before that"
    try:
        with worker.step() as version:
            worker.put((held, version, "stepped"))
    except StaleWeightsError as error:
        worker.put((held, error.version, "stale", error.behind, error.limit))


def hold_a_step_and_catch_up(worker: Worker) -> None:
    """Hold one version in a step until the trainer has dispatched six more, and then act until the last one serves."""
    with worker.step():
        worker.put("holding")
        worker.put("released")  # waits for room, until the trainer has taken the first result
        assert worker._steps._behind == 6
    while worker.version != 7:
        with worker.step() as version:
            worker.put(version)


def hold_a_step_forever_in_first_life(worker: Worker) -> None:
    """In the first life, hold a version in a step forever; in the second one, put results."""
    if worker.restarts == 0:
        with worker.step():
            worker.put(worker.restarts)
            time.sleep(600)
    while not worker.stopped:
        worker.put(worker.restarts)


def fill_and_hang(worker: Worker) -> None:
    """Put the id of this process, fill the channel, and go on after the group has ended."""
    worker.put((os.getpid(), worker.model(torch.ones(1)).item()))
    try:
        put_forever(worker)
    except SenderClosed:
        time.sleep(600)


def put_before_and_after_the_stop(worker: Worker) -> None:
    """Put one result, and once the group has stopped another."""
    worker.put(f"{worker.index}: begun")
    while not worker.stopped:
        time.sleep(0.01)
    worker.put(f"{worker.index}: stopped")


def put_nothing(worker: Worker) -> None:
    while not worker.stopped:
        time.sleep(0.01)


def must_not_be_called(worker: Worker) -> None:
    """Never called: the group is closed before this rank joins it."""
    raise AssertionError(worker)


def report_replies(worker: Worker) -> None:
    """Put worker and version of the first REPLY event of this worker's own scheme."""
    events: queue.SimpleQueue[SyncEvent] = queue.SimpleQueue()
    worker.scheme.on_event(events.put)
    worker.put("listening")
    while (event := events.get(timeout=60)).kind is not EventKind.REPLY:
        pass
    worker.put((event.worker, event.version))


async def _act_twice(worker: Worker) -> None:
    for _ in range(2):
        await asyncio.sleep(0)
        worker.put(worker.model(torch.ones(1)).item())


def act_by_asyncio_run(worker: Worker) -> None:
    """Run a coroutine as the refusal of an async function advises."""
    asyncio.run(_act_twice(worker))


def act_by_coroutine(worker: Worker) -> object:
    """Return a coroutine that is never awaited."""
    return _act_twice(worker)


def act_by_generator(worker: Worker) -> object:
    return (worker.put(item) for item in range(2))


def nothing() -> None:
    """Return no model."""


def run_rank(
    rank: int, size: int, port: int, run: Callable[[Worker], None], make_model: MakeModel, *, dump_to: Connection
) -> None:
    """Be a rank of a world, and a worker of rank 0. Fails if the model keeps a hook of the ended group."""
    faulthandler.register(DUMP, file=dump_to.fileno())
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        if run in {must_not_be_called, put_after_late_join}:
            store.wait(["the group is closed"])
        model = make_model()
        run_worker(run, model)
        assert not model._forward_pre_hooks
    finally:
        dist.destroy_process_group()


def broken_model() -> nn.Module:
    raise LookupError("no such checkpoint")


def slow_model() -> nn.Module:
    """A model that takes longer to make than any test waits."""
    time.sleep(600)
    return policy()


def exit_at_once() -> nn.Module:
    """End the process before its function begins, as happens in a program without a `__main__` guard."""
    os._exit(1)


def train_until_killed(pids: Connection) -> None:
    """Be a trainer with forked workers, in a process of its own, until it is killed."""
    with WorkerGroup(put_forever, policy(), 2, ctx=multiprocessing.get_context("fork")) as group:
        next(group.results())
        group.send()
        pids.send([process.pid for process in group.processes.values()])
        time.sleep(600)


def train_and_return(pids: Connection) -> None:
    """Be a trainer, in a process of its own, that returns without closing its group."""
    group = WorkerGroup(put_forever, policy(), 1, ctx=multiprocessing.get_context("fork"))
    group.start()
    next(group.results())
    pids.send([process.pid for process in group.processes.values()])
