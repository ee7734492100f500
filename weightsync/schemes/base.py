"""`WeightSyncScheme`: what all schemes share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import torch.nn

from weightsync.engine.copies import expected_number, is_clean, require_name, require_whole
from weightsync.engine.receiver import WeightReceiver
from weightsync.engine.sender import WeightSender
from weightsync.errors import StateError
from weightsync.options import Verify, option
from weightsync.schemes.registry import WeightSyncBackend, scheme_of
from weightsync.schemes.sources import checked, given_or_found, model_for_worker, processes_of, weights_of
from weightsync.schemes.wired import Wired
from weightsync.schemes.worker_set import Fleet, fleet, has_factories
from weightsync.transports.process import forget_after_fork
from weightsync.weights.context import held
from weightsync.weights.meta_device import fill_in
from weightsync.weights.strategy import WeightStrategy

#: The base, and what schemes read their arguments with.
__all__ = ["WeightSyncScheme", "checked", "given_or_found"]


class WeightSyncScheme(Wired):
    """One model across all workers: makes the sender in the trainer and the receivers in the workers.

    Both generations of TorchRL's API: `get_sender` and `get_receiver` give the objects of the first; `connect`, `send`
    and `receive` of the scheme itself are the second's. A pickled, copied or forked scheme carries its configuration
    only; each side is initialised once.

    Args:
        strategy: "state_dict" or "tensordict", or a `WeightStrategy`.
        verify: "digest" (default): a receiver compares the digest of what arrived before it applies it; "layout":
            names, shapes, dtypes and length only.
    """

    def __init__(self, strategy: WeightStrategy | str = "state_dict", *, verify: Verify | str = Verify.DIGEST) -> None:
        self._verify = option(Verify, verify)
        self._strategy = strategy if isinstance(strategy, WeightStrategy) else WeightStrategy(strategy)
        self._begin()

    def _begin(self) -> None:
        self._sender: WeightSender | None = None
        self._receiver: WeightReceiver | None = None
        self._context: Callable[[], Any] = held(None)
        self._given: Mapping[str, Any] = {}
        self._fleet = Fleet()
        self._start_over()
        forget_after_fork(self)

    @classmethod
    def from_backend(cls, backend: WeightSyncBackend | str, **kwargs: Any) -> WeightSyncScheme:
        """Make the scheme of a backend.

        Args:
            backend: "none" (or "direct"), "shared" (or "thread"), "process" (or "multiprocessing"), "distributed",
                "rpc", "ray", or a name given to `register_weight_sync_backend`.
            **kwargs: for its constructor.

        Raises:
            ConfigurationError: there is no such backend.
            MissingExtraError: (an ImportError) its optional package is not installed.
        """
        scheme: WeightSyncScheme = scheme_of(backend)(**kwargs)
        return scheme

    # ----------------------------------------------------------------------------------------- the sides

    def init_on_sender(self, model_id: str = "policy", context: Any = None, **kwargs: Any) -> None:
        """Make the sender and put the workers on its roll. Never waits.

        The links are laid here, or at `connect` where the scheme makes them itself.

        Args:
            model_id: the name of the model, the same on both sides; may be a path on the context.
            context: gives what is not given by keyword, from attributes of the same names, and the model by
                ``.get_model(model_id)`` or ``.get_cached_weights(model_id)``. Held weakly.
            **kwargs: how the workers are reached (see the scheme's own page); ``num_workers``, or what says it:
                ``params_map`` (worker id to its weights), ``devices`` (one a worker), ``device_map_fn(worker_idx,
                weights)`` with ``num_workers``; ``model``, ``weights``, ``source_model``, ``cached_weights``: what a
                send without weights means; ``ctx``, a multiprocessing context; ``fence`` (the incarnation to rise
                above, after `WorkerLostError.fence`); ``expected_workers``: how many workers a send needs on the roll,
                at least.

        Raises:
            StateError: initialised already.
            ConfigurationError: something is missing, unknown or contradictory.
        """
        if self._sender is not None:
            raise StateError("scheme", "initialised on the sender", "init_on_sender", ["get_sender", "close"])
        require_name(model_id, "model_id")
        given = checked(kwargs, (*self._sender_arguments, *_ALWAYS_ON_SENDER), "init_on_sender")
        fence = given.get("fence")
        if fence is not None:
            require_whole(fence, "fence", "the incarnation to rise above, as WorkerLostError.fence says it")
        expected = expected_number(given.get("expected_workers"))
        workers = fleet(given, context, self._strategy)
        given = workers.counted(given)
        endpoints = self._endpoints(given, context, model_id)
        processes = processes_of(given.get("processes"), endpoints)
        sender = self.create_sender()
        self.per_worker_weights = self.per_worker_weights or has_factories(context)
        self._given, self._context, self._fleet = given, held(context), workers
        sender.set_context(context, model_id)
        for worker_id, endpoint in endpoints.items():
            sender.add_worker(worker_id, endpoint, process=processes.get(worker_id))
        if not self._lays_links_at_connect(given, context):
            sender.connect(fence=fence)
        sender.expected_workers = expected
        self._sender = sender

    def init_on_worker(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Make the receiver and listen for the sender. Never waits for it.

        Args:
            model_id: the name of the model, the same on both sides. Without a model it is resolved on the context when
                the first weights are received.
            context: gives what is not given by keyword, from attributes of the same names, and the model by
                ``.get_model(model_id)``. Held weakly.
            **kwargs: how the sender reaches us (see the scheme's own page), ``model``, ``worker_idx``.

        Raises:
            StateError: initialised already.
            ConfigurationError: something is missing or unknown, or there is neither a model nor a context.
        """
        if self._receiver is not None:
            raise StateError("scheme", "initialised on the worker", "init_on_worker", ["get_receiver", "close"])
        require_name(model_id, "model_id")
        given = checked(kwargs, (*self._worker_arguments, *_ALWAYS_ON_WORKER), "init_on_worker")
        endpoint = self._endpoint(given, context, model_id)
        model = self._worker_model(given, context, model_id)
        receiver = self.create_receiver()
        receiver.set_context(context, model_id)
        receiver.register_model(weights_of(model))
        receiver.register_worker_transport(endpoint)
        self._arrive(given, context)
        self._receiver = receiver

    #: What `init_on_sender` and `init_on_worker` take by keyword besides what all schemes do.
    _sender_arguments: tuple[str, ...] = ()
    _worker_arguments: tuple[str, ...] = ()

    def _endpoints(self, given: Mapping[str, Any], context: Any, model_id: str) -> Mapping[int, Any]:
        """How each worker is reached: worker id to what `lay_link` takes.

        Raises:
            ConfigurationError: it is not said, or is contradictory. No link has been laid.
        """
        raise NotImplementedError(
            f"{type(self).__name__} overrides no init_on_sender(): do so, or use create_sender() and add_worker()."
        )

    def _endpoint(self, given: Mapping[str, Any], context: Any, model_id: str) -> Any:
        """How the sender reaches us: what `listen` takes.

        Raises:
            ConfigurationError: it is not said.
        """
        raise NotImplementedError(
            f"{type(self).__name__} overrides no init_on_worker(): do so, or use create_receiver() and "
            "register_worker_transport()."
        )

    def _worker_model(self, given: Mapping[str, Any], context: Any, model_id: str) -> Any:
        """What the weights are applied to: a model, or a path on the context."""
        return model_for_worker(given, context, model_id)

    def _lays_links_at_connect(self, given: Mapping[str, Any], context: Any) -> bool:
        """Whether the handshake is left where the worker finds it at `connect`, not at `init_on_sender`."""
        return False

    def init_on_receiver(self, *, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Make the receiver and listen for the sender: `init_on_worker` in the second generation's words.

        Args:
            model_id: the name of the model, the same on both sides.
            context: as for `init_on_worker`; ``context.worker_idx`` is read too.
            **kwargs: ``worker_idx`` (this worker's id), ``model``, and how the sender reaches us. A model on the meta
                device, as TorchRL's collectors give it, gets memory on the CPU, and its first values at `connect`.

        Raises:
            StateError, ConfigurationError: as `init_on_worker`.
            LayoutError: a buffer on the meta device that no weights bring.
        """
        model = kwargs.get("model")
        blank = isinstance(model, torch.nn.Module) and fill_in(model)
        self.init_on_worker(model_id, context, **kwargs)
        self._blank = blank

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not is_clean(error):
            self._fail(error)
        self.close()

    # --------------------------------------------------------------------------------------------- copies

    def _copy_uninitialized(self) -> Self:
        """A copy, which carries the configuration only: TorchRL's name of `copy.copy`."""
        return copy.copy(self)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for live in (*_LIVE, *self._left_behind):
            del state[live]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def forget(self) -> None:
        """Become a copy: called in a forked child."""
        self._begin()


_LIVE = ("_sender", "_receiver", "_context", "_given", "_fleet")
_ALWAYS_ON_SENDER = (
    *("num_workers", "model", "source_model", "cached_weights", "fence", "expected_workers"),
    *("weights", "params_map", "devices", "device_map_fn", "ctx"),
)
_ALWAYS_ON_WORKER = ("model", "worker_idx")
