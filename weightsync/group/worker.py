"""What a worker's function is given, and one life of a worker."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final, Protocol

import torch
from torch import nn

from weightsync.clock import Deadline, Timeout
from weightsync.engine.receiver import WeightReceiver
from weightsync.engine.receiver_driver import ReceiverDriver
from weightsync.errors import AckTimeoutError, ConfigurationError, SenderClosed, TransportError
from weightsync.group.channel import Failed, Finished, Started, WorkerEnd
from weightsync.group.function import require_made, require_ran
from weightsync.group.stack_dump import dump_on_signal
from weightsync.group.steps import LOOK_SECONDS, Announced, Staleness, Steps, gone
from weightsync.schemes.base import WeightSyncScheme

#: Makes a worker's model.
MakeModel = Callable[[], nn.Module]


class Worker:
    """One worker of a `WorkerGroup`: the argument of the function that the worker runs.

    A thread receives weights in the background, so the worker answers the trainer whatever its function does. A new
    version goes live between two steps. A step is an outermost forward of `model`, or a `step` block.

    Attributes:
        index: this worker's id, from 0.
        restarts: how often it was restarted; 0 at first.
        model: its own model. It has the trainer's weights before the function is called.
        receiver: receives the weights.
        scheme: this worker's own scheme, which the group closes: for `on_event`, spans and metrics in the worker. The
            first version is live before the function is called, so they begin with the next one.
    """

    def __init__(self, job: Job, receiver: WeightReceiver, steps: Steps, channel: WorkerEnd) -> None:
        self.index = job.index
        self.restarts = job.restarts
        self.model: nn.Module = receiver.model
        self.receiver = receiver
        self.scheme = job.scheme
        self._steps = steps
        self._channel = channel

    @property
    def stopped(self) -> bool:
        """Whether the function should return: the trainer has called `stop()` or `close()`, or is dead. Never waits."""
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
                ``on_stale="raise"``. The step has not begun. With "block" the call waits for a newer version.
            TransportError: while it waited, the trainer was lost, or stopped the group (`SenderClosed`).
        """
        return self._steps.step()

    def put(self, item: Any) -> None:
        """Give the trainer a result. Waits while ``capacity`` results of this worker have not been taken.

        The result names the versions of all steps since the previous result; without any, it has the previous result's.
        Call it outside a step: while it waits inside one, no version can go live.

        Args:
            item: anything that can be pickled. Tensors are copied.

        Raises:
            SenderClosed: the trainer has closed the group, or is dead. The result is dropped.
            ConfigurationError: the item cannot be pickled. Nothing was sent.
        """
        self._steps.warn_inside()
        self._channel.put(item, self._steps.versions)


#: Seconds by which a worker's link may end before its channel, when the group closes.
_END_SECONDS: Final = 2.0
_STOPPED_BEFORE: Final = "the group was stopped before this worker had its first weights."


class ChannelAddress(Protocol):
    """How a worker reaches its channel."""

    def connect(self) -> socket.socket:
        """The worker's end of it. Raises TransportError: the trainer cannot be reached."""


@dataclass(frozen=True)
class InheritedChannel:
    """One end of a socket pair, which the worker was started with."""

    sock: socket.socket

    def connect(self) -> socket.socket:
        """The worker's end of the pair."""
        return self.sock


@dataclass(frozen=True)
class Plan:
    """What all workers of a group have in common.

    Attributes:
        run: the user's function.
        make_model: makes a worker's model.
        model_id: the name of the model.
        capacity: how many results of one worker may be in flight.
        staleness: how old a version may be at a step.
        names: the weights that are sent; None: all.
    """

    run: Callable[[Worker], object]
    make_model: MakeModel
    model_id: str
    capacity: int
    staleness: Staleness
    names: tuple[str, ...] | None


@dataclass(frozen=True)
class Job:
    """What one life of a worker is.

    Attributes:
        plan: what all workers have in common.
        index: the worker's id.
        restarts: how often it was restarted.
        scheme: a copy of the trainer's scheme, or one like it.
        reach: how the sender reaches it: what `init_on_receiver` is given besides.
        channel: how it reaches its channel for results.
        announced: what the trainer has announced, in shared memory; None if announcements come over the channel.
        dump_to: where it writes its stack when it is asked for it; None: it is not asked.
    """

    plan: Plan
    index: int
    restarts: int
    scheme: WeightSyncScheme
    reach: Mapping[str, Any]
    channel: ChannelAddress
    announced: Announced | None
    dump_to: Connection | None = None


def work(job: Job) -> None:
    """Be a worker process until the function returns or raises, or the trainer is gone."""
    os.setsid()  # the processes that the function starts are ended with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C, and ends the workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see `without_interrupts`
    torch.set_num_threads(1)  # as in the workers of Ray, torchrun and TorchRL: all of them share the processor
    if job.dump_to is not None:
        dump_on_signal(job.dump_to)
    if live(job) is not None:
        sys.exit(1)


