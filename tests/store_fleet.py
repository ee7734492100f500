"""Pairs over a torch.distributed store, and functions for worker processes that connect to it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from fleet import PATIENCE, Pair, WorkerSetup, filled, large
from skipping import not_tested
from torch import nn

from weightsync import DistributedTransport, DistributedWeightSyncScheme, WeightReceiver, WeightSender
from weightsync.clock import Deadline


def reach(port: int) -> Any:
    """Open a new connection to the store."""
    return dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)


def until(done: Callable[[], bool]) -> None:
    """Poll until the condition is true. Only the time limit of the test ends the wait."""
    while not done():
        time.sleep(0.005)


def keys_of(store: Any) -> list[str]:
    """The keys in a store."""
    try:
        keys: list[str] = store.list_keys()
    except AttributeError:
        not_tested("WHICH KEYS A STORE HAS", "this torch has no TCPStore.list_keys")
    return keys


def big(fill: float = 0.0) -> nn.Module:
    """A model of 64 MiB, more than any socket buffer holds."""
    return filled(nn.Linear(4096, 4096, bias=False), fill)


class StorePair(Pair):
    """A sender and its receivers in this process, over a store: one thread can drive both ends."""

    arrival = PATIENCE

    def __init__(
        self, store: Any, workers: int = 1, model: Callable[..., nn.Module] = large, sync: bool = True, **names: Any
    ) -> None:
        self.store = store
        self.pipes = []
        self.source = model(1.0)
        self.models = [model(0.0) for _ in range(workers)]
        self.scheme = DistributedWeightSyncScheme(sync=sync)
        self.scheme.init_on_sender("policy", store=store, num_workers=workers, model=self.source, **names)
        self.sender: WeightSender = self.scheme.get_sender()
        self.schemes = [DistributedWeightSyncScheme(sync=sync) for _ in range(workers)]
        for index, (scheme, destination) in enumerate(zip(self.schemes, self.models, strict=True)):
            scheme.init_on_worker("policy", store=store, rank=index + 1, model=destination)
        self.receivers: list[WeightReceiver] = [scheme.get_receiver() for scheme in self.schemes]


# ------------------------------------------------------------------------------ functions to run in workers


def meet(  # noqa: PLR0917 - sent over a pipe, by position
    setup: WorkerSetup,
    port: int,
    rank: int,
    make: Callable[..., nn.Module] = large,
    model_id: str = "policy",
    sync: bool = True,
) -> None:
    """Initialise the worker's side over the store."""
    setup.model = make()
    setup.kept["store"] = reach(port)
    setup.scheme = DistributedWeightSyncScheme(sync=sync)
    setup.scheme.init_on_worker(model_id, store=setup.kept["store"], rank=rank, model=setup.model)
    setup.receiver = setup.scheme.get_receiver()
    setup.kept[model_id] = (setup.scheme, setup.receiver, setup.model)


def select_model(setup: WorkerSetup, model_id: str) -> None:
    """Select one of several models for the following calls."""
    setup.scheme, setup.receiver, setup.model = setup.kept[model_id]


def holds(setup: WorkerSetup) -> tuple[str, int | None, set[float]]:
    """The receiver's state and version, and the least and the greatest value of each tensor."""
    values = {float(end) for tensor in setup.model.state_dict().values() for end in torch.aminmax(tensor)}
    return setup.receiver.state.value, setup.receiver.version, values


def open_store(setup: WorkerSetup) -> int:
    """Host a store. Returns its port."""
    setup.kept["store"] = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    port: int = setup.kept["store"].port
    return port


def lead(  # noqa: PLR0917 - sent over a pipe, by position
    setup: WorkerSetup,
    port: int,
    workers: int,
    make: Callable[..., nn.Module] = large,
    fill: float = 1.0,
    fanout: int | None = None,
) -> None:
    """Initialise the trainer's side over the store."""
    setup.model = make(fill)
    setup.kept["store"] = reach(port)
    setup.scheme = DistributedWeightSyncScheme(fanout=fanout)
    setup.scheme.init_on_sender("policy", store=setup.kept["store"], num_workers=workers, model=setup.model)
    setup.kept["sender"] = setup.scheme.get_sender()


def lead_tree(setup: WorkerSetup, port: int, listening: int, make: Callable[..., nn.Module]) -> None:
    """Initialise the side of a trainer with two workers that sends payloads to the first worker only.

    Returns once ``listening`` of the two workers have announced the address at which the other one can reach them.
    """
    lead(setup, port, 2, make, fanout=1)
    sender, deadline = setup.kept["sender"], Deadline(PATIENCE)
    while sum(bool(link._threads.branch.address) for link in sender.transports().values()) < listening:
        assert not deadline.passed, "too few workers have announced an address"
        sender.poll()
        time.sleep(0.005)


def receive_next_version(setup: WorkerSetup) -> int | None:
    """Receive until a new version has arrived, ignoring lost links. Returns that version."""
    before = setup.receiver.version
    while setup.receiver.version == before:
        with contextlib.suppress(ConnectionError):
            setup.receiver.receive(timeout=0.1)
    version: int | None = setup.receiver.version
    return version


def run_torchrl_worker_loop(transport: DistributedTransport, times: int) -> list[float]:
    """A worker loop on TorchRL's own keys: instruction, weights, answer. Returns the first element of each update."""
    store, rank, seen = transport.store, transport.rank, []
    for _ in range(times):
        instruction = store.get(f"NODE_{rank}_in")
        store.delete_key(f"NODE_{rank}_in")
        assert instruction == b"update_weights"
        model_id, weights = transport.receive_weights(timeout=PATIENCE)
        assert model_id == "policy"
        seen.append(float(weights["weight"][0, 0]))
        transport.send_ack("updated")
    return seen


def join_process_group(setup: WorkerSetup, port: int, rank: int, world: int) -> None:
    """Join a process group of the user's own program, beside weightsync."""
    dist.init_process_group("gloo", store=dist.PrefixStore("own", reach(port)), rank=rank, world_size=world)


def sums(setup: WorkerSetup | None, value: float) -> float:
    """Run a collective of the user's own program."""
    tensor = torch.tensor([value])
    dist.all_reduce(tensor)
    return tensor.item()


def leave_process_group(setup: WorkerSetup) -> None:
    dist.destroy_process_group()
