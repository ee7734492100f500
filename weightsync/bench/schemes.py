"""The schemes of weightsync whose workers are processes of this machine, started for one case.

This is what a user's own program does on both sides, and a request for a digest or a count beside it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from torch import nn

import weightsync
from weightsync import Verify, WeightReceiver, WeightSender, WeightSyncScheme
from weightsync.bench.contenders import Contender, ModelContender, Situation
from weightsync.bench.models import digest_of_model, make_model
from weightsync.bench.processes import Ask, Workers, calls_of
from weightsync.bench.results import Kind, Label
from weightsync.bench.settings import DEFAULT_VERIFY, SEND_TIMEOUT, START_TIMEOUT, Device, Payload, SchemeName
from weightsync.transports.store.store import open_store

#: How many seconds a worker waits for a new version before it checks for a request.
_PAUSE = 0.2


class Sending(ModelContender):
    """A scheme of weightsync, set up, with the trainer's sender. Subclasses know how to ask the workers."""

    def __init__(self, name: SchemeName, verify: str, situation: Situation, sender: WeightSender) -> None:
        self.label = Label(name.value, Kind.SCHEME, verify)
        self.sender = sender
        self.source = situation.source

    def send(self) -> None:
        """Send the next version. Returns when every worker has applied it and acked it; else raises."""
        self.sender.send(timeout=SEND_TIMEOUT)


class ProcessScheme(Sending):
    """A scheme with worker processes of its own, each with a copy of the scheme."""

    def __init__(self, name: SchemeName, verify: str, situation: Situation) -> None:
        scheme = make_scheme(name, verify, situation.settings.device)
        situation.cleanup.callback(scheme.close)
        # With torch.distributed the trainer is rank 0, and worker i is rank i + 1.
        first = 1 if name is SchemeName.DISTRIBUTED else 0
        shared = (situation.payload, situation.settings.device.worker, scheme)
        arguments = [(*shared, (situation.model_id, index + first)) for index in range(situation.workers)]
        self._workers = Workers(f"{name.value}, {verify}", serve, arguments)
        situation.cleanup.callback(self._workers.close)
        members: dict[str, Any] = {"num_workers": situation.workers, "processes": self._workers.processes}
        if name is SchemeName.DISTRIBUTED:
            members["store"] = open_store("127.0.0.1", 0, timedelta(seconds=START_TIMEOUT))
        # Before the processes start, so that each inherits its end of the link.
        scheme.init_on_sender(situation.model_id, model=situation.source.model, **members)
        self._workers.start()
        self._workers.gather()
        super().__init__(name, verify, situation, scheme.get_sender())

    def digests(self) -> Mapping[int, str]:
        """The digest of each worker's model."""
        return self._workers.ask(Ask.DIGEST)

    def count_calls(self) -> tuple[int | None, int | None]:
        """Count the calls in the trainer and in the first worker."""
        self._workers.ask_one(0, Ask.CALLS)
        return calls_of(self.send), self._workers.answer_of(0)


class AsyncReturn(ModelContender):
    """How long `send_async()` of a scheme takes to return. What it sent is awaited before the next one, untimed."""

    def __init__(self, scheme: Sending) -> None:
        self.label = Label(scheme.label.name, Kind.ASYNC, scheme.label.verify)
        self._scheme, self.source = scheme, scheme.source

    def send(self) -> None:
        """Hand the next version over."""
        self._scheme.sender.send_async()

    def settle(self) -> None:
        """Wait until every worker has it."""
        self._scheme.sender.wait_async(timeout=SEND_TIMEOUT)

    def digests(self) -> Mapping[int, str]:
        """The digest of each worker's model."""
        return self._scheme.digests()


def make_scheme(name: SchemeName, verify: str, device: Device = Device.CPU) -> WeightSyncScheme:
    """Make a scheme. Worker processes get copies of it, which find the trainer by themselves.

    Workers map what is shared, on a GPU too. Over pipes they copy it out.
    """
    match name:
        case SchemeName.SHARED:
            return weightsync.SharedMemWeightSyncScheme(verify=verify, map_on_device=device is Device.CUDA)
        case SchemeName.PROCESS:
            return weightsync.MultiProcessWeightSyncScheme(verify=verify)
        case SchemeName.RPC:
            return weightsync.RPCWeightSyncScheme(verify=verify)
        case SchemeName.RAY:
            return weightsync.RayWeightSyncScheme(verify=verify)
        case _:
            # Its store listens on the loopback only: no key is needed to keep other hosts out.
            return weightsync.DistributedWeightSyncScheme(verify=verify)


def default_verify() -> str:
    """The library's own default for ``verify=``."""
    default: Verify = inspect.signature(weightsync.WeightSyncScheme).parameters["verify"].default
    return default.value


def variants(situation: Situation) -> list[str]:
    """The values of ``verify=`` to measure, each once."""
    chosen = situation.settings.verify
    return list(dict.fromkeys(default_verify() if each == DEFAULT_VERIFY else each for each in chosen))


def process_schemes(situation: Situation) -> Iterator[Contender]:
    """The chosen schemes whose workers are processes, with each verification; and `send_async` over shared memory."""
    for name in (SchemeName.SHARED, SchemeName.PROCESS, SchemeName.DISTRIBUTED):
        for verify in variants(situation) if situation.chosen(name) else ():
            scheme = ProcessScheme(name, verify, situation)
            yield scheme
            if name is SchemeName.SHARED and verify == default_verify():
                yield AsyncReturn(scheme)


def serve(channel: Connection, payload: Payload, device: str, scheme: WeightSyncScheme, names: tuple[str, int]) -> None:
    """Run a worker: receive versions into a model, and answer requests. `names`: the model's id, the worker's index."""
    model_id, number = names
    model = make_model(payload, device)
    with scheme:
        scheme.init_on_worker(model_id, model=model, worker_idx=number)
        channel.send("ready")
        serve_requests(scheme.get_receiver(), model, channel)


def serve_requests(receiver: WeightReceiver, model: nn.Module, channel: Connection) -> None:
    """Receive versions, and between two of them answer requests, until one says stop."""
    while True:
        receiver.receive(timeout=_PAUSE)
        if channel.poll():
            match channel.recv():
                case Ask.DIGEST:
                    channel.send(digest_of_model(model))
                case Ask.CALLS:
                    channel.send("counting")
                    channel.send(calls_of(lambda: receiver.receive(timeout=SEND_TIMEOUT)))
                case _:
                    return
