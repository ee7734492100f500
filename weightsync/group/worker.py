"""What a worker's function is given, and the process that runs it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn

from weightsync.engine.receiver import WeightReceiver
from weightsync.errors import SenderClosed, TransportError
from weightsync.group.channel import Failed, Finished, Started, WorkerEnd
from weightsync.group.steps import Announced, Staleness, Steps
from weightsync.schemes.base import WeightSyncScheme

#: Makes a worker's model.
MakeModel = Callable[[], nn.Module]


class Worker:
    """One worker of a `WorkerGroup`: what its function is given.

    A thread receives weights in the background: the worker answers the trainer whatever its function does. A new
    version goes live between two steps. A step is an outermost forward of `model`, or a `step` block.

    Attributes:
        index: this worker's id, from 0.
        restarts: how often it was restarted; 0: this is its first life.
        model: its own model. It has the trainer's weights before the function is called.
        receiver: receives the weights.
    """

    def __init__(self, job: Job, receiver: WeightReceiver, steps: Steps, channel: WorkerEnd) -> None:
        self.index = job.index
        self.restarts = job.restarts
        self.model: nn.Module = receiver.model
        self.receiver = receiver
        self._steps = steps
        self._channel = channel

    @property
    def stopped(self) -> bool:
        """Whether the function is to return: the trainer has called `stop()` or `close()`, or is dead. Never waits."""
        return self._channel.stopped

    @property
    def version(self) -> int | None:
        """The version that the model serves now."""
        return self.receiver.version

    def step(self) -> AbstractContextManager[int | None]:
        """Keep one version for the length of a block, which is one step. Yields that version.

        Use it where a step has several forwards, or code that bypasses the model's ``__call__``.

        Raises:
            StaleWeightsError: the version is more than ``max_staleness`` behind, and the group was given
                ``on_stale="raise"``. No step has begun. With "block" the call waits for a newer version.
            TransportError: while it waited, the trainer was lost, or stopped the group (`SenderClosed`).
        """
        return self._steps.step()

    def put(self, item: Any) -> None:
        """Give the trainer a result. Waits while ``capacity`` results of this worker have not been taken.

        The result names the versions of all steps since the result before; where there were none, those of that one.

        Args:
            item: anything that can be pickled. Tensors are copied.

        Raises:
            SenderClosed: the trainer has closed the group, or is dead. The result is dropped.
        """
        self._channel.put(item, self._steps.versions())


@dataclass(frozen=True)
class Job:
    """What a worker process is started with.

    Attributes:
        run: the user's function.
        index: the worker's id.
        restarts: how often it was restarted.
        make_model: makes its model.
        scheme: a copy of the trainer's scheme.
        model_id: the name of the model.
        pipe: our end of the pipe for weights.
        channel: our end of the socket pair for results.
        capacity: how many results may be on their way.
        announced: what the trainer has announced.
        staleness: how old a version may be at a step.
    """

    run: Callable[[Worker], object]
    index: int
    restarts: int
    make_model: MakeModel
    scheme: WeightSyncScheme
    model_id: str
    pipe: Any
    channel: socket.socket
    capacity: int
    announced: Announced
    staleness: Staleness


def work(job: Job) -> None:
    """Be a worker process until the function returns or raises, or the trainer is gone."""
    os.setsid()  # the processes that the function starts are ended with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C, and ends the workers
    channel = WorkerEnd(job.channel, job.capacity)
    with contextlib.closing(channel), job.scheme as scheme:
        try:
            _run(job, scheme, channel)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is reported to the trainer
            if isinstance(error, TransportError) and channel.stopped:
                _finish(channel)  # stopped or closed, and the function did not catch the exception for that
                return
            _report(error, scheme, channel)
            sys.exit(1)
        _finish(channel)


def _finish(channel: WorkerEnd) -> None:
    with contextlib.suppress(SenderClosed):
        channel.say(Finished())


def _report(error: BaseException, scheme: WeightSyncScheme, channel: WorkerEnd) -> None:
    """Report to the trainer what ended this worker: first the group, then the sender, whose reports say LOST."""
    receiver = scheme.get_receiver() if scheme.initialized_on_receiver else None
    try:
        channel.say(Failed.by(error, receiver.version if receiver is not None else None))
    except SenderClosed:
        traceback.print_exception(error)  # nobody listens
    if receiver is not None:
        receiver.fail(error)


def _run(job: Job, scheme: WeightSyncScheme, channel: WorkerEnd) -> None:
    model = job.make_model()
    scheme.init_on_receiver(model_id=job.model_id, model=model, worker_idx=job.index, pipe=job.pipe)
    scheme.connect()
    receiver = scheme.get_receiver()
    steps = Steps(receiver, job.announced, job.staleness, lambda: channel.stopped)
    steps.guard(model)
    channel.say(Started())
    job.run(Worker(job, receiver, steps, channel))
