"""Workers over torch's RPC and torch.distributed: a `WorkerGroup` runs them, and another scheme brings the weights."""

from __future__ import annotations

import contextlib
import multiprocessing
import secrets
from collections.abc import Iterator
from functools import partial

from torch import nn

from weightsync import (
    DistributedWeightSyncScheme,
    RPCWeightSyncScheme,
    WeightSender,
    WeightSyncScheme,
    Worker,
    WorkerGroup,
)
from weightsync.demo.learning import Policy
from weightsync.demo.state import MODEL_ID, START_TIMEOUT, Settings
from weightsync.demo.worker import act_with
from weightsync.local_workers import SchemeName, join_rpc, joined_rpc, leave_rpc, rpc_address, rpc_name, store


@contextlib.contextmanager
def joined_workers(policy: nn.Module, settings: Settings) -> Iterator[tuple[WorkerGroup, WeightSender]]:
    """Processes that share a world of torch's RPC, or a store of torch.distributed, with the trainer.

    Yields the group, which runs them and takes their results, and the sender of their weights. The first send, of the
    policy, is in progress. The workers end when the context is left.
    """
    count = settings.workers
    context = multiprocessing.get_context("forkserver")
    with contextlib.ExitStack() as cleanup:
        scheme: WeightSyncScheme
        if settings.scheme is SchemeName.RPC:
            scheme, address = RPCWeightSyncScheme(), cleanup.enter_context(rpc_address())
            run = partial(act_over_rpc, settings=settings, scheme=scheme, address=address)
            group = cleanup.enter_context(WorkerGroup(run, policy, count, scheme="process", capacity=1, ctx=context))
            group.wait_async(timeout=START_TIMEOUT)
            cleanup.enter_context(joined_rpc(address, count + 1, START_TIMEOUT))
            cleanup.callback(scheme.close)
            names = [rpc_name(rank) for rank in range(1, count + 1)]
            scheme.init_on_sender(MODEL_ID, model=policy, collector_infos=names)
        else:
            # torch's store can be reached from other hosts, so a key is needed to keep them out.
            scheme, rendezvous = DistributedWeightSyncScheme(key=secrets.token_bytes(16)), store()
            run = partial(act_over_store, settings=settings, scheme=scheme, port=rendezvous.port)
            group = cleanup.enter_context(WorkerGroup(run, policy, count, scheme="process", capacity=1, ctx=context))
            cleanup.callback(scheme.close)
            # With `processes`, the sender notices at once if a worker dies, even before the handshake.
            processes = list(group.processes.values())
            scheme.init_on_sender(MODEL_ID, model=policy, num_workers=count, store=rendezvous, processes=processes)
        sender = scheme.get_sender()
        sender.send_async()
        cleanup.callback(group.close)  # first, while the trainer can still hear the workers' goodbyes
        yield group, sender


def act_over_rpc(worker: Worker, settings: Settings, scheme: RPCWeightSyncScheme, address: str) -> None:
    """What each worker does whose weights come over torch's RPC."""
    with scheme, contextlib.ExitStack() as cleanup:
        scheme.init_on_receiver(model_id=MODEL_ID, model=Policy())
        join_rpc(address, worker.index + 1, settings.workers + 1)  # the trainer is rank 0
        cleanup.callback(leave_rpc)
        scheme.connect()
        with worker.step():  # the group's own model does not act, and gets no further version
            act_with(worker, scheme.get_receiver(), settings)


def act_over_store(worker: Worker, settings: Settings, scheme: DistributedWeightSyncScheme, port: int) -> None:
    """What each worker does whose weights come over torch.distributed."""
    with scheme:
        scheme.init_on_receiver(model_id=MODEL_ID, model=Policy(), store=store(port), rank=worker.index + 1)
        scheme.connect()
        with worker.step():  # the group's own model does not act, and gets no further version
            act_with(worker, scheme.get_receiver(), settings)
