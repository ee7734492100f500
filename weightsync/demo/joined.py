"""Workers over torch's RPC and torch.distributed, which a `WorkerGroup` does not start. They are used like a group."""

from __future__ import annotations

import contextlib
import multiprocessing
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from typing import Any, Self

from torch import nn

from weightsync import (
    DistributedWeightSyncScheme,
    ResultTimeoutError,
    RPCWeightSyncScheme,
    SyncReport,
    WeightReceiver,
    WeightSender,
    WeightSyncScheme,
    WorkerFailedError,
    WorkerResult,
)
from weightsync.demo.learning import Policy
from weightsync.demo.state import MODEL_ID, START_TIMEOUT, Settings
from weightsync.local_workers import (
    LocalWorker,
    LocalWorkerError,
    SchemeName,
    join_rpc,
    joined_rpc,
    rpc_address,
    rpc_name,
    stop,
)
from weightsync.local_workers import store as local_store

#: How many seconds a worker waits for a new version before it checks whether its result was taken.
_PAUSE = 0.002


class JoinedWorkers:
    """Worker processes that share a store of torch.distributed, or a world of torch's RPC, with the trainer.

    Args:
        run: what each worker does.
        policy: the trainer's policy.
        settings: the settings of the run.
    """

    def __init__(self, run: Callable[[JoinedWorker], None], policy: nn.Module, settings: Settings) -> None:
        self._run, self._policy, self._settings = run, policy, settings
        #: The workers that can still give a result.
        self._open: dict[int, LocalWorker] = {}
        self._reply: str | None = "next"
        self._cleanup = contextlib.ExitStack()

    @property
    def sender(self) -> WeightSender:
        """The sender of the weights."""
        return self._scheme.get_sender()

    def __enter__(self) -> Self:
        with self._cleanup:
            self._scheme = self._join_rpc() if self._settings.scheme is SchemeName.RPC else self._meet_at_store()
            self.sender.send_async()
            self._cleanup = self._cleanup.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def _join_rpc(self) -> WeightSyncScheme:
        count = self._settings.workers
        address = self._cleanup.enter_context(rpc_address())
        scheme = RPCWeightSyncScheme()
        self._make(scheme, [(address, rank, count + 1) for rank in range(1, count + 1)])
        self._start()
        self._cleanup.enter_context(joined_rpc(address, count + 1, START_TIMEOUT))
        self._cleanup.callback(scheme.close)
        names = [rpc_name(rank) for rank in range(1, count + 1)]
        scheme.init_on_sender(MODEL_ID, model=self._policy, collector_infos=names)
        return scheme

    def _meet_at_store(self) -> WeightSyncScheme:
        count = self._settings.workers
        # torch's store can be reached from other hosts, so a key is needed to keep them out.
        scheme = DistributedWeightSyncScheme(key=secrets.token_bytes(16))
        self._make(scheme, [None] * count)
        self._cleanup.callback(scheme.close)
        # With `processes`, the sender notices at once if a worker dies, even before the handshake.
        processes = [worker.process for worker in self._open.values()]
        store = local_store(timeout=START_TIMEOUT)
        # Before the processes start, so that each learns from its copy of the scheme where the store is.
        scheme.init_on_sender(MODEL_ID, model=self._policy, num_workers=count, store=store, processes=processes)
        self._start()
        return scheme

    def _make(self, scheme: WeightSyncScheme, rpc_places: Sequence[tuple[str, int, int] | None]) -> None:
        context = multiprocessing.get_context("forkserver")
        for index, place in enumerate(rpc_places):
            arguments = (self._run, index, scheme, place)
            self._open[index] = LocalWorker(f"worker {index}", work, arguments, context)
        self._cleanup.callback(stop, list(self._open.values()))

    def _start(self) -> None:
        """Start the processes, and wait until all of them run."""
        for worker in self._open.values():
            worker.start()
        for worker in self._open.values():
            worker.answer(START_TIMEOUT)

    def send(self, weights: nn.Module, *, timeout: float, on_failure: str) -> SyncReport:
        """Send weights as the next version: see `WorkerGroup.send`."""
        return self.sender.send(weights, timeout=timeout, on_failure=on_failure, allow_empty=True)

    def send_async(self, weights: nn.Module) -> SyncReport:
        """Send weights as the next version and return at once: see `WorkerGroup.send_async`."""
        return self.sender.send_async(weights, allow_empty=True)

    def wait_async(self, *, timeout: float, on_failure: str) -> SyncReport:
        """Wait for the answers: see `WorkerGroup.wait_async`."""
        return self.sender.wait_async(timeout=timeout, on_failure=on_failure)

    def stop(self) -> None:
        """Ask the workers to return: each gives one more result after the one that it has given."""
        self._reply = None

    def results(self, timeout: float) -> Iterator[WorkerResult]:
        """Take the workers' results, as `WorkerGroup.results` does."""
        until = time.monotonic() + timeout
        while self._open:
            channels = [worker.channel for worker in self._open.values()]
            ready = connection.wait(channels, max(0.0, until - time.monotonic()))
            if not ready:
                raise ResultTimeoutError("no worker gave a result in time.")
            index = next(index for index, worker in self._open.items() if worker.channel in ready)
            try:
                result = WorkerResult(index, (), self._open[index].answer(0))
                self._open[index].ask(self._reply)
            except LocalWorkerError as error:
                del self._open[index]
                if self._reply is not None or error.remote_traceback:
                    raise WorkerFailedError(index, error.reason, error.remote_traceback) from error
            else:
                yield result


class JoinedWorker:
    """What such a worker's function is given: see `weightsync.Worker`."""

    def __init__(self, index: int, model: nn.Module, receiver: WeightReceiver, channel: connection.Connection) -> None:
        self.index, self.model, self.receiver = index, model, receiver
        self.stopped = False
        self._channel = channel

    @contextlib.contextmanager
    def step(self) -> Iterator[int | None]:
        """Keep one version for the length of a block. A new one becomes live before it."""
        self.receiver.receive(timeout=0)
        with self.receiver.serving() as version:
            yield version

    def put(self, item: Any) -> None:
        """Give the trainer a result, and receive weights until it has taken it."""
        self._channel.send(item)
        while not self._channel.poll():
            self.receiver.receive(timeout=_PAUSE)
        self.stopped = self._channel.recv() is None


def work(
    channel: connection.Connection,
    run: Callable[[JoinedWorker], None],
    index: int,
    scheme: WeightSyncScheme,
    rpc_place: tuple[str, int, int] | None,
) -> None:
    """Be a worker process until its function returns, or the trainer is gone.

    Args:
        rpc_place: address, rank and size of the world of torch's RPC; None: the scheme needs none.
    """
    channel.send("ready")
    policy = Policy()
    # With torch.distributed, the trainer is rank 0 and worker i is rank i + 1.
    number = index + isinstance(scheme, DistributedWeightSyncScheme)
    with scheme:
        scheme.init_on_worker(MODEL_ID, model=policy, worker_idx=number)
        if rpc_place is not None:
            join_rpc(*rpc_place)
        receiver = scheme.get_receiver()
        while receiver.version is None:
            receiver.receive(timeout=_PAUSE)
        run(JoinedWorker(index, policy, receiver, channel))
