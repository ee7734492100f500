"""`SharedMemTransport`: TorchRL's transport over shared memory."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from numbers import Integral
from typing import Any, Final

from tensordict import TensorDict

from weightsync.clock import Timeout, seconds
from weightsync.engine.arguments import worker_ids_of
from weightsync.engine.manual_ack import UPDATED
from weightsync.errors import ConfigurationError, StateError
from weightsync.options import OnFailure, switch
from weightsync.protocol.report import SyncReport
from weightsync.schemes.arguments import POLICY, UNSET, UnsetType, model_and_weights
from weightsync.schemes.facade_services import connection_of, torchrl_class
from weightsync.schemes.shared import require_registered, require_targets
from weightsync.torchrl.transports.mp import MPTransport
from weightsync.transports.base import Link
from weightsync.transports.pipe.connection import Channel
from weightsync.transports.pipe.link import PipeLink
from weightsync.weights.layout import extra_state_name
from weightsync.weights.packing import views
from weightsync.weights.reading import layout_of, ordered, read_weights
from weightsync.weights.strategy import WeightStrategy, refuse_misfit, strategy_of
from weightsync.weights.tensors import on_cpu

#: A send would fill the buffers only, and report no worker: those behind the pipes would get nothing.
_ONE_WAY: Final = (
    "A SharedMemTransport reaches its workers in one way, by register_pipe() or by register_weights(params_map=...): "
    "make another one for the other workers. Nothing has changed."
)


@torchrl_class
class SharedMemTransport(MPTransport):
    """Copy targets that hold the newest version, and workers that receive it over their pipes.

    Each send writes a registered buffer, even while a reader is using it: it is for your own use. The workers behind
    registered pipes do not read the buffer; they get each version in a separate slot of shared memory, and ack it.
    Without pipes a send only fills the buffer.

    Args:
        policy_weights: model id to a TensorDict or dict; models that are registered later are added to it.
        auto_register: whether a model that was not registered may be sent: it gets a buffer in shared memory.
        timeout: seconds that `send_weights`, `wait_ack` and `check_ack` wait; default: `WEIGHTSYNC_TIMEOUT` or 60.
        strategy: how modules are extracted.

    Raises:
        ConfigurationError: an argument has another type.
    """

    _not_copied = (*MPTransport._not_copied, "_init_queues")

    def __init__(
        self,
        policy_weights: MutableMapping[str, Any] | None = None,
        auto_register: bool = True,
        *,
        timeout: float | Timeout | None = Timeout.DEFAULT,
        strategy: WeightStrategy | str = "tensordict",
    ) -> None:
        super().__init__(None, strategy=strategy)
        seconds(timeout)
        self.timeout = timeout
        self._policy_weights: MutableMapping[str, Any] = (
            {} if policy_weights is None else require_targets(policy_weights)
        )
        #: Whether a model that was not registered may be sent.
        self.auto_register = switch(auto_register, "auto_register")
        self._pipes: list[Any] = []
        self._params_map: dict[int, Any] = {}
        self._per_worker = False

    def _reset(self) -> None:
        super()._reset()
        self._init_queues: Mapping[int, Any] = {}

    def register_pipe(self, pipe: Any) -> None:
        """Add a worker's pipe (in the trainer), or say which pipe to receive from (in a worker).

        A worker that joins after a send receives the latest version right after its handshake.

        Raises:
            ConfigurationError: it is not a duplex pipe, or is registered already; or there are buffers by worker.
        """
        pipe = connection_of(pipe)
        Channel.of(pipe)
        if self._params_map:
            raise ConfigurationError(_ONE_WAY)
        with self._lock:
            known = [id(each) for each in self._pipes]
            worker = known.index(id(pipe)) if id(pipe) in known else len(known)
            lacking = [sender for sender in self._senders.values() if worker not in sender.worker_ids]
            if worker == len(known):
                self._pipes.append(pipe)
            elif not lacking:  # as when an earlier call failed halfway
                raise ConfigurationError("This pipe is registered already: give one pipe per worker.")
            for sender in lacking:
                sender.add_worker(worker, pipe)

    def register_weights(
        self,
        model_id: Any = None,
        weights: Any = None,
        per_worker: bool = False,
        *,
        params_map: Mapping[int, Any] | None = None,
        init_queues: Mapping[int, Any] | None = None,
    ) -> None:
        """Register a copy target (generation A), or one per worker (generation B).

        Args:
            model_id: the model's id; B: the ``params_map``.
            weights: the TensorDict or dict to fill; B: the ``init_queues``.
            per_worker: B: whether workers may be sent different weights.
            params_map: B: worker id to a TensorDict.
            init_queues: B: worker id to the queue on which `setup_connection_and_weights_on_sender` puts the worker's
                buffer; none: nothing is put.

        Raises:
            ConfigurationError: neither form; or buffers by worker, and pipes are registered.
        """
        name = model_id if isinstance(model_id, str) else None
        maps = [each for each in (params_map, model_id) if each is not None and each is not name]
        if name is not None and weights is not None and not maps and init_queues is None:
            read_weights(weights)
            self._policy_weights[name] = weights
        elif name is None and len(maps) == 1 and isinstance(maps[0], Mapping) and None in (weights, init_queues):
            if self._pipes:
                raise ConfigurationError(_ONE_WAY)
            self._params_map, self._per_worker = dict(maps[0]), per_worker
            self._init_queues = dict(weights or init_queues or {})
        else:
            raise ConfigurationError(
                "register_weights() takes (model_id, weights), or (params_map, init_queues, per_worker)."
            )

    @property
    def unique_weights(self) -> list[Any]:
        """Generation B: the registered buffers, each once.

        Raises:
            StateError: `register_weights` was not called.
        """
        if not self._params_map:
            raise StateError(type(self).__name__, "uninitialized", "unique_weights", ["register_weights"])
        return list({id(weights): weights for weights in self._params_map.values()}.values())

    def setup_connection_and_weights_on_sender(self) -> None:
        """Generation B: put each worker's buffer on its queue.

        Raises:
            StateError: `register_weights` was not called.
        """
        self._require_queues("setup_connection_and_weights_on_sender")
        for worker_id, queue in self._init_queues.items():
            queue.put(self._params_map[worker_id])

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | str | None = None,
        timeout: float = 60.0,
    ) -> Any:
        """Generation B: take this worker's buffer from its queue, and apply it if a model and a strategy are given.

        Raises:
            StateError: `register_weights` was not called, or not for this worker.
            queue.Empty: none arrived in time.
        """
        self._require_queues("setup_connection_and_weights_on_receiver")
        if worker_idx is None or worker_idx not in self._init_queues:
            raise StateError(type(self).__name__, "without that worker", f"worker {worker_idx}", ["register_weights"])
        applying = None if strategy is None else strategy_of(strategy)
        found = self._init_queues[worker_idx].get(timeout=timeout)
        if model is not None and applying is not None:
            applying.apply_weights(model, found)
        return found

    def _require_queues(self, method: str) -> None:
        if not self._init_queues:
            raise StateError(type(self).__name__, "uninitialized", method, ["register_weights"])

    def send_weights(
        self,
        first: Any = UNSET,
        second: Any = UNSET,
        /,
        worker_ids: Sequence[int] | None = None,
        *,
        model_id: Any = UNSET,
        weights: Any = UNSET,
        timeout: float | Timeout | UnsetType | None = UNSET,
        on_failure: OnFailure | str = OnFailure.RAISE,
    ) -> SyncReport:
        """Fill the model's buffer, and send the weights to the workers behind registered pipes.

        Args:
            first: as for `TransportFacade.send_weights`.
            second: as there; generation B: ``worker_ids``.
            model_id: as there.
            weights: as there.
            worker_ids: generation B: the workers whose buffers are filled; only if each worker has its own.
            timeout: seconds; default: the transport's.
            on_failure: "raise", or "report".

        Raises:
            LayoutError: (a KeyError) the model is not registered and auto_register is off, or the weights do not fit
                a buffer. No buffer was changed, and nothing was sent.
            WeightSyncError: as for `TransportFacade.send_weights`.
        """
        if self._params_map:
            by_position = second is None or (isinstance(second, Sequence) and not isinstance(second, str))
            if by_position and worker_ids is None:
                second, worker_ids = UNSET, second
            return self._fill(model_and_weights(first, second, model_id, weights)[1], worker_ids)
        if worker_ids is not None:
            raise ConfigurationError("worker_ids needs one buffer per worker: register_weights(..., per_worker=True).")
        model_id, weights = self._registered(first, second, model_id, weights)
        if not self._pipes:
            return self._fill_without_sending(model_id, weights)
        return super().send_weights(model_id, weights, timeout=timeout, on_failure=on_failure)

    def send_weights_async(
        self, first: Any = UNSET, second: Any = UNSET, /, *, model_id: Any = UNSET, weights: Any = UNSET
    ) -> SyncReport:
        """Fill the model's buffer, and begin to send: see `send_weights` and `TransportFacade.send_weights_async`."""
        if self._params_map:
            return self._fill(model_and_weights(first, second, model_id, weights)[1], None)
        model_id, weights = self._registered(first, second, model_id, weights)
        if not self._pipes:
            return self._fill_without_sending(model_id, weights)
        return super().send_weights_async(model_id, weights)

    def _registered(self, *arguments: Any) -> tuple[str, Any]:
        """The model's id and weights, if it may be sent."""
        model_id, weights = model_and_weights(*arguments)
        if not self.auto_register:
            require_registered(model_id, self._policy_weights)
        return model_id, self._services.prepare_weights(weights, model_id, self._services.strategy)

    def _fill_without_sending(self, model_id: str, weights: Any) -> SyncReport:
        with self._lock:
            self._require_open("send_weights")
            self._published(model_id, weights)
        return _nobody(model_id)

    def _fill(self, weights: Any, worker_ids: Sequence[int] | None) -> SyncReport:
        """Generation B: write the buffers in place; a dict by worker id has weights for each.

        Raises LayoutError: some weights do not fit a buffer. Nothing was written.
        """
        if isinstance(weights, dict) and weights and all(isinstance(key, Integral) for key in weights):
            for worker_id in weights:
                self._require_buffers([worker_id])
            fills = [(self._params_map[worker_id], own) for worker_id, own in weights.items()]
        else:
            ids = worker_ids_of(worker_ids)
            if ids is not None:
                self._require_buffers(ids)
            chosen = self._params_map if ids is None else {id_: self._params_map[id_] for id_ in ids}
            fills = [(target, weights) for target in {id(target): target for target in chosen.values()}.values()]
        strategy = self._services.strategy
        with self._lock:
            self._require_open("send_weights")
            if len(fills) > 1 and type(strategy) is WeightStrategy:  # others may rename
                for target, own in fills:
                    refuse_misfit(target, own)
            for target, own in fills:
                strategy.apply_weights(target, own)
        return _nobody(POLICY)

    def _require_buffers(self, worker_ids: Sequence[int]) -> None:
        """Refuse a write to workers without a buffer of their own. Raises ConfigurationError: nothing was written."""
        unknown = [worker_id for worker_id in worker_ids if worker_id not in self._params_map]
        if unknown and self._per_worker:
            raise ConfigurationError(
                f"No buffer is registered for workers {unknown}: known are {sorted(self._params_map)}. Nothing was "
                "written."
            )
        others = [buffer for worker_id, buffer in self._params_map.items() if worker_id not in worker_ids]
        if not self._per_worker or any(self._params_map[each] is buffer for each in worker_ids for buffer in others):
            raise ConfigurationError(
                f"The workers share their buffers: a send to {list(worker_ids)} would also change others. Register "
                "a buffer for each, with per_worker=True. Nothing was written."
            )

    def _published(self, model_id: str, weights: Any) -> None:
        """Copy a version into the model's buffer; make one if it has none. Raises LayoutError: it does not fit."""
        if model_id in self._policy_weights:
            self._services.strategy.apply_weights(self._policy_weights[model_id], weights)
        else:
            self._policy_weights[model_id] = shared_copy(weights)

    def receive_weights(
        self,
        timeout: float | UnsetType | None = UNSET,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | str | None = None,
    ) -> Any:
        """The weights of the next update: see `TransportFacade.receive_weights`.

        Without a pipe nothing arrives: then, if all three are given, it applies ``weights``, a shared buffer, to the
        model and returns them; else it returns None.
        """
        if self._pipes:
            return super().receive_weights(timeout, weights=weights, model=model, strategy=strategy)
        if weights is None or model is None or strategy is None:
            return None
        strategy_of(strategy).apply_weights(model, weights)
        return weights

    def send_ack(self, message: str = UPDATED) -> None:
        """Ack the update that was received last: see `TransportFacade.send_ack`. Without a pipe, do nothing."""
        if self._pipes:
            super().send_ack(message)

    def check_ack(self, message: str = UPDATED) -> SyncReport:
        """Wait for the ack: see `TransportFacade.check_ack`. Without a pipe there is none: the report is empty."""
        return super().check_ack(message) if self._pipes else _nobody(POLICY)

    def check_connection(self) -> bool:
        """Whether all registered pipes are open."""
        return not any(pipe.closed for pipe in self._pipes)

    def _endpoints(self) -> Mapping[int, Any]:
        return dict(enumerate(self._pipes))

    def _create_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        return PipeLink(endpoint, model_id, peer=peer)

    def pipe_end(self) -> Any:
        """Our end of the one pipe that is registered.

        Raises:
            ConfigurationError: no pipe is registered, or several are.
        """
        if len(self._pipes) != 1:
            raise ConfigurationError(
                f"SharedMemTransport receives over one pipe, but {len(self._pipes)} are registered: call "
                "register_pipe() with this worker's end."
            )
        return self._pipes[0]


def _nobody(model_id: str) -> SyncReport:
    """The report of a send that reaches only buffers."""
    return SyncReport(model_id=model_id, version=None, incarnation=0, outcomes={})


def shared_copy(weights: Any) -> TensorDict:
    """A copy of weights in one block of shared memory (one descriptor for all tensors).

    Raises:
        ConfigurationError, LayoutError: they cannot be sent.
    """
    weights_read = read_weights(weights)
    layout = layout_of(weights_read)
    flat = on_cpu(layout.nbytes)
    flat.share_memory_()  # type: ignore[no-untyped-call]
    tensors = {entry.name: view for entry, view in zip(layout.entries, views(layout, flat), strict=True)}
    for tensor, source in zip(tensors.values(), ordered(weights_read, layout), strict=True):
        tensor.copy_(source.detach())
    extras = {extra_state_name(module): value for module, value in weights_read.extras().items()}
    copied: TensorDict = WeightStrategy("tensordict").extract_weights({**tensors, **extras})
    return copied
