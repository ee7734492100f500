"""`RPCWeightSyncScheme`: workers are processes of one `torch.distributed.rpc` world."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace
from typing import Any

import torch

from weightsync.clock import Deadline
from weightsync.engine.background import Background
from weightsync.engine.receiver import WeightReceiver
from weightsync.errors import ConfigurationError
from weightsync.keys import SharedKey
from weightsync.options import Verify, WireDtype
from weightsync.schemes.arguments import unpack_arguments
from weightsync.schemes.base import WeightSyncScheme
from weightsync.schemes.collector_kinds import WorkerKind
from weightsync.schemes.facade_services import torchrl_transport
from weightsync.schemes.peers.base import BareTransport, SharedPresenter
from weightsync.schemes.peers.collectors import COLLECTOR, Collector, calling, collector_of, link_to, worker_of
from weightsync.schemes.sources import given_or_found
from weightsync.transports.base import Link
from weightsync.transports.rpc import call_server_of, is_called, require_rpc
from weightsync.weights.strategy import WeightStrategy


class RPCWeightSyncScheme(WeightSyncScheme):
    """Workers are processes of one `torch.distributed.rpc` world; each version is sent as one flat tensor per worker.

    How a worker is given determines the evidence of its outcomes. A worker given by name alone (``collector_infos=``)
    has a weightsync receiver, which answers for each version (evidence ``answer``). Messages sent before it listens
    wait there. A worker given with ``collector_rrefs=`` (and ``collector_class=``) is asked at the handshake whether
    such a receiver listens there for the model. If so, the receiver gets the weights; if not, the collector's own
    ``update_policy_weights_`` is called, and it is only known that the call returned (evidence ``call``).

    Args:
        strategy: "state_dict" (default) or "tensordict", or a `WeightStrategy`.
        verify: "auto", "digest" or "layout": see `WeightSyncScheme`.
        wire_dtype: "bfloat16", "float16" or "float32": see `WeightSyncScheme`.
        key: a secret shared with the workers: see `DistributedWeightSyncScheme`. It does not protect calls of
            a collector's own method.

    Raises:
        ConfigurationError: an argument has an unknown value or another type, or the key is empty.
    """

    _sender_arguments = ("collector_infos", "collector_rrefs", "collector_class")
    _reached = WorkerKind.OVER_RPC

    def __init__(
        self,
        strategy: WeightStrategy | str = "state_dict",
        *,
        verify: Verify | str = Verify.AUTO,
        wire_dtype: torch.dtype | WireDtype | str | None = None,
        key: bytes | str | None = None,
    ) -> None:
        self._key = None if key is None else SharedKey(key)
        super().__init__(strategy, verify=verify, wire_dtype=wire_dtype)

    _not_copied = (*WeightSyncScheme._not_copied, "_presenter")

    def _reset(self) -> None:
        super()._reset()
        self._presenter = SharedPresenter()

    def _endpoints(self, keywords: Mapping[str, Any], context: Any, model_id: str) -> Mapping[int, Any]:
        """One worker each, from ``collector_infos=`` and ``collector_rrefs=``, or the context's."""
        infos = _require_list(given_or_found(keywords, context, "collector_infos"), "collector_infos")
        rrefs = _require_list(given_or_found(keywords, context, "collector_rrefs"), "collector_rrefs")
        kind = given_or_found(keywords, context, "collector_class")
        if infos is None and rrefs is None:
            raise ConfigurationError(
                "init_on_sender() needs collector_infos=, the names or WorkerInfos of the workers, or collector_rrefs= "
                "and collector_class=; or a context that has them."
            )
        if kind is not None and rrefs is None:
            raise ConfigurationError("collector_class= needs collector_rrefs=: one reference per worker.")
        count = len(infos if infos is not None else rrefs or [])
        for name, number in (
            ("collector_rrefs", rrefs and len(rrefs)),
            ("num_workers", given_or_found(keywords, context, "num_workers")),
        ):
            if number not in (None, count):
                raise ConfigurationError(f"{name}: {number}, but there are {count} workers: give one per worker.")
        collectors = {
            worker: Collector(infos and infos[worker], rrefs and rrefs[worker], kind) for worker in range(count)
        }
        return {worker: _resolve_worker(collector, f"worker {worker}") for worker, collector in collectors.items()}

    def create_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        """A link to a worker.

        Args:
            endpoint: its name, rank or `WorkerInfo`; the tuple ``(collector_info, collector_rref, collector_class)``;
                an `RPCTransport`; or what `init_on_sender` makes of these.
            model_id: the model.
            peer: the other end, for messages.

        Raises:
            ConfigurationError: RPC is not initialised, or has no worker of that name.
        """
        if isinstance(endpoint, BareTransport):
            return super().create_link(endpoint, model_id, peer)
        return link_to(collector_of(endpoint), model_id, peer, self._presenter, SharedKey.given(self._key))

    def create_transport(
        self,
        pipe_or_context: Any = None,
        collector_rref: Any = None,
        collector_class: Any = None,
        *,
        collector_info: Any = None,
        worker_rank: int | None = None,
    ) -> Any:
        """TorchRL's transport to one collector.

        Args:
            pipe_or_context: the tuple ``(collector_info, collector_rref, collector_class)``, or the first of these.
            collector_rref: a reference to the collector.
            collector_class: its class.
            collector_info: the worker, as its `WorkerInfo`, name or rank.
            worker_rank: its rank: see `RPCTransport`.

        Raises:
            ConfigurationError: something is given twice, or the tuple has another length.
        """
        apart = {"collector_info": collector_info, "collector_rref": collector_rref, "collector_class": collector_class}
        found = unpack_arguments(COLLECTOR, pipe_or_context, apart)
        return torchrl_transport("RPCTransport")(
            **found, worker_rank=worker_rank, strategy=self.strategy, key=self._key
        )

    def _endpoint(self, keywords: Mapping[str, Any], context: Any, model_id: str) -> Any:
        """None: each process has one call server per model, whether or not RPC is initialised yet."""
        return None

    def listen(self, endpoint: Any, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Call ``accept`` with each sender's link, also if its calls arrived earlier: see `WeightSyncScheme.listen`.

        Raises:
            ConfigurationError: this process has a receiver of that model already.
        """
        if isinstance(endpoint, BareTransport):
            return super().listen(endpoint, model_id, accept)
        return call_server_of(model_id).open(accept, SharedKey.given(self._key))

    def _await_first(self, receiver: WeightReceiver, background: Background, deadline: Deadline) -> None:
        """Wait for the first version, unless `connect` is being called by RPC.

        The caller could not reach its own `connect` before ours returns. Then the first version goes live in the
        background.
        """
        if is_called():
            background.mark_seen()
        else:
            super()._await_first(receiver, background, deadline)


def _require_list(value: Any, name: str) -> list[Any] | None:
    """One entry for each worker, or None. Raises ConfigurationError: this is not a list."""
    if value is None:
        return None
    if not isinstance(value, Iterable) or isinstance(value, str | Mapping | Set):
        raise ConfigurationError(f"{name}= is {value!r}: give a list with one entry per worker. Nothing was sent.")
    return list(value)


def _resolve_worker(collector: Collector, peer: str) -> Collector:
    """The collector, with the worker as RPC knows it, so that it compares equal however it was named.

    Raises ConfigurationError: it cannot be reached. No link has been created, so valid ones can be given again.
    """
    require_rpc(peer)
    worker = worker_of(collector, peer)
    if collector.rref is not None or collector.kind is not None:
        calling(collector, worker, peer)
    return replace(collector, worker=worker)
