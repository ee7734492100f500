"""`DistributedWeightSyncScheme`: rendezvous at a TCPStore; weights are sent over one connection per worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final

import torch

from weightsync.clock import Deadline, seconds
from weightsync.engine.context import MISSING, optional
from weightsync.errors import ConfigurationError, TransportError
from weightsync.keys import SharedKey
from weightsync.options import Verify, WireDtype, switch, whole_number
from weightsync.schemes.arguments import unpack_arguments
from weightsync.schemes.base import WeightSyncScheme
from weightsync.schemes.collector_kinds import WorkerKind
from weightsync.schemes.facade_services import torchrl_transport
from weightsync.schemes.peers.base import BareTransport
from weightsync.schemes.sources import given_or_found
from weightsync.transports.base import Link
from weightsync.transports.store import StoreEndpoint, listen, sender_link
from weightsync.transports.store.fanout import Fanout
from weightsync.transports.store.group import require_backend
from weightsync.transports.store.store import (
    FOR_EVER,
    Hints,
    Store,
    TCPStore,
    base_of,
    connect_to_store,
    keep_in_child,
    open_store,
)
from weightsync.transports.store.stream import named_address
from weightsync.weights.strategy import WeightStrategy

#: Buckets of a payload in flight at once, with ``sync=False``.
IN_FLIGHT: Final = 4
#: TorchRL's collectors use ``tcp_port`` and the one after it themselves.
_PORT_OFFSET: Final = 2
#: The number of ports.
_PORTS: Final = 2**16
#: How TorchRL addresses a worker.
_PAIR: Final = ("store", "rank")


def _require_fanout(fanout: int | None, backend: str) -> int | None:
    if fanout is None:
        return None
    number = whole_number(fanout)
    if not number:
        raise ConfigurationError(f"fanout is {fanout!r}: give a whole number of at least 1, or None.")
    if backend != "gloo":
        raise ConfigurationError(
            f"fanout={fanout} needs backend='gloo': with {backend!r} each payload travels in a group of two ranks."
        )
    return number


def _address_in(info: Any) -> tuple[str, int]:
    """Host and port of a ``store_info``. Raises ConfigurationError: it has none."""
    host: Any = info.get("host") if isinstance(info, Mapping) else None
    port = whole_number(info.get("port")) if isinstance(info, Mapping) else None
    if not isinstance(host, str) or "\0" in host or not port or port >= _PORTS:
        raise ConfigurationError(
            f"store_info= is {info!r}: give what the trainer's get_store_info() returns, a dict of host and port. "
            "Nothing has changed."
        )
    return host, port


def _own_store_port(base_port: Any) -> int:
    """The port for a store of our own, next to TorchRL's; 0: any. Raises ConfigurationError: that is not a port."""
    if base_port in (MISSING, None):
        return 0
    try:
        port = int(base_port) + _PORT_OFFSET
    except (TypeError, ValueError, OverflowError):
        raise ConfigurationError(f"context.tcp_port is {base_port!r}: it must be the number of a port.") from None
    return port if 0 < port < _PORTS else 0


