"""Adapters that need a world around them: a store, RPC. Both ends are in this process, and the world is real."""

from __future__ import annotations

import itertools
import logging
import uuid
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from rpc_over import TCP
from torch.distributed import TCPStore, rpc

from weightsync import DistributedWeightSyncScheme
from weightsync.testing import Conformance, Ends, Nonconforming, check_transport
from weightsync.transports.calls.client import CallLink
from weightsync.transports.rpc import RpcCallClient, call_server_of, worker_named

_ranks = itertools.count(1)


def store_factory(_folder: str, fanout: int | None = None) -> Callable[[str], Ends]:
    """Links over a store of this process."""
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    scheme = DistributedWeightSyncScheme(fanout=fanout)

    def connect(model_id: str) -> Ends:
        rank = next(_ranks)
        link = scheme.create_link((store, rank), model_id, "the worker")
        return Ends(link, lambda accept: scheme.listen((store, rank), model_id, accept))

    return connect


def conforms(_setup: Any, factory_in: Callable[[str], Callable[[str], Ends]], folder: str, how: Any) -> Conformance:
    """Check an adapter in a process of its own, whose threads end with it. Returns all that was found."""
    logging.getLogger("weightsync").setLevel("CRITICAL")
    try:
        return check_transport(factory_in(folder), **how)
    except Nonconforming as refused:
        return refused.conformance


def enter_rpc(folder: str, name: str = "kit", rank: int = 0, size: int = 1) -> None:
    """Join an RPC world, whose store is a file of that folder."""
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, init_method=f"file://{folder}/store", **TCP)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")  # torch of its own deprecations
        rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)


def rpc_factory(folder: str) -> Callable[[str], Ends]:
    """Calls of this process to itself, through RPC's agent and its threads."""
    enter_rpc(folder)

    def connect(model_id: str) -> Ends:
        # Each connection has a call server of its own, as each worker has.
        call_server = f"{model_id} {uuid.uuid4().hex}"
        call_client = RpcCallClient(worker_named("kit", "the worker"), call_server, "the worker")
        return Ends(CallLink(call_client, "the worker"), call_server_of(call_server).open)

    return connect
