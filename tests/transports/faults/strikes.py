"""Where a worker is struck in the middle of a send: each point enumerated, hit exactly, by its own hand."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from fleet import PATIENCE, Worker, WorkerSetup, filled, stat_of
from torch import nn

from weightsync import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from weightsync.clock import Deadline
from weightsync.protocol._tables import ReceiverInput
from weightsync.transports.base import Link, Payloads
from weightsync.transports.pipe import framing, link
from weightsync.transports.pipe.link import PipeLink

#: Each point of a worker's side of one send, in their order.
POINTS = ("before the hello", "at the hello", "mid-payload", "before applying", "before the ack", "after the ack")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}

#: What is struck where: each point over one transport, and over the others where they differ.
STRIKES = [
    *(("pipe", point) for point in POINTS),
    *(("inline", point) for point in ("before the hello", "mid-payload", "before the ack")),
    *(("shared", point) for point in ("mid-payload", "before the ack", "after the ack")),
]

_INPUTS = {
    "at the hello": ReceiverInput.CONNECT,
    "before applying": ReceiverInput.UPDATE,
    "before the ack": ReceiverInput.APPLIED,
    "after the ack": ReceiverInput.ANSWERED,
}


class InlineScheme(MultiProcessWeightSyncScheme):
    """All payloads go through the pipe itself, as over connections that pass no memory."""

    def lay_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        return PipeLink(endpoint, model_id, peer=peer, payloads=Payloads.INLINE)


PIPES = {"pipe": MultiProcessWeightSyncScheme, "shared": SharedMemWeightSyncScheme, "inline": InlineScheme}


def strike(signum: int) -> None:
    """Be struck, here and now."""
    os.kill(os.getpid(), signum)


def until_stopped(worker: Worker, act: Any) -> None:
    """Act until the worker has been stopped."""
    deadline = Deadline(PATIENCE)
    while stat_of(worker.pid)[0] != "T":
        assert not deadline.passed, f"{worker.process} never came to where it is stopped"
        act()
        time.sleep(0.005)


def arm(receiver: Any, point: str, signum: int) -> None:
    """Have this process struck once at that point."""
    left = [1]

    def once() -> None:
        if left[0]:
            left[0] -= 1
            strike(signum)

    if point in _INPUTS:
        at = _INPUTS[point]
        receiver._driver.machine.observe(lambda _before, taken, _after: once() if taken is at else None)
    elif point == "mid-payload":
        # The message is read; of the payload, nothing is read, or mapped.
        for owner, name in ((framing.Inflow, "_memory_for"), (link.Mapped, "find")):
            _before_it(owner, name, once)


def _before_it(owner: Any, name: str, act: Any) -> None:
    real = getattr(owner, name)

    def struck(*arguments: Any) -> Any:
        act()
        return real(*arguments)

    setattr(owner, name, struck)


def join_armed(setup: WorkerSetup, point: str, signum: int, make: Any) -> None:
    """Come to the trainer, and be struck at that point."""
    if point == "before the hello":
        strike(signum)
    setup.model = make()
    setup.scheme.init_on_worker("policy", pipe=setup.pipe, model=setup.model)
    setup.receiver = setup.scheme.get_receiver()
    arm(setup.receiver, point, signum)
    while not setup.receiver.receive(timeout=PATIENCE):
        pass


def megabytes() -> nn.Module:
    """Weights that no pipe holds at once."""
    return filled(nn.Linear(1024, 1024), 0.0)