def live(job: Job, listening: Callable[[], None] = lambda: None) -> BaseException | None:
    """Run a worker until its function ends, and report to the trainer how it ended.

    Args:
        job: what the worker runs.
        listening: called once the receiver takes weights.

    Returns:
        What the function raised, or None if it has returned or was stopped.

    Raises:
        TransportError: the trainer cannot be reached.
    """
    channel = WorkerEnd(job.channel.connect(), job.plan.capacity)
    with contextlib.closing(channel), job.scheme as scheme:
        try:
            _run(job, scheme, channel, listening)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is reported to the trainer
            if not isinstance(error, TransportError) or not channel.stops_within(_END_SECONDS):
                _report(error, scheme, channel)
                return error
            # Stopped or closed, and the function did not catch the exception for that.
        with contextlib.suppress(SenderClosed):
            channel.say(Finished())
    return None


def _report(error: BaseException, scheme: WeightSyncScheme, channel: WorkerEnd) -> None:
    """Report to the trainer what ended this worker: first the group, then the sender, whose reports say LOST."""
    receiver = scheme.get_receiver() if scheme.initialized_on_receiver else None
    try:
        channel.say(Failed.by(error, receiver.version if receiver is not None else None))
    except SenderClosed:
        traceback.print_exception(error)  # the trainer is gone
    if receiver is not None:
        receiver.fail(error)


def _run(job: Job, scheme: WeightSyncScheme, channel: WorkerEnd, listening: Callable[[], None]) -> None:
    plan, announced = job.plan, job.announced
    model = require_made(plan.make_model, plan.make_model())
    names_argument = {} if plan.names is None else {"names": plan.names}
    scheme.init_on_receiver(model_id=plan.model_id, model=model, worker_idx=job.index, **names_argument, **job.reach)
    listening()
    receiver = scheme.get_receiver()
    _connect(scheme, receiver, channel)
    _await_weights(receiver, channel)
    steps = Steps(receiver, channel if announced is None else announced, plan.staleness, channel)
    with steps.guard(model):
        channel.say(Started())
        require_ran(plan.run, plan.run(Worker(job, receiver, steps, channel)))


def _connect(scheme: WeightSyncScheme, receiver: WeightReceiver, channel: WorkerEnd) -> None:
    """Take the trainer's link.

    Raises:
        SenderClosed: the group was closed before there was one.
        ConfigurationError: this worker refused the trainer's weights.
        AckTimeoutError: the trainer sent none in time.
        TransportError: the trainer cannot be reached, or is gone.
    """
    deadline = Deadline(Timeout.START)
    _await_link(receiver.driver, channel, deadline)
    try:
        scheme.connect(timeout=deadline.remaining)
    except AckTimeoutError:
        raise AckTimeoutError(
            f"the trainer sent this worker no first version of {receiver.model_id!r} in time: it sends one while it is "
            "inside a method of the group, such as results()."
        ) from None
    except TransportError as error:
        raise _unserved_error(receiver, error) from None


def _await_link(driver: ReceiverDriver, channel: WorkerEnd, deadline: Deadline) -> None:
    """Wait for a link, or until time is up. If the group closes before there is one, only the channel shows that.

    Raises:
        SenderClosed: the group was closed before there was a link.
    """
    while True:
        fired = driver.waker.fired
        if driver.links() or driver.ended:
            return
        if channel.stopped:
            raise SenderClosed(_STOPPED_BEFORE)
        if deadline.passed:
            return
        driver.wait(LOOK_SECONDS, fired)


def _await_weights(receiver: WeightReceiver, channel: WorkerEnd) -> None:
    """Wait for the first weights, where `connect` does not: for those that Ray's calls bring.

    Raises:
        SenderClosed: the group was closed meanwhile.
        ConfigurationError: they were refused.
        TransportError: the trainer is gone.
    """
    while receiver.version is None:
        if channel.stopped:
            raise SenderClosed(_STOPPED_BEFORE)
        try:
            receiver.receive(LOOK_SECONDS)
        except TransportError as error:
            raise _unserved_error(receiver, error) from None
        if receiver.version is None and receiver.last_refusal:
            raise _misfit(receiver)


def _unserved_error(receiver: WeightReceiver, error: TransportError) -> ConfigurationError | TransportError:
    """The error of a worker whose link ended before its first version."""
    if receiver.last_refusal:
        return _misfit(receiver)
    return gone(receiver, error, "before this worker had its first version")


def _misfit(receiver: WeightReceiver) -> ConfigurationError:
    return ConfigurationError(
        f"this worker refused the trainer's weights before its first version: {receiver.last_refusal} If they do not "
        "fit, have make_model= make a model with the same names and shapes as the trainer's, and start a new group; "
        "in a rank, pass such a model to run_worker()."
    )
