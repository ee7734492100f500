"""`WeightSyncScheme`: what all schemes share."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch.nn

from weightsync.context import MISSING, held, optional
from weightsync.driving.packing import Packer
from weightsync.errors import ConfigurationError, ModelPathError, StateError
from weightsync.options import Verify, option
from weightsync.paths import _resolve_model
from weightsync.receiver import WeightReceiver
from weightsync.sender import WeightSender
from weightsync.strategy import WeightStrategy
from weightsync.target import Mode
from weightsync.transports.base import Link
from weightsync.transports.fork import forget_after_fork
from weightsync.transports.user import UserMessages


class WeightSyncScheme(abc.ABC):
    """One model across all workers: makes the sender in the trainer and the receivers in the workers.

    A pickled, copied or forked scheme carries its configuration only; each side is initialised once.

    Args:
        strategy: "state_dict" or "tensordict", or a `WeightStrategy`.
        verify: "digest" (default): a receiver compares the digest of what arrived before it applies it; "layout":
            names, shapes, dtypes and length only.
    """

    #: How arrived weights become live.
    apply_mode = Mode.COPY

    def __init__(self, strategy: WeightStrategy | str = "state_dict", *, verify: Verify | str = Verify.DIGEST) -> None:
        self._verify = option(Verify, verify)
        self._strategy = strategy if isinstance(strategy, WeightStrategy) else WeightStrategy(strategy)
        self._begin()

    def _begin(self) -> None:
        self._sender: WeightSender | None = None
        self._receiver: WeightReceiver | None = None
        self._context: Callable[[], Any] = held(None)
        self._given: Mapping[str, Any] = {}
        forget_after_fork(self)

    # ----------------------------------------------------------------------------------------- the sides

    def init_on_sender(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Make the sender, put the workers on its roll (ids 0, 1, ...) and lay the links. Never waits.

        Args:
            model_id: the name of the model, the same on both sides; may be a path on the context.
            context: gives what is not given by keyword, from attributes of the same names, and the model by
                ``.get_model(model_id)`` or ``.get_cached_weights(model_id)``. Held weakly.
            **kwargs: how the workers are reached (see the scheme's own page), ``num_workers``, ``model``,
                ``source_model``, ``cached_weights``, ``fence`` (the incarnation to rise above, after
                `WorkerLostError.fence`).

        Raises:
            StateError: initialised already.
            ConfigurationError: something is missing, unknown or contradictory.
        """
        if self._sender is not None:
            raise StateError("scheme", "initialised on the sender", "init_on_sender", ["get_sender", "close"])
        given = checked(kwargs, (*self._sender_arguments, *_ALWAYS_ON_SENDER), "init_on_sender")
        endpoints = self._endpoints(given, context, model_id)
        sender = self.create_sender()
        self._given, self._context = given, held(context)
        sender.set_context(context, model_id)
        for worker_id, endpoint in endpoints.items():
            sender.add_worker(worker_id, endpoint)
        sender.connect(fence=given.get("fence"))
        self._sender = sender

    def init_on_worker(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Make the receiver and listen for the sender. Never waits for it.

        Args:
            model_id: the name of the model, the same on both sides. Without a model it is resolved on the context when
                the first weights are received.
            context: gives what is not given by keyword, from attributes of the same names, and the model by
                ``.get_model(model_id)``. Held weakly.
            **kwargs: how the sender reaches us (see the scheme's own page), ``model``.

        Raises:
            StateError: initialised already.
            ConfigurationError: something is missing or unknown, or there is neither a model nor a context.
        """
        if self._receiver is not None:
            raise StateError("scheme", "initialised on the worker", "init_on_worker", ["get_receiver", "close"])
        given = checked(kwargs, (*self._worker_arguments, "model"), "init_on_worker")
        endpoint = self._endpoint(given, context, model_id)
        receiver = self.create_receiver()
        receiver.set_context(context, model_id)
        receiver.register_model(self._worker_model(given, context, model_id))
        receiver.register_worker_transport(endpoint)
        self._receiver = receiver

    #: What `init_on_sender` and `init_on_worker` take by keyword besides what all schemes do.
    _sender_arguments: tuple[str, ...] = ()
    _worker_arguments: tuple[str, ...] = ()

    def _endpoints(self, given: Mapping[str, Any], context: Any, model_id: str) -> Mapping[int, Any]:
        """How each worker is reached: worker id to what `lay_link` takes.

        Raises:
            ConfigurationError: it is not said, or is contradictory. No link has been laid.
        """
        raise NotImplementedError(f"{type(self).__name__} overrides no init_on_sender().")

    def _endpoint(self, given: Mapping[str, Any], context: Any, model_id: str) -> Any:
        """How the sender reaches us: what `listen` takes.

        Raises:
            ConfigurationError: it is not said.
        """
        raise NotImplementedError(f"{type(self).__name__} overrides no init_on_worker().")

    def _worker_model(self, given: Mapping[str, Any], context: Any, model_id: str) -> Any:
        """What the weights are applied to: a model, or a path on the context."""
        if "model" in given:
            return given["model"]
        get_model = optional(context, "get_model")
        found = MISSING if get_model is MISSING else get_model(model_id)
        if found is not None and found is not MISSING:
            return found
        if context is None:
            raise ConfigurationError("init_on_worker() needs model=, or a context on which model_id is resolved.")
        return model_id

    def get_sender(self) -> WeightSender:
        """The sender.

        Raises:
            StateError: `init_on_sender` was not called in this process.
        """
        if self._sender is None:
            raise StateError("scheme", "uninitialized on the sender", "get_sender", ["init_on_sender"])
        return self._sender

    def get_receiver(self) -> WeightReceiver:
        """The receiver.

        Raises:
            StateError: `init_on_worker` was not called in this process.
        """
        if self._receiver is None:
            raise StateError("scheme", "uninitialized on the worker", "get_receiver", ["init_on_worker"])
        return self._receiver

    def close(self) -> None:
        """Close whichever sides were initialised."""
        for side in (self._sender, self._receiver):
            if side is not None:
                side.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------- the low level

    @abc.abstractmethod
    def create_transport(self, pipe_or_context: Any) -> Any:
        """A link to one worker, or to the sender."""

    def create_sender(self) -> WeightSender:
        """A sender without workers: `register_worker` wires it."""
        return WeightSender(self)

    def create_receiver(self) -> WeightReceiver:
        """A receiver without a link: `register_model` and `register_worker_transport` wire it."""
        return WeightReceiver(self)

    # ------------------------------------------------------------------------------ for sender and receiver

    @property
    def strategy(self) -> WeightStrategy:
        """How weights are taken from a model; equals and hashes like its name."""
        return self._strategy

    @property
    def packer(self) -> Packer:
        """A new packer with buffers of the kind that this scheme's links carry best."""
        return Packer(self._verify)

    @abc.abstractmethod
    def lay_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        """A link over ``endpoint`` for one model; ``peer`` says who is at the other end, for messages to people."""

    def listen(self, endpoint: Any, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Give ``accept`` the links by which senders reach us at ``endpoint``; here there is just one, at once.

        Raises:
            ConfigurationError: no link can be made of the endpoint.
        """
        accept(self.lay_link(endpoint, model_id, "the sender"))
        return _nothing

    def user_messages(self, endpoint: Any) -> UserMessages:
        """The user's own messages on the pipe behind ``endpoint``.

        Raises:
            ConfigurationError: this scheme has no pipes.
        """
        raise ConfigurationError(f"{type(self).__name__} has no pipes that could carry messages of your own.")

    def published(self, model_id: str, weights: Any) -> None:
        """Called with each version's weights before it is dispatched; keeps nothing of them."""
        return

    def prepare_weights(self, weights: Any, model_id: str, strategy: WeightStrategy, context: Any = None) -> Any:
        """The weights that a send means.

        Args:
            weights: None: the cached weights, else the model found by `get_model`, the path ``model_id`` on the
                context, its fallback policy, or the model given at init, in this order. A module is extracted; a str is
                a path on the context; anything else is taken as it is.
            model_id: the model that is sent.
            strategy: how a module's weights are extracted.
            context: where models are found; None: the one given at init.

        Raises:
            ConfigurationError: None was given and no model is found.
            ModelPathError: a path does not resolve.
        """
        found = weights
        if weights is None or isinstance(weights, str):
            context = context if context is not None else self._context()
            found = self._registered(model_id, context) if weights is None else _resolve_model(context, weights)
        return strategy.extract_weights(found) if isinstance(found, torch.nn.Module) else found

    def _registered(self, model_id: str, context: Any) -> Any:
        for source in _SOURCES:
            found = source(self._given, context, model_id)
            if found is not None and found is not MISSING:
                return found
        raise ConfigurationError(
            f"send() was given no weights and no model is registered for {model_id!r}: pass weights, or give "
            "init_on_sender() model=, source_model=, cached_weights= or a context that has the model. Nothing was sent."
        )

    # --------------------------------------------------------------------------------------------- copies

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for live in ("_sender", "_receiver", "_context", "_given"):
            del state[live]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def forget(self) -> None:
        """Become a copy: called in a forked child."""
        self._begin()


_ALWAYS_ON_SENDER = ("num_workers", "model", "source_model", "cached_weights", "fence")


def checked(kwargs: Mapping[str, Any], allowed: Sequence[str], where: str) -> dict[str, Any]:
    """What was given by keyword, without what is None.

    Raises:
        ConfigurationError: a keyword that ``where`` does not take.
    """
    unknown = sorted(set(kwargs) - set(allowed))
    if unknown:
        raise ConfigurationError(f"{where}() takes no {', '.join(unknown)}; it takes {', '.join(allowed)}.")
    return {name: value for name, value in kwargs.items() if value is not None}


def given_or_found(given: Mapping[str, Any], context: Any, name: str) -> Any:
    """What was given by keyword, else the context's attribute of that name; None: neither."""
    found = given[name] if name in given else optional(context, name)
    return None if found is MISSING else found


def _nothing() -> None:
    return None


def _cached(given: Mapping[str, Any], context: Any, model_id: str) -> Any:
    if given.get("cached_weights") is not None:
        return given["cached_weights"]
    get = optional(context, "get_cached_weights")
    return MISSING if get is MISSING else get(model_id)


def _from_get_model(given: Mapping[str, Any], context: Any, model_id: str) -> Any:
    get = optional(context, "get_model")
    return MISSING if get is MISSING else get(model_id)


def _from_path(given: Mapping[str, Any], context: Any, model_id: str) -> Any:
    if context is None:
        return MISSING
    try:
        return _resolve_model(context, model_id)
    except ModelPathError:
        return MISSING


def _fallback(given: Mapping[str, Any], context: Any, model_id: str) -> Any:
    return optional(context, "_fallback_policy") if model_id == "policy" else MISSING


def _at_init(given: Mapping[str, Any], context: Any, model_id: str) -> Any:
    model = given.get("model")
    return given.get("source_model") if model is None else model


_SOURCES = (_cached, _from_get_model, _from_path, _fallback, _at_init)
