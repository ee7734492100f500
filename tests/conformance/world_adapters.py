"""Adapters that need a world around them: a store, RPC. Both ends are in this process, and the world is real."""

from __future__ import annotations

import itertools
import logging
import uuid
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore, rpc

from weightsync import DistributedWeightSyncScheme
from weightsync.testing import Conformance, Ends, check_transport
from weightsync.transports.calls import CallLink
from weightsync.transports.rpc import RpcCourier, door_of, worker_named

_ranks = itertools.count(1)


def store_factory(sync: bool) -> Callable[[str], Ends]:
    """Links over a store of this process and gloo pairs of its own."""
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    scheme = DistributedWeightSyncScheme(sync=sync)

    def lay(model_id: str) -> Ends:
        rank = next(_ranks)
        link = scheme.lay_link((store, rank), model_id, "the worker")
        return Ends(link, lambda accept: scheme.listen((store, rank), model_id, accept))

    return lay


def distributed_conforms(_seat: Any, unreachable: Mapping[str, str], patience: float) -> Conformance:
    """Check torch.distributed, in a process of its own."""
    logging.getLogger("weightsync").setLevel("CRITICAL")
    return check_transport(store_factory(sync=True), unreachable=unreachable, patience=patience)


def rpc_conforms(_seat: Any, folder: str, unreachable: Mapping[str, str], patience: float) -> Conformance:
    """Check RPC, in a process of its own: its threads end with it."""
    logging.getLogger("weightsync").setLevel("CRITICAL")
    enter_rpc(folder)
    return check_transport(rpc_factory(), unreachable=unreachable, patience=patience)


def enter_rpc(folder: str, name: str = "kit", rank: int = 0, size: int = 1) -> None:
    """Join an RPC world, whose store is a file of that folder."""
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, init_method=f"file://{folder}/store")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")  # torch of its own deprecations
        rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)


def rpc_factory() -> Callable[[str], Ends]:
    """Calls of this process to itself, through RPC's agent and its threads."""

    def lay(model_id: str) -> Ends:
        # Each connection has a door of its own, as each worker has.
        door = f"{model_id} {uuid.uuid4().hex}"
        courier = RpcCourier(worker_named("kit", "the worker"), door, "the worker")
        return Ends(CallLink(courier, "the worker"), door_of(door).open)

    return lay
