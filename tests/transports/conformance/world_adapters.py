"""Adapters over a real store and a real RPC world, with both ends in this process."""

from __future__ import annotations

import itertools
import logging
import uuid
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from rpc_processes import TCP_ONLY
from torch.distributed import TCPStore, rpc

from weightsync import DistributedWeightSyncScheme
from weightsync.testing import Conformance, Ends, Nonconforming, check_transport
from weightsync.transports.calls.client import CallLink
from weightsync.transports.rpc import RpcCallClient, call_server_of, worker_named

_ranks = itertools.count(1)


def store_factory(_folder: str, fanout: int | None = None) -> Callable[[str], Ends]:
    """Links over torch.distributed, through a store in this process."""
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    scheme = DistributedWeightSyncScheme(fanout=fanout)

    def connect(model_id: str) -> Ends:
        rank = next(_ranks)
        link = scheme.create_link((store, rank), model_id, "the worker")
        return Ends(link, lambda accept: scheme.listen((store, rank), model_id, accept))

    return connect


def conforms(_setup: Any, factory_in: Callable[[str], Callable[[str], Ends]], folder: str, how: Any) -> Conformance:
    """Check an adapter in this child process, with which its threads end. Returns the kit's result."""
    logging.getLogger("weightsync").setLevel("CRITICAL")
    try:
        return check_transport(factory_in(folder), **how)
    except Nonconforming as refused:
        return refused.conformance


def enter_rpc(folder: str, name: str = "kit", rank: int = 0, size: int = 1) -> None:
    """Join an RPC world whose store is a file in the given folder."""
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, init_method=f"file://{folder}/store", **TCP_ONLY)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")  # torch's own deprecations
        rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)


def rpc_factory(folder: str) -> Callable[[str], Ends]:
    """Links by calls of this process to itself, through RPC's agent and its threads."""
    enter_rpc(folder)

    def connect(model_id: str) -> Ends:
        # Each connection has its own call server, as each worker does.
        call_server = f"{model_id} {uuid.uuid4().hex}"
        call_client = RpcCallClient(worker_named("kit", "the worker"), call_server, "the worker")
        return Ends(CallLink(call_client, "the worker"), call_server_of(call_server).open)

    return connect
