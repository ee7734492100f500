"""`DistributedTransport`: TorchRL's transport over a TCPStore."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch.distributed as dist

from weightsync.clock import Deadline, Timeout
from weightsync.errors import ConfigurationError
from weightsync.keys import Secret, SharedKey
from weightsync.schemes.arguments import POLICY, UNSET, Generation, UnsetType
from weightsync.schemes.distributed import IN_FLIGHT
from weightsync.schemes.facade_services import torchrl_class
from weightsync.torchrl.transports.facade import TransportFacade
from weightsync.transports.base import Link
from weightsync.transports.store import StoreEndpoint, listen, sender_link
from weightsync.transports.store.store import HINT, Hints
from weightsync.weights.strategy import WeightStrategy

#: Seconds between two checks for an instruction of another kind, in an endless wait.
_LOOK_SECONDS: Final = 1.0


@torchrl_class
class DistributedTransport(TransportFacade):
    """One trainer and one worker, with their rendezvous at a TCPStore.

    ``weights_buffer`` makes it generation B's: `receive_weights` then writes the weights into that buffer and returns
    it, not ``("policy", weights)``. TorchRL's store keys ``NODE_{rank}_in`` and ``NODE_{rank}_out`` are written as
    hints for loops that wait on them; the protocol does not use them.

    Args:
        store: a TCPStore, or a PrefixStore around one.
        rank: the worker's rank, at both ends: worker i is rank i + 1.
        sync: whether NCCL sends a payload's buckets one after another; if not, up to four are in flight at once.
        weights_buffer: a TensorDict or dict that receives the weights.
        backend: "gloo" or "nccl"; the first send or receive refuses another.
        key: a secret shared with the other end: see `DistributedWeightSyncScheme`.
        timeout: seconds that `send_weights` and `wait_ack` wait; default: `WEIGHTSYNC_TIMEOUT` or 60.
    """

    def __init__(
        self,
        store: Any = None,
        rank: int | None = None,
        sync: bool = True,
        *,
        weights_buffer: Any = UNSET,
        backend: str = "gloo",
        key: Secret | None = None,
        timeout: float | Timeout | None = Timeout.DEFAULT,
    ) -> None:
        super().__init__(generation=Generation.A if weights_buffer is UNSET else Generation.B, timeout=timeout)
        self.store = store
        self.rank = rank
        self.sync = sync
        self._buffer = None if weights_buffer is UNSET else weights_buffer
        self._backend = backend
        self._key = None if key is None else SharedKey.given(key)

    _not_copied = (*TransportFacade._not_copied, "_hints")

    def _reset(self) -> None:
        super()._reset()
        self._hints = Hints()

    def _store_endpoint(self) -> StoreEndpoint:
        if self.store is None or self.rank is None:
            raise ConfigurationError(
                "DistributedTransport was given no store or no rank: it reaches no worker. Nothing was sent."
            )
        in_flight = 1 if self.sync else IN_FLIGHT
        return StoreEndpoint(self.store, self.rank, self._backend, in_flight, SharedKey.given(self._key), self._hints)

    def _endpoints(self) -> Mapping[int, Any]:
        end = self._store_endpoint()
        return {end.rank - 1: end}

    def _create_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        return sender_link(endpoint, model_id, peer)

    def listen(self, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Take each link by which a sender reaches us: see `TransportFacade.listen`."""
        return listen(self._store_endpoint(), model_id, accept)

    def check_connection(self) -> bool:
        """Whether the user's own process group is initialised. This transport does not need one."""
        return dist.is_initialized()

    def receive_weights(
        self,
        timeout: float | UnsetType | None = UNSET,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | str | None = None,
    ) -> Any:
        """The weights of the next update, which stays pending until `send_ack`: see `TransportFacade.receive_weights`.

        Returns:
            Generation A: ``("policy", weights)``; B: the destination of the weights: ``weights``, else the transport's
            ``weights_buffer``, else fresh tensors. None: no weights arrived in time.

        Raises:
            ConfigurationError: (a ValueError) generation A: the store's instruction for this rank is not
                "update_weights"; it was removed from the store.
            StateError, LayoutError, TransportError: as there.
        """
        destination = weights if weights is not None else self._buffer
        wait = self._default_wait() if isinstance(timeout, UnsetType) else timeout
        if self._generation is Generation.A:
            self._refuse_other_instruction()
        deadline = Deadline(wait)
        while True:
            received = super().receive_weights(
                _slice(deadline.remaining), weights=destination, model=model, strategy=strategy
            )
            if received is not None:
                return received if destination is None or self._generation is Generation.A else destination
            if self._generation is Generation.A:
                self._refuse_other_instruction()
            if deadline.passed:
                return None

    def _refuse_other_instruction(self) -> None:
        store, key = self._store_endpoint().store, f"NODE_{self.rank}_in"
        if not store.check([key]):
            return
        instruction = store.get(key)
        store.delete_key(key)
        if instruction != HINT.encode():
            raise ConfigurationError(
                f"the store's instruction for rank {self.rank} is {instruction!r}, which is not {HINT!r}: it was "
                "removed from the store, and no weights were received."
            )

    def send_initial_weights(self, weights: Any) -> Any:
        """Send the first weights of "policy", as `send_weights` does, but without writing TorchRL's own keys."""
        with self._hints.withheld():
            return self.send_weights(POLICY, weights)

    def receive_initial_weights(self) -> Any:
        """Wait for the first weights, and ack them. TorchRL's own keys are neither read nor written.

        Returns:
            The weights; in generation B the destination that they were received into, as in `receive_weights`.

        Raises:
            WeightSyncError: as for `receive_weights`.
        """
        received = super().receive_weights(None, weights=self._buffer)
        with self._hints.withheld():
            self.send_ack()
        if self._buffer is not None:
            return self._buffer
        return received[1] if self._generation is Generation.A else received

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # A store is pickled as its address.
        state["store"] = None if self.store is None else StoreEndpoint(self.store, self.rank or 1)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        end = state["store"]
        super().__setstate__({**state, "store": None if end is None else end.store})


def _slice(remaining: float | None) -> float:
    return _LOOK_SECONDS if remaining is None else min(remaining, _LOOK_SECONDS)
