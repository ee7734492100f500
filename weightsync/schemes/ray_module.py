"""`RayModuleTransformScheme`: one model in one shared Ray actor, and its two sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weightsync.engine.context import MISSING, optional
from weightsync.engine.packer import Packed
from weightsync.errors import ConfigurationError, ModelPathError
from weightsync.options import Verify, WireDtype
from weightsync.protocol._tables import SenderInput
from weightsync.protocol.report import SyncReport
from weightsync.schemes.base import WeightSyncScheme
from weightsync.schemes.facade_services import torchrl_transport
from weightsync.schemes.peers.ray_actors import Backend, TensorTransport
from weightsync.schemes.ray import RayWeightSyncScheme, methods_for, only_module
from weightsync.schemes.ray_server import ActorReceiver, ActorSender
from weightsync.schemes.sources import registered
from weightsync.schemes.worker_set import Groups
from weightsync.weights.model_path import _resolve_model
from weightsync.weights.strategy import WeightStrategy

#: The worker id of the one actor.
ONLY_WORKER = 0


class RayModuleTransformSender(ActorSender):
    """Sends to the one actor behind a transform, which is found when it is first needed.

    The actor is looked for in this order: in the transform that was set, in the context, at the path ``model_id`` on
    the context (each an actor, or an object whose ``._actor`` is one), and as the only entry of ``actor_refs``. Its
    worker id is 0.

    `send` and `send_async` raise ConfigurationError (a ValueError) if no actor is found, and take None, 0 or [0] for
    ``worker_ids``.

    Args:
        scheme: the `RayModuleTransformScheme` that sets it up.
    """

    _scheme: RayModuleTransformScheme
    #: The actor that was found or added, also once it has left; None: it was not needed yet, or was removed.
    found_actor: Any = None

    def add_worker(self, worker_id: int, pipe_or_context: Any, *, process: Any = None) -> None:
        """See `WeightSender.add_worker`."""
        super().add_worker(worker_id, pipe_or_context, process=process)
        self.found_actor = pipe_or_context

    def remove_worker(self, worker_id: int) -> None:
        """See `WeightSender.remove_worker`."""
        super().remove_worker(worker_id)
        self.found_actor = None

    def register_worker(self, worker_idx: int, pipe_or_context: Any = None) -> None:
        """Do nothing: there is one actor, whatever is registered."""

    _register_worker = register_worker

    def _prepare(self, input: SenderInput, *call: Any) -> Packed | SyncReport:
        self.find_actor()
        return super()._prepare(input, *call)

    def find_actor(self) -> None:
        """Find the actor, unless it was found already.

        Raises:
            ConfigurationError: (a ValueError) no actor is found.
        """
        if ONLY_WORKER not in self.worker_ids and self.found_actor is None:
            self.add_worker(ONLY_WORKER, self._scheme.actor(self._context(), self._model_id))


#: The receiver in the actor.
RayModuleTransformReceiver = ActorReceiver


class RayModuleTransformScheme(RayWeightSyncScheme):
    """One model in one Ray actor, such as that of TorchRL's ``RayModuleTransform``.

    An actor whose class derives from `WeightSyncActor` answers for each version; one with
    ``_update_weights_tensordict(params=)`` or ``_update_weights_state_dict(state_dict=)``, as TorchRL's has, works as
    it is, with the evidence ``call``.

    Args:
        strategy: "tensordict" (default) or "state_dict", or a `WeightStrategy`.
        backend: see `RayWeightSyncScheme`.
        verify: "auto", "digest" or "layout": see `WeightSyncScheme`.
        wire_dtype: "bfloat16", "float16" or "float32": see `WeightSyncScheme`.
        tensor_transport: see `RayWeightSyncScheme`.
        key: see `RayWeightSyncScheme`.

    Raises:
        ConfigurationError, MissingExtraError: as for `RayWeightSyncScheme`.
    """

    _sender_arguments = (*RayWeightSyncScheme._sender_arguments, "ray_transform")
    _given_to_workers = ()  # its actor is looked for there later
    _reached = None

    def __init__(
        self,
        strategy: WeightStrategy | str = "tensordict",
        backend: Backend | str = Backend.GLOO,
        *,
        verify: Verify | str = Verify.AUTO,
        wire_dtype: torch.dtype | WireDtype | str | None = None,
        tensor_transport: TensorTransport | str = TensorTransport.OBJECT_STORE,
        key: bytes | str | None = None,
    ) -> None:
        super().__init__(
            strategy, backend, verify=verify, wire_dtype=wire_dtype, tensor_transport=tensor_transport, key=key
        )

    _not_copied = (*RayWeightSyncScheme._not_copied, "_transform")

    def _reset(self) -> None:
        super()._reset()
        self._transform: Any = None

    def set_transform(self, ray_transform: Any) -> None:
        """Set the transform whose actor gets the weights; TorchRL's ``RayModuleTransform`` calls this.

        Args:
            ray_transform: the transform, or its actor.

        Raises:
            ConfigurationError: another actor gets them already. Nothing has changed.
        """
        actor, sender = self._actor_behind(ray_transform), self._sender_side.sender
        found = sender.found_actor if isinstance(sender, RayModuleTransformSender) else None
        if actor is not None and found is not None and found != actor:
            raise ConfigurationError(
                "set_transform(): the weights go to the actor of another transform already. To send them to this one "
                f"from now on, call the sender's add_worker({ONLY_WORKER}, actor). Nothing has changed."
            )
        self._transform = ray_transform

    _set_transform = set_transform

    def actor(self, context: Any, model_id: str) -> Any:
        """The one actor: see `RayModuleTransformSender`.

        Args:
            context: where it is looked for.
            model_id: its path on the context.

        Raises:
            ConfigurationError: (a ValueError) there is none, or there are several.
        """
        for candidate in (
            self._transform,
            self._sender_side.given.get("ray_transform"),
            context,
            _resolve_or_none(context, model_id),
        ):
            actor = self._actor_behind(candidate)
            if actor is not None:
                return actor
        actors = self._require_actors(context, model_id)
        if len(actors) != 1:
            raise ConfigurationError(f"There are {len(actors)} actors, but a transform has one. Nothing was sent.")
        return actors[0]

    def _require_actors(self, context: Any, model_id: str) -> list[Any]:
        try:
            return self._actors(self._sender_side.given, context)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"no actor is found for {model_id!r}, neither as the context nor at that path on it. Give "
                "init_on_sender() a context, ray_transform= or actor_refs=. Nothing was sent."
            ) from error

    def _actor_behind(self, candidate: Any) -> Any:
        """The actor behind an object: its ``_actor``, or itself if it takes weights, or None."""
        inner = optional(candidate, "_actor")
        if inner is not MISSING and inner is not None:
            return inner
        methods = (optional(candidate, name) for name in methods_for(self.strategy))
        return candidate if any(optional(method, "remote") is not MISSING for method in methods) else None

    def _found(self, model_id: str, context: Any) -> Any:
        """What a send without weights sends; never the actor that the weights are for."""
        return registered(
            self._sender_side.given, context, model_id, lambda found: self._actor_behind(found) is not None
        )

    def _endpoints(self, keywords: Mapping[str, Any], context: Any, model_id: str) -> Mapping[int, Any]:
        """Empty: the actor is found when it is first needed."""
        return {}

    def _groups(self, weights: Any, worker_ids: Sequence[int] | None) -> Groups:
        """As in all schemes, once the actor is found: weights may be given for worker 0."""
        sender = self.get_sender()
        if isinstance(sender, RayModuleTransformSender):
            sender.find_actor()
        return super()._groups(weights, worker_ids)

    def _worker_model(self, keywords: Mapping[str, Any], context: Any, model_id: str) -> Any:
        """The model given or found by ``get_model``, else the actor's ``_actor_module`` or ``module``, else a path."""
        model = WeightSyncScheme._worker_model(self, keywords, context, model_id)
        return only_module(context, model) if isinstance(model, str) else model

    def _transport(self, actor: Any, worker_idx: int | None) -> Any:
        return torchrl_transport("RayActorTransport")(actor, str(self.strategy), self._tensor_transport, key=self._key)

    def create_sender(self) -> RayModuleTransformSender:
        """A sender to the one actor."""
        return RayModuleTransformSender(self)


def _resolve_or_none(context: Any, path: str) -> Any:
    """The object at a path on a context, or None."""
    if context is None:
        return None
    try:
        return _resolve_model(context, path)
    except ModelPathError:
        return None