class DistributedWeightSyncScheme(WeightSyncScheme):
    """Over ``torch.distributed``: the ends find each other through a TCPStore; each worker has its own connection.

    The user's own process group is neither needed nor touched. The trainer is rank 0, worker i is rank i + 1.

    `init_on_sender` takes ``processes``, as schemes over pipes do, for workers on the trainer's host: the death of a
    worker that has not reached the store yet is then noticed at once.

    Args:
        backend: "gloo" (a plain TCP connection in place of gloo), or "nccl" if trainer and workers have a GPU each.
        sync: whether the scheme's own `send` waits for the answers (default). If not, it returns a report with PENDING
            outcomes, and the next `send`, or `shutdown`, reports the results; and over NCCL up to four buckets of a
            payload are in flight at once, instead of one.
        timeout: seconds that this scheme waits for a store that it connects to, or opens; None: forever.
        strategy: "state_dict" (default) or "tensordict", or a `WeightStrategy`.
        verify: "auto", "digest" or "layout": see `WeightSyncScheme`.
        wire_dtype: "bfloat16", "float16" or "float32": see `WeightSyncScheme`.
        delta: whether a version may be sent as a delta, for slow links: see `WeightSyncScheme`.
        fanout: in the trainer: the number of workers to which it sends each payload. Each of them passes the payload on
            to as many others while it arrives, and so on. Default: the trainer sends each payload to every worker.
            gloo only.
        key: a secret (bytes or str) that the trainer and its workers share; default: the environment's
            ``WEIGHTSYNC_KEY``, if it is set. Messages without the same key are rejected. It is pickled with the scheme.

    Raises:
        ConfigurationError: another backend, or one that is not available here; an empty key; or a ``fanout`` that is
            not a whole number of at least 1, or with NCCL; or a ``timeout`` that is not a number of seconds.
    """

    _carries_deltas = True
    _sender_arguments = ("store", "processes")
    _reached = WorkerKind.RANKS
    _worker_arguments = ("store", "rank", "store_info", "worker_idx")

    def __init__(
        self,
        backend: str = "gloo",
        sync: bool = True,
        timeout: float | None = 3600.0,
        strategy: WeightStrategy | str = "state_dict",
        *,
        verify: Verify | str = Verify.AUTO,
        wire_dtype: torch.dtype | WireDtype | str | None = None,
        delta: bool = False,
        fanout: int | None = None,
        key: bytes | str | None = None,
    ) -> None:
        require_backend(backend)
        #: The number of workers to which the trainer, and each worker, sends a payload; None: the trainer sends it to
        #: all.
        self.fanout = _require_fanout(fanout, backend)
        self._key = None if key is None else SharedKey(key)
        self.backend = backend
        seconds(timeout)
        self.timeout = timeout
        #: The address of the store that this scheme made; pickled with the scheme.
        self._store_info: dict[str, Any] | None = None
        self._store: Store | None = None
        super().__init__(strategy, verify=verify, wire_dtype=wire_dtype, delta=delta)
        self.sync = switch(sync, "sync")

    _not_copied = (*WeightSyncScheme._not_copied, "_hints", "_shared_fanout")

    def _reset(self) -> None:
        super()._reset()
        self._hints = Hints()
        self._shared_fanout = None if self.fanout is None else Fanout(self.fanout)

    def get_store_info(self) -> dict[str, Any]:
        """Host and port of the trainer's store: the workers' ``store_info``.

        Raises:
            ConfigurationError: there is no store yet.
        """
        if self._store_info is None:
            raise ConfigurationError("there is no store yet: call init_on_sender() first.")
        return dict(self._store_info)

    def _endpoints(self, keywords: Mapping[str, Any], context: Any, model_id: str) -> Mapping[int, Any]:
        """One rendezvous per worker, at ``store=`` or ``context.store``, else at a store that is made here."""
        count = given_or_found(keywords, context, "num_workers")
        if count is None:
            raise ConfigurationError("init_on_sender() needs num_workers=, or a context with .num_workers.")
        store = given_or_found(keywords, context, "store")
        if store is None:
            store = self._store = self._make_store(optional(context, "tcp_port"))
        base = base_of(store)
        self._store_info = {"host": base.host, "port": base.port}
        workers = sorted(keywords.get("params_map", range(count)))
        return {worker: self._store_endpoint_at(store, worker + 1) for worker in workers}

    def _endpoint(self, keywords: Mapping[str, Any], context: Any, model_id: str) -> Any:
        """The rendezvous for our rank, at ``store=``, ``context.store`` or the store of ``store_info``."""
        rank = given_or_found(keywords, context, "rank")
        if rank is None:
            rank = given_or_found(keywords, context, "worker_idx")
        if rank is None or rank == 0:
            raise ConfigurationError(
                "init_on_worker() and init_on_receiver() need rank= (or worker_idx=, or a context with .rank), from 1: "
                "the trainer is rank 0, and worker i is rank i + 1."
            )
        store = given_or_found(keywords, context, "store")
        if store is None:
            store = self._store = self._reach_store(keywords.get("store_info") or self._store_info)
        return self._store_endpoint_at(store, rank)

    def _store_endpoint_at(self, store: Any, rank: Any) -> StoreEndpoint:
        in_flight = 1 if self.sync else IN_FLIGHT
        return StoreEndpoint(store, rank, self.backend, in_flight, SharedKey.given(self._key), self._hints)

    def _make_store(self, base_port: Any) -> TCPStore:
        host, port = named_address(), _own_store_port(base_port)
        for wanted in (port, 0):
            try:
                return open_store(host, wanted, self._store_timeout())
            except (RuntimeError, OSError) as error:
                failure: Exception = error
        raise TransportError(f"no store could be opened on {host}: {failure}") from failure

    def _store_timeout(self) -> timedelta:
        """How long this scheme waits for a store."""
        allowed = seconds(self.timeout)
        return FOR_EVER if allowed is None else timedelta(seconds=min(allowed, FOR_EVER.total_seconds()))

    def _reach_store(self, info: Mapping[str, Any] | None) -> TCPStore:
        if info is None:
            raise ConfigurationError(
                "init_on_worker() and init_on_receiver() need store= (a TCPStore), store_info= (from the trainer's "
                "get_store_info()), or a scheme that was sent here after init_on_sender()."
            )
        host, port = _address_in(info)
        try:
            return connect_to_store(host, port, self._store_timeout())
        except (RuntimeError, OSError) as error:
            raise TransportError(f"the store at {host}:{port} cannot be reached: {error}") from error

    def create_transport(
        self,
        pipe_or_context: Any = None,
        rank: int | None = None,
        *,
        store: Any = None,
        weights_buffer: Any = None,
        sync: bool | None = None,
    ) -> Any:
        """TorchRL's transport to one worker, or to the trainer; if it is incomplete, its first send raises.

        Args:
            pipe_or_context: the tuple ``(store, rank)``, or the store.
            rank: the worker's rank.
            store: the store, by keyword.
            weights_buffer: see `DistributedTransport`.
            sync: see `DistributedTransport`; default: the scheme's.

        Raises:
            ConfigurationError: something is given twice, or the tuple has another length.
        """
        store, rank = unpack_arguments(_PAIR, pipe_or_context, {"store": store, "rank": rank}).values()
        sync = self.sync if sync is None else sync
        transport = torchrl_transport("DistributedTransport")
        if weights_buffer is None:
            return transport(store, rank, sync, backend=self.backend, key=self._key)
        return transport(weights_buffer=weights_buffer, store=store, rank=rank, sync=sync, key=self._key)

    def create_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        """The sender's end of a new link.

        Args:
            endpoint: a `StoreEndpoint`, a tuple (store, rank), or an object with ``.store`` and ``.rank``.
            model_id: the model.
            peer: the other end, for messages.

        Raises:
            ConfigurationError: no store, or no rank.
        """
        if isinstance(endpoint, BareTransport):
            return super().create_link(endpoint, model_id, peer)
        return sender_link(self._store_endpoint(endpoint), model_id, peer, self._shared_fanout)

    def listen(self, endpoint: Any, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Take each link that a sender announces to this worker: see `create_link`."""
        if isinstance(endpoint, BareTransport):
            return super().listen(endpoint, model_id, accept)
        return listen(self._store_endpoint(endpoint), model_id, accept)

    def _store_endpoint(self, endpoint: Any) -> StoreEndpoint:
        if isinstance(endpoint, StoreEndpoint):
            return endpoint
        if isinstance(endpoint, tuple | list):
            return self._store_endpoint_at(*unpack_arguments(_PAIR, endpoint, {}).values())
        store, rank = optional(endpoint, "store"), optional(endpoint, "rank")
        if store is MISSING or rank is MISSING:
            raise ConfigurationError(f"a worker's address is (store, rank), not of type {type(endpoint).__name__}.")
        return self._store_endpoint_at(store, rank)

    def _connect_sender(self, weights: Any, deadline: Deadline) -> None:
        """Connect without writing TorchRL's own keys: a loop that waits on them would take that for an update."""
        with self._hints.withheld():
            super()._connect_sender(weights, deadline)

    def _connect_receiver(self, worker_idx: int | None, deadline: Deadline) -> None:
        """Connect; the ack of the first version is not written to TorchRL's own keys either."""
        self._hints.withhold_next()
        super()._connect_receiver(worker_idx, deadline)
        if self.get_receiver().version is None:
            self._hints.write_all()

    def close(self) -> None:
        """Close whichever sides were initialised, and the store if it was made here."""
        try:
            super().close()
        finally:
            self._store = None

    def forget(self) -> None:
        """Become a copy: called in a forked child."""
        keep_in_child(self._store, self._sender_side.given)
        self._store = None
        super().forget()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_store": None}
