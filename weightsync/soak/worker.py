"""A worker of the soak: it reads its weights all the time, and reports what it saw."""

from __future__ import annotations

import contextlib
import enum
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import torch
from torch import nn

from weightsync import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
    SharedMemWeightSyncScheme,
    TransportError,
    WeightReceiver,
    WeightSyncActor,
    WeightSyncScheme,
)
from weightsync.local_workers import SchemeName, join_rpc, leave_rpc, store

MODEL_ID = "soak"
#: How long a worker waits for a new version before it reads its weights again, in seconds.
_PAUSE_S = 0.001


#: Makes one end of a scheme.
MAKE: Mapping[SchemeName, Callable[[], WeightSyncScheme]] = {
    SchemeName.SHARED: SharedMemWeightSyncScheme,
    SchemeName.PROCESS: MultiProcessWeightSyncScheme,
    SchemeName.DISTRIBUTED: DistributedWeightSyncScheme,
    SchemeName.RPC: RPCWeightSyncScheme,
    SchemeName.RAY: RayWeightSyncScheme,
}


class Request(enum.Enum):
    """What the trainer asks of a worker, over a pipe that carries no weights. None instead of one ends the worker."""

    LOOK = "look"
    REFUSE_NEXT = "refuse next"
    TAKE_LINK = "take link"


@dataclass(frozen=True, slots=True)
class Look:
    """What a worker has seen.

    Attributes:
        version: the version it serves; None: none yet.
        value: the value of all its weights.
        reads: how often it has read all its weights.
        torn: how often they were not of one version.
    """

    version: int | None
    value: float
    reads: int
    torn: int


class SoakModel(nn.Module):
    """Weights that are all of one value, which is different for each version.

    Args:
        nbytes: the size of the weights; half of them are in small tensors.
        fill: the value.
    """

    def __init__(self, nbytes: int, fill: float = 0.0) -> None:
        super().__init__()
        whole = max(nbytes // 8, 8)
        self.large = nn.Parameter(torch.full((whole,), fill), requires_grad=False)
        pieces = torch.split(torch.full((whole,), fill), max(whole // 16, 1))
        self.small = nn.ParameterList(nn.Parameter(piece.clone(), requires_grad=False) for piece in pieces)
        self.fill = fill
        self.refusals = 0

    def set(self, fill: float) -> None:
        """Give all weights one value."""
        for parameter in self.parameters():
            parameter.data.fill_(fill)
        self.fill = fill

    def get_extra_state(self) -> dict[str, Any]:
        """The value, which travels with the weights."""
        return {"fill": self.fill}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take the value. Raises if the next update is to be refused."""
        if self.refusals:
            self.refusals -= 1
            raise ValueError("this worker was asked to refuse")
        self.fill = state["fill"]

    def is_whole(self) -> bool:
        """Whether all weights, and the extra state, are of one version."""
        return all(bool((parameter == self.fill).all()) for parameter in self.parameters())


def work(control: Connection, scheme: SchemeName, index: int, nbytes: int, endpoint: Any) -> None:
    """Run one worker until it is asked to stop, or the trainer is gone."""
    model = SoakModel(nbytes)
    if scheme is SchemeName.RPC:
        address, world_size = endpoint
        join_rpc(address, index + 1, world_size)
    with contextlib.suppress(EOFError, OSError), MAKE[scheme]() as made:
        made.init_on_worker(MODEL_ID, model=model, **init_arguments(scheme, index, endpoint))
        _Worker(made.get_receiver(), model, control).run()
    if scheme is SchemeName.RPC:
        leave_rpc()


def init_arguments(scheme: SchemeName, index: int, endpoint: Any) -> dict[str, Any]:
    """The arguments by which a worker finds its trainer: a pipe or a store; over RPC nothing, since it is called."""
    if scheme is SchemeName.RPC:
        return {}
    if scheme is not SchemeName.DISTRIBUTED:
        return {"pipe": endpoint}
    return {"store": store(endpoint), "rank": index + 1}


class _Worker:
    def __init__(self, receiver: WeightReceiver, model: SoakModel, control: Connection) -> None:
        self._receiver, self._control = receiver, control
        self._reader = _Reader(receiver, model)

    def run(self) -> None:
        while True:
            with contextlib.suppress(TransportError):  # the link is lost: a new one will come, or the end
                self._receiver.receive(timeout=_PAUSE_S)
            self._reader.read()
            while self._control.poll():
                request = self._control.recv()
                if request is None:
                    return
                if request is Request.TAKE_LINK:
                    self._receiver.register_worker_transport(Connection(recv_handle(self._control)))
                self._control.send(self._reader.answer(request))


class _Reader:
    """Reads all weights, and keeps what it saw."""

    def __init__(self, receiver: WeightReceiver, model: SoakModel) -> None:
        self._receiver, self._model = receiver, model
        self._reads = self._torn = 0

    def read(self) -> None:
        """Read all weights once, as a forward pass would."""
        with self._receiver.serving():
            self._reads += 1
            self._torn += not self._model.is_whole()

    def answer(self, request: Request) -> Look:
        """What was seen, after doing what was asked."""
        if request is Request.REFUSE_NEXT:
            self._model.refusals = 1
        return Look(self._receiver.version, self._model.fill, self._reads, self._torn)


class SoakActor(WeightSyncActor):
    """The worker as a Ray actor: a thread reads the weights while Ray's calls apply them.

    Args:
        nbytes: the size of the weights.
    """

    def __init__(self, nbytes: int) -> None:
        torch.set_num_threads(1)
        self.soak = SoakModel(nbytes)
        self._reader = _Reader(self.weight_receiver(MODEL_ID), self.soak)
        threading.Thread(target=self._read, name="soak-reader", daemon=True).start()

    def _read(self) -> None:
        while True:
            self._reader.read()
            time.sleep(_PAUSE_S)

    def pid(self) -> int:
        """The id of this process."""
        return os.getpid()

    def ask(self, request: Request) -> Look:
        """Answer the trainer. A request to end is ignored: the actor ends with the soak."""
        return self._reader.answer(request)
