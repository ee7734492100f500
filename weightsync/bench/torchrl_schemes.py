"""TorchRL's own schemes, multiprocess and shared memory, set up as its documentation says."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping
from multiprocessing import resource_sharer
from multiprocessing.connection import Connection
from typing import Any

import torch

from weightsync.bench.contenders import Contender, ModelContender, Situation
from weightsync.bench.models import digest_of_model, make_model
from weightsync.bench.processes import Ask, Workers
from weightsync.bench.results import Kind, Label
from weightsync.bench.settings import Payload, SchemeName

#: How many seconds that thread has to end.
_STOP_TIMEOUT = 3.0


class _Queues:
    """Makes a scheme's queues such that what a dead worker never reads does not keep this process from ending."""

    def __init__(self, method: str) -> None:
        self._context = multiprocessing.get_context(method)

    def Queue(self) -> Any:
        """A queue; TorchRL calls it by this name."""
        queue = self._context.Queue()
        queue.cancel_join_thread()
        return queue


class TorchRLScheme(ModelContender):
    """A scheme of TorchRL with worker processes of its own. A send ends when each worker's answer is there.

    A worker's calls are in a thread of TorchRL's, which is not counted.
    """

    def __init__(self, name: SchemeName, situation: Situation) -> None:
        self.label = Label(name.value, Kind.TORCHRL)
        self.source = situation.source
        device = situation.settings.device.worker
        self._scheme = _make(name)
        # TorchRL moves the model into shared memory, also for the schemes after that: a descriptor travels for each
        # tensor, and a fork server takes at most 256.
        many = self.source.tensors + 16 * situation.workers > 240
        method = "spawn" if many else "forkserver"
        self._scheme.init_on_sender(
            model_id="policy",
            model=self.source.model,
            devices=[torch.device(device)] * situation.workers,
            num_workers=situation.workers,
            ctx=_Queues(method),
        )
        arguments = [(situation.payload, device, self._scheme, index) for index in range(situation.workers)]
        self._workers = Workers(name.value, receive_torchrl, arguments, method)
        situation.cleanup.callback(self._close)
        self._workers.start()
        self._scheme.connect()
        self._workers.gather()

    def _close(self) -> None:
        self._workers.close()
        self._scheme.shutdown()
        resource_sharer.stop(_STOP_TIMEOUT)  # the thread that handed descriptors of tensors to the workers

    def send(self) -> None:
        """Send the weights."""
        self._scheme.send(self.source.model)

    def digests(self) -> Mapping[int, str]:
        """The digest of each worker's model."""
        return self._workers.ask(Ask.DIGEST)


def _make(name: SchemeName) -> Any:
    from torchrl.weight_update import (  # noqa: PLC0415 - may be missing, and takes seconds to import
        MultiProcessWeightSyncScheme,
        SharedMemWeightSyncScheme,
    )

    return SharedMemWeightSyncScheme() if name is SchemeName.TORCHRL_SHARED else MultiProcessWeightSyncScheme()


def torchrl_schemes(situation: Situation) -> Iterator[Contender]:
    """The chosen schemes of TorchRL."""
    for name in situation.settings.schemes:
        if name.is_torchrl and situation.chosen(name):
            yield TorchRLScheme(name, situation)


def receive_torchrl(channel: Connection, payload: Payload, device: str, scheme: Any, index: int) -> None:
    """Run a worker: a thread of the scheme receives, and this one answers requests."""
    model = make_model(payload, device)
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=index)
    scheme.connect(worker_idx=index)
    channel.send("ready")
    while channel.recv() is not None:
        channel.send(digest_of_model(model))
