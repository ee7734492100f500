"""`RPCTransport`: TorchRL's transport to one remote collector over `torch.distributed.rpc`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weightsync.clock import Timeout
from weightsync.errors import ConfigurationError
from weightsync.keys import Secret, SharedKey
from weightsync.schemes.arguments import Generation
from weightsync.schemes.facade_services import torchrl_class
from weightsync.schemes.peers.base import SharedPresenter
from weightsync.schemes.peers.collectors import Collector, link_to
from weightsync.torchrl.transports.facade import TransportFacade
from weightsync.transports.base import Link
from weightsync.transports.rpc import call_server_of, is_initialised
from weightsync.weights.strategy import WeightStrategy


@torchrl_class
class RPCTransport(TransportFacade):
    """Sends weights to one remote collector by RPC; without a collector, receives them in the collector's process.

    Args:
        collector_info: the worker, as its `WorkerInfo`, name or rank. Given alone, it is a process with a receiver.
        collector_rref: a reference to its collector.
        collector_class: the collector's class, whose ``update_policy_weights_`` is called with ``(rref, weights)``
            unless a weightsync receiver listens in that process.
        worker_rank: the worker's rank. It is not used as an address; if given, `receive_weights` returns the second
            generation's results.
        timeout: seconds that `send_weights` and `wait_ack` wait; default: `WEIGHTSYNC_TIMEOUT` or 60.
        strategy: how modules are extracted, and the format of weights returned.
        key: a secret shared with the other end: see `RPCWeightSyncScheme`.
    """

    _not_copied = (*TransportFacade._not_copied, "_presenter")

    def __init__(
        self,
        collector_info: Any = None,
        collector_rref: Any = None,
        collector_class: Any = None,
        worker_rank: int | None = None,
        *,
        timeout: float | Timeout | None = Timeout.DEFAULT,
        strategy: WeightStrategy | str = "state_dict",
        key: Secret | None = None,
    ) -> None:
        generation = Generation.A if worker_rank is None else Generation.B
        super().__init__(generation=generation, timeout=timeout, strategy=strategy)
        self._key = None if key is None else SharedKey.given(key)
        self._collector = Collector(collector_info, collector_rref, collector_class)

    def _reset(self) -> None:
        super()._reset()
        self._presenter = SharedPresenter()

    @property
    def collector(self) -> Collector:
        """How the worker is reached."""
        return self._collector

    def check_connection(self) -> bool:
        """Whether RPC is initialised in this process."""
        return is_initialised()

    @property
    def _receives(self) -> bool:  # type: ignore[override]
        return self._collector == Collector()

    def _create_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        if self._receives:
            raise ConfigurationError(
                f"{type(self).__name__} was given no collector: pass collector_info=, or collector_rref= with "
                "collector_class=. Nothing was sent."
            )
        return link_to(self._collector, model_id, peer, self._presenter, SharedKey.given(self._key))

    def listen(self, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Take each link by which a sender reaches us: see `TransportFacade.listen`."""
        return call_server_of(model_id).open(accept, SharedKey.given(self._key))
