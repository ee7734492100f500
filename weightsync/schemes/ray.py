"""`RayWeightSyncScheme`: workers are Ray actors."""

from __future__ import annotations

import enum
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy
import torch

from weightsync.context import MISSING, optional
from weightsync.errors import ConfigurationError, MissingExtraError, ModelPathError
from weightsync.layout import Layout
from weightsync.messages import Update
from weightsync.options import Verify, option
from weightsync.paths import _resolve_model
from weightsync.presenting import present
from weightsync.receiver import WeightReceiver
from weightsync.schemes.base import WeightSyncScheme, given_or_found
from weightsync.schemes.ray_desk import Desk, desk_of
from weightsync.strategy import WeightStrategy
from weightsync.transports.base import Link
from weightsync.transports.calls import CallLink
from weightsync.transports.ray import ActorCourier, PlainCourier, Rows, Shelf
from weightsync.transports.ray_session import require_ray

#: The method of a `WeightSyncActor` that senders call.
CALL: Final = "_weightsync_call"
#: The methods of plain actors that are known, and the name under which each takes the weights.
METHODS: Final = {
    "update_policy_weights_": "policy_or_weights",
    "_update_weights_tensordict": "params",
    "_update_weights_state_dict": "state_dict",
}


class TensorTransport(enum.Enum):
    """How Ray moves a payload."""

    #: Through its object store: one copy a node, read in place.
    OBJECT_STORE = "object_store"
    #: By NIXL, from memory to memory.
    NIXL = "nixl"


class Backend(enum.Enum):
    """TorchRL's name for the process group beside Ray. Ours needs none: accepted, and without effect."""

    GLOO = "gloo"
    NCCL = "nccl"


