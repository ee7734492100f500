"""`RayWeightSyncScheme`: workers are Ray actors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from weightsync.clock import Deadline, Timeout
from weightsync.engine.background import Background
from weightsync.engine.context import MISSING, optional
from weightsync.engine.receiver import WeightReceiver
from weightsync.errors import ConfigurationError, ModelPathError
from weightsync.keys import SharedKey
from weightsync.options import Verify, WireDtype
from weightsync.schemes.arguments import POLICY
from weightsync.schemes.base import WeightSyncScheme
from weightsync.schemes.collector_kinds import WorkerKind
from weightsync.schemes.facade_services import torchrl_transport
from weightsync.schemes.peers.base import BareTransport
from weightsync.schemes.peers.ray_actors import (
    CALL,
    POLICY_METHOD,
    RUN,
    STATE_DICT_METHOD,
    TENSORDICT_METHOD,
    ActorLinks,
    Backend,
    TensorTransport,
    handle_of,
    method_of,
    tensor_transport_of,
)
from weightsync.schemes.ray_server import ActorReceiver, ActorSender, ActorServer, actor_server_of, require_actor
from weightsync.schemes.relay import is_torchrl_collector
from weightsync.schemes.sources import given_or_found
from weightsync.schemes.worker_set import refuse_repeated
from weightsync.transports.base import Link
from weightsync.transports.calls.server import Frames
from weightsync.transports.ray.session import require_ray
from weightsync.weights.model_path import _resolve_model
from weightsync.weights.strategy import WeightStrategy


class RayWeightSyncScheme(WeightSyncScheme):
    """Workers are Ray actors.

    Each version is put into Ray's object store once, and actors read it from there. Without a key, a `WeightSyncActor`
    on the trainer's host maps it from the trainer's memory instead. To any `WeightSyncActor`, versions of up to 64 KiB
    travel in the call.

    Actors of a class that derives from `WeightSyncActor` answer for each version (evidence ``answer``). Plain actors
    with a method ``update_policy_weights_(policy_or_weights=)``, ``_update_weights_tensordict(params=)`` or
    ``_update_weights_state_dict(state_dict=)`` work as they are, but it is only known that the call returned (evidence
    ``call``).

    Args:
        strategy: "state_dict" (default) or "tensordict", or a `WeightStrategy`: also the format that plain actors get.
        backend: "gloo" or "nccl", for TorchRL's API; weights are sent through Ray, so it has no effect.
        verify: "auto", "digest" or "layout": see `WeightSyncScheme`.
        wire_dtype: "bfloat16", "float16" or "float32": see `WeightSyncScheme`.
        tensor_transport: "object_store" (default), or "nixl": needs the package of that name.
        key: a secret shared with the actors: see `DistributedWeightSyncScheme`. A `WeightSyncActor` is given it as its
            ``weight_key``; it does not protect plain actors.

    Raises:
        ConfigurationError: an argument has an unknown value or another type, or the key is empty.
        MissingExtraError: ``tensor_transport="nixl"`` without what it needs.
    """

    _sender_arguments: tuple[str, ...] = ("remote_collectors", "actor_refs", "actors", "num_collectors")
    # Ray ends an actor with its last handle, so the scheme keeps none.
    _given_to_workers: tuple[str, ...] = ("remote_collectors", "actor_refs", "actors")
    _reached: WorkerKind | None = WorkerKind.ACTORS
    _worker_arguments: tuple[str, ...] = ("actor_ref",)

    def __init__(
        self,
        strategy: WeightStrategy | str = "state_dict",
        backend: Backend | str = Backend.GLOO,
        *,
        verify: Verify | str = Verify.AUTO,
        wire_dtype: torch.dtype | WireDtype | str | None = None,
        tensor_transport: TensorTransport | str = TensorTransport.OBJECT_STORE,
        key: bytes | str | None = None,
    ) -> None:
        self._key = None if key is None else SharedKey(key)
        self._backend = Backend(backend)
        self._tensor_transport = tensor_transport_of(tensor_transport)
        super().__init__(strategy, verify=verify, wire_dtype=wire_dtype)

    _not_copied = (*WeightSyncScheme._not_copied, "_links")

    def _reset(self) -> None:
        super()._reset()
        self._links = ActorLinks(self._tensor_transport, self._key)

    def _endpoints(self, keywords: Mapping[str, Any], context: Any, model_id: str) -> Mapping[int, Any]:
        """One actor per worker, from ``remote_collectors=``, ``actor_refs=`` or ``actors=``, or the context's."""
        require_ray(type(self).__name__)
        actors = self._actors(keywords, context)
        for name in ("num_collectors", "num_workers"):
            count = given_or_found(keywords, context, name)
            if count not in (None, len(actors)):
                raise ConfigurationError(f"{name} is {count}, but there are {len(actors)} actors: give one per worker.")
        for worker_id, actor in enumerate(actors):
            method_of(actor, methods_for(self.strategy), f"worker {worker_id}")
        refuse_repeated({worker_id: handle_of(actor) for worker_id, actor in enumerate(actors)})
        return dict(enumerate(actors))

    def _creates_links_at_connect(self, keywords: Mapping[str, Any], context: Any) -> bool:
        """True for a TorchRL collector: it initialises the scheme in its actors between `init_on_sender` and `connect`.

        At `init_on_sender` no weightsync receiver listens in them yet.
        """
        return is_torchrl_collector(context)

    def _actors(self, keywords: Mapping[str, Any], context: Any) -> list[Any]:
        for name in ("remote_collectors", "actor_refs", "actors"):
            actors = given_or_found(keywords, context, name)
            if isinstance(actors, Mapping):
                raise ConfigurationError(
                    f"{name}= is a {type(actors).__name__}: give a list of actors. A worker's id is its index there."
                )
            if actors is not None:
                return list(actors) if isinstance(actors, Iterable) and not isinstance(actors, str) else [actors]
        raise ConfigurationError(
            "init_on_sender() needs remote_collectors= or actor_refs=, or a context that has them: one Ray actor per "
            "worker."
        )

    def create_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        """A link to an actor, given as its handle or as an object whose ``._actor`` is that.

        Raises:
            MissingExtraError: Ray is not installed.
            ConfigurationError: the actor has none of the methods that take weights.
        """
        if is_transport(endpoint):
            return super().create_link(endpoint, model_id, peer)
        return self._links.create(endpoint, methods_for(self.strategy), model_id, peer)

    @property
    def connection_info_name(self) -> str:
        """The name under which TorchRL's scheme would register its rendezvous; ours has no such actor."""
        return f"connection_info_{self.model_id or POLICY}"

    def _endpoint(self, keywords: Mapping[str, Any], context: Any, model_id: str) -> Any:
        """The actor of this process. It is not used, since a process holds only one."""
        return keywords.get("actor_ref", context)

    def _worker_model(self, keywords: Mapping[str, Any], context: Any, model_id: str) -> Any:
        """The model given, or found by ``get_model``, or at the path ``model_id``; for "policy", an actor's module."""
        model = super()._worker_model(keywords, context, model_id)
        # Any other id names only its own attribute: a critic's weights would fit many policies.
        return only_module(context, model) if model == "policy" else model

    def listen(self, endpoint: Any, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Give ``accept`` each sender's link, as its first call comes: see `WeightSyncScheme.listen`.

        Raises:
            ConfigurationError: this process is not an actor.
            MissingExtraError: Ray is not installed.
        """
        if is_transport(endpoint):
            return super().listen(endpoint, model_id, accept)
        require_actor()
        return actor_server_of(model_id).open(accept, SharedKey.given(self._key))

    def connect(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        timeout: float | Timeout | None = Timeout.START,
    ) -> None:
        """Connect this side: see `WeightSyncScheme.connect`.

        On both sides of a `RayCollector` it may be called again: the collector makes all calls of `connect` again if
        one of them failed in its first update.
        """
        connected = self.synchronized_on_sender or self.synchronized_on_receiver
        if not (connected and is_torchrl_collector(self.context)):
            super().connect(worker_idx=worker_idx, weights=weights, timeout=timeout)

    def _await_first(self, receiver: WeightReceiver, background: Background, deadline: Deadline) -> None:
        """Return at once: the first weights arrive in a call, which a waiting actor could not run."""

    def create_transport(
        self,
        pipe_or_context: Any = None,
        *,
        pipe: Any = None,
        remote_collector: Any = None,
        remote_actor: Any = None,
        worker_idx: int | None = None,
    ) -> Any:
        """TorchRL's transport to one actor; without an actor the first send raises.

        Args:
            pipe_or_context: the actor, or an object whose ``._actor`` is that; ``pipe``, ``remote_collector`` and
                ``remote_actor`` are other names for it.
            worker_idx: the worker's id, for messages.

        Raises:
            ConfigurationError: several actors are given.
        """
        return self._transport(only_actor(pipe_or_context, pipe, remote_collector, remote_actor), worker_idx)

    def _transport(self, actor: Any, worker_idx: int | None) -> Any:
        return torchrl_transport("RayTransport")(actor, self._tensor_transport, worker_idx=worker_idx, key=self._key)

    def create_sender(self) -> ActorSender:
        """A sender without workers, whose copies carry the actors' handles."""
        return ActorSender(self)

    def create_receiver(self) -> ActorReceiver:
        """A receiver that the calls to this process's actor drive, once it listens."""
        return ActorReceiver(self)


def is_transport(endpoint: Any) -> bool:
    """Whether an endpoint is a transport, TorchRL's or the user's own. An actor is not one, whatever methods it has."""
    return isinstance(endpoint, BareTransport) and optional(endpoint, RUN) is MISSING


def only_actor(*names: Any) -> Any:
    """The actor given under one of several names; None if none was given.

    Raises:
        ConfigurationError: several were given.
    """
    given = [each for each in names if each is not None]
    if len(given) > 1:
        raise ConfigurationError(f"create_transport() was given {len(given)} actors: a transport reaches one.")
    return given[0] if given else None


def only_module(context: Any, path: str) -> Any:
    """The path, if it resolves on an actor; else the actor's only module."""
    try:
        return _resolve_model(context, path)
    except ModelPathError:
        named = [optional(context, name) for name in ("_actor_module", "module")]
        return next((model for model in named if model is not MISSING and model is not None), path)


def methods_for(strategy: WeightStrategy) -> tuple[str, ...]:
    """The methods by which an actor may take weights, the best one first."""
    by_form = (
        (STATE_DICT_METHOD, TENSORDICT_METHOD) if strategy == "state_dict" else (TENSORDICT_METHOD, STATE_DICT_METHOD)
    )
    return (CALL, POLICY_METHOD, *by_form)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _without_task_retries(function: _Function) -> _Function:
    # This is what Ray's own decorator sets. Using the decorator would import Ray whenever weightsync is imported.
    function.__dict__["__ray_max_task_retries__"] = 0
    return function


class WeightSyncActor:
    """The base that makes a Ray actor a receiver of weights::

        @ray.remote
        class Collector(WeightSyncActor):
            def __init__(self):
                self.policy = make_policy()

    Weights are applied between two calls of a serial actor. In a threaded actor (``max_concurrency``) no version goes
    live during a forward of the module. Put several forwards that belong together, and those of your own threads, in
    ``with self.weight_receiver().serving():``. The model is what ``self.get_model(model_id)`` returns, else
    ``self.<model_id>``, such as ``self.policy``. An actor may initialise a `RayWeightSyncScheme` itself, by
    `init_on_worker`; then that scheme is used.

    Attributes:
        weight_key: the key shared with the trainer, for an actor that sets it in ``__init__``: senders with another
            key, or none, are rejected. None: the environment's ``WEIGHTSYNC_KEY``, if it is set.
    """

    weight_key: bytes | str | None = None

    def weight_receiver(self, model_id: str = "policy") -> WeightReceiver:
        """The receiver of a model in this actor, made now if there is none yet.

        Args:
            model_id: the model's id.

        Raises:
            ConfigurationError: no model is found, or a scheme's background thread receives it.
        """
        receiver = self._weightsync_server(model_id).receiver
        if receiver is None:
            raise ConfigurationError(
                f"Model {model_id!r} is received by another scheme in this process: use that scheme's receiver."
            )
        return receiver

    def _weightsync_server(self, model_id: str) -> ActorServer:
        actor_server = actor_server_of(model_id)
        with actor_server.lock:
            if not actor_server.has_receiver:
                RayWeightSyncScheme(key=self.weight_key).init_on_worker(model_id, context=self)
        return actor_server

    @_without_task_retries
    def _weightsync_call(  # noqa: PLR0917 - positional arguments cost Ray less
        self, model_id: str, link: str, number: int, frame: bytes, payload: Any, lost_calls: tuple[int, ...] = ()
    ) -> Frames:
        """What senders call: see `weightsync.transports.ray.client.ActorCallClient`."""
        # Only a handshake makes the receiver. Any other call of an unknown link is from before a restart.
        actor_server = actor_server_of(model_id) if number else self._weightsync_server(model_id)
        return actor_server.receive_and_apply(link, number, frame, payload, lost_calls)


assert CALL in vars(WeightSyncActor)