class RayWeightSyncScheme(WeightSyncScheme):
    """Workers are Ray actors. Each version is put into Ray's object store once, and read from there by all.

    Actors of a class that derives from `WeightSyncActor` answer for each version (evidence ``answer``). Plain actors
    with a method ``update_policy_weights_(policy_or_weights=)``, ``_update_weights_tensordict(params=)`` or
    ``_update_weights_state_dict(state_dict=)`` work as they are: of those it is known that the call returned, no more
    (evidence ``call``).

    Args:
        strategy: "state_dict" (default) or "tensordict", or a `WeightStrategy`: the format that plain actors get, too.
        backend: "gloo" or "nccl", as TorchRL has it; weights travel through Ray, so it changes nothing.
        verify: "digest" or "layout": see `WeightSyncScheme`.
        tensor_transport: "object_store" (default), or "nixl": needs the package of that name.

    Raises:
        MissingExtraError: ``tensor_transport="nixl"`` without what it needs.
    """

    _sender_arguments = ("remote_collectors", "actor_refs", "actors", "num_collectors")
    _worker_arguments = ("actor_ref",)

    def __init__(
        self,
        strategy: WeightStrategy | str = "state_dict",
        backend: Backend | str = Backend.GLOO,
        *,
        verify: Verify | str = Verify.DIGEST,
        tensor_transport: TensorTransport | str = TensorTransport.OBJECT_STORE,
    ) -> None:
        self._backend = option(Backend, backend)
        self._tensor_transport = option(TensorTransport, tensor_transport)
        if self._tensor_transport is TensorTransport.NIXL:
            require_nixl()
        super().__init__(strategy, verify=verify)

    def _begin(self) -> None:
        super()._begin()
        self._flat, self._plain = rows(self._tensor_transport, self.strategy)

    # ---------------------------------------------------------------------------------------- the sender

    def _endpoints(self, given: Mapping[str, Any], context: Any, model_id: str) -> Mapping[int, Any]:
        """One actor a worker, from ``remote_collectors=``, ``actor_refs=`` or ``actors=``, or the context's."""
        require_ray(type(self).__name__)
        actors = self._actors(given, context)
        for name in ("num_collectors", "num_workers"):
            count = given_or_found(given, context, name)
            if count not in (None, len(actors)):
                raise ConfigurationError(f"{name} is {count}, but there are {len(actors)} actors: give one a worker.")
        for worker_id, actor in enumerate(actors):
            called_by(actor, self.strategy, f"worker {worker_id}")
        return dict(enumerate(actors))

    def _actors(self, given: Mapping[str, Any], context: Any) -> list[Any]:
        for name in ("remote_collectors", "actor_refs", "actors"):
            actors = given_or_found(given, context, name)
            if actors is not None:
                return list(actors) if isinstance(actors, Iterable) else [actors]
        raise ConfigurationError(
            "init_on_sender() needs remote_collectors= or actor_refs=, or a context that has them: one Ray actor a "
            "worker."
        )

    def lay_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        """A link to an actor, given as its handle or as an object whose ``._actor`` is that.

        Raises:
            MissingExtraError: Ray is not installed.
            ConfigurationError: the actor has none of the methods that take weights.
        """
        require_ray(type(self).__name__)
        name, method = called_by(endpoint, self.strategy, peer)
        if name == CALL:
            return CallLink(ActorCourier(method, model_id, peer, self._flat), peer)
        return CallLink(PlainCourier(calling(name, method), peer, self._plain), peer)

    # ---------------------------------------------------------------------------------------- the worker

    def init_on_worker(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Make the receiver in an actor: see `WeightSyncScheme.init_on_worker`.

        The actor's class derives from `WeightSyncActor`, and the calls of senders drive the receiver: nobody needs to
        call `receive`.

        Args:
            model_id: the name of the model, the same on both sides.
            context: the actor itself, usually. Without ``model=`` its ``get_model(model_id)`` gives the model, else
                the path ``model_id``, ``policy``, ``_actor_module`` or ``module`` on it, in this order.
            **kwargs: ``model``, ``actor_ref``.

        Raises:
            StateError: initialised already.
            ConfigurationError: there is neither a model nor a context, or this model has a receiver in this process.
        """
        super().init_on_worker(model_id, context, **kwargs)
        desk_of(model_id).receiver = self._receiver

    def _endpoint(self, given: Mapping[str, Any], context: Any, model_id: str) -> Any:
        """The actor that we are in: nothing of it is needed, since a process holds one."""
        return given.get("actor_ref", context)

    def _worker_model(self, given: Mapping[str, Any], context: Any, model_id: str) -> Any:
        found = super()._worker_model(given, context, model_id)
        if not isinstance(found, str):
            return found
        try:
            return _resolve_model(context, found)
        except ModelPathError:
            named = [optional(context, name) for name in ("policy", "_actor_module", "module")]
            return next((model for model in named if model is not MISSING and model is not None), found)

    def listen(self, endpoint: Any, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Give ``accept`` each sender's link, as its first call comes: see `WeightSyncScheme.listen`."""
        return desk_of(model_id).open(accept)

    @staticmethod
    def receiver_at(desk: Desk) -> WeightReceiver:
        """The receiver that the calls drive.

        Raises:
            ConfigurationError: none does; a thread of its own reads for the one that listens.
        """
        if desk.receiver is None:
            raise ConfigurationError(f"Model {desk.model_id!r} is received by a scheme of yours: ask that.")
        return desk.receiver

    def create_transport(self, pipe_or_context: Any) -> Link:
        """A link to an actor for the model ``"policy"``."""
        return self.lay_link(pipe_or_context, "policy", "the actor")

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["_flat"], state["_plain"]
        return state


def called_by(endpoint: Any, strategy: WeightStrategy, peer: str) -> tuple[str, Any]:
    """The actor's method that takes weights, by the methods that its handle knows: its name, and itself.

    Raises:
        ConfigurationError: it has none.
    """
    last = "_update_weights_tensordict" if strategy == "state_dict" else "_update_weights_state_dict"
    names = [CALL, *(name for name in METHODS if name != last), last]
    for actor in (endpoint, optional(endpoint, "_actor")):
        for name in names if actor is not MISSING else ():
            method = optional(actor, name)
            if method is not MISSING:
                return name, method
    raise ConfigurationError(
        f"{peer} is a {type(endpoint).__name__} without a method that takes weights: derive its class from "
        f"WeightSyncActor, or give it one of {', '.join(METHODS)}."
    )


def calling(name: str, method: Any) -> Callable[[Any], Any]:
    """Calls a plain actor's method with a reference to the weights, under the name that it takes them by."""
    return lambda ref: method.remote(**{METHODS[name]: ref})


def rows(transport: TensorTransport, strategy: WeightStrategy) -> tuple[Rows, Rows]:
    """What a scheme's couriers put: flat bytes for our own receivers, and weights for plain actors."""
    shelf = Shelf()
    if transport is TensorTransport.NIXL:
        return Rows(shelf, "flat", _tensor, _tensor_transport="nixl"), Rows(shelf, "plain", _Presenter(strategy))
    return Rows(shelf, "flat", _array), Rows(shelf, "plain", _Presenter(strategy))


def _array(update: Update, payload: memoryview) -> numpy.ndarray[Any, Any]:
    return numpy.frombuffer(payload, dtype=numpy.uint8)


def _tensor(update: Update, payload: memoryview) -> torch.Tensor:
    return torch.frombuffer(payload, dtype=torch.uint8).clone()


class _Presenter:
    """Makes weights of updates, which tell their layout once a link."""

    def __init__(self, strategy: WeightStrategy) -> None:
        self._strategy = strategy
        self._layouts: dict[bytes, Layout] = {}

    def __call__(self, update: Update, payload: memoryview) -> Any:
        if update.layout:
            self._layouts[update.layout_digest] = Layout.decode(update.layout)
        return present(self._layouts[update.layout_digest], payload, update.extras, self._strategy)


def require_nixl() -> None:
    """Refuse ``tensor_transport="nixl"`` where it cannot work.

    Raises:
        MissingExtraError: the package nixl, or Ray, is not installed.
    """
    require_ray('tensor_transport="nixl"')
    if importlib.util.find_spec("nixl") is None:
        raise MissingExtraError("nixl", 'tensor_transport="nixl"')
