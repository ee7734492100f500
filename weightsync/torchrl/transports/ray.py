"""`RayTransport` and `RayActorTransport`: TorchRL's transports to one Ray actor."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from weightsync.errors import ConfigurationError
from weightsync.keys import Secret, SharedKey
from weightsync.schemes.arguments import Generation
from weightsync.schemes.facade_services import torchrl_class
from weightsync.schemes.peers.ray_actors import (
    CALL,
    POLICY_METHOD,
    STATE_DICT_METHOD,
    TENSORDICT_METHOD,
    ActorLinks,
    Backend,
    TensorTransport,
    tensor_transport_of,
)
from weightsync.torchrl.transports.facade import TransportFacade
from weightsync.transports.base import Link
from weightsync.transports.ray.session import require_ray


class _ActorFacade(TransportFacade):
    """Sends to one Ray actor. It receives nothing: the actor gets the weights in calls."""

    _receives = False

    _not_copied = (*TransportFacade._not_copied, "_links")

    def __init__(
        self, actor: Any, transport: TensorTransport | str, generation: Generation, key: Secret | None
    ) -> None:
        require_ray(type(self).__name__)
        self._key = None if key is None else SharedKey.given(key)
        self._actor_ref = actor
        self._tensor_transport = tensor_transport_of(transport)
        super().__init__(generation=generation)

    def _reset(self) -> None:
        super()._reset()
        self._links = ActorLinks(self._tensor_transport, self._key)

    @abc.abstractmethod
    def _methods(self) -> Sequence[str]:
        """The actor's methods that take weights, the best one first."""

    def _create_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        if self._actor_ref is None:
            raise ConfigurationError(f"{type(self).__name__} was given no actor. Nothing was sent: give it one.")
        return self._links.create(self._actor_ref, self._methods(), model_id, "the actor")

    def check_connection(self) -> bool:
        """Whether Ray is initialised in this process."""
        return bool(require_ray(type(self).__name__).is_initialized())


@torchrl_class
class RayTransport(_ActorFacade):
    """Sends to one remote collector, by its ``update_policy_weights_`` if it is not a `WeightSyncActor`.

    The weights are put into Ray's object store once. If a call raises, that becomes a RefusedError; if the collector
    died, a WorkerLostError. A plain collector's ack has the evidence `CALL`.

    Args:
        remote_collector: the actor. Without one the first send raises.
        tensor_transport: "object_store" or "nixl".
        remote_actor: generation B's name of ``remote_collector``.
        worker_idx: generation B: the worker's id, for messages.
        backend: generation B: "gloo" or "nccl", ignored, since weights are sent through Ray.
        connection_info_name: generation B: ignored, since there is no process group to find.
        model_id: generation B: ignored; `send_weights` names the model.
        key: a secret shared with the actor: see `RayWeightSyncScheme`.

    Raises:
        MissingExtraError: (an ImportError) Ray is not installed, or nixl is asked for and is not.
        ConfigurationError: an actor is given under both names, or the key is empty.
    """

    def __init__(
        self,
        remote_collector: Any = None,
        tensor_transport: TensorTransport | str = TensorTransport.OBJECT_STORE,
        *,
        remote_actor: Any = None,
        worker_idx: int | None = None,
        backend: Backend | str | None = None,
        connection_info_name: str | None = None,
        model_id: str | None = None,
        key: Secret | None = None,
    ) -> None:
        if remote_collector is not None and remote_actor is not None:
            raise ConfigurationError("remote_collector= and remote_actor= are two names for the one actor: give one.")
        only_in_b = (remote_actor, worker_idx, backend, connection_info_name, model_id)
        self.worker_idx = worker_idx
        self.backend = Backend.GLOO if backend is None else Backend(backend)
        actor = remote_collector if remote_actor is None else remote_actor
        super().__init__(
            actor, tensor_transport, Generation.A if all(each is None for each in only_in_b) else Generation.B, key
        )

    def _methods(self) -> Sequence[str]:
        return (CALL, POLICY_METHOD)

    def set_model(self, model: Any) -> None:
        """Do nothing: the actor's own receiver has the model to which calls apply weights."""

    def set_model_version(self, model_version: int | None) -> None:
        """Do nothing: each send has the next version, and its report names it."""

    def set_process_group(self, process_group: Any, store: Any = None) -> None:
        """Do nothing: weights are sent through Ray, beside any process group."""


@torchrl_class
class RayActorTransport(_ActorFacade):
    """Sends to one actor, by its ``_update_weights_tensordict`` or ``_update_weights_state_dict``.

    Args:
        actor_ref: the actor; `set_actor` gives it later.
        update_method: "tensordict" or "state_dict".
        tensor_transport: "object_store" or "nixl".
        key: a secret shared with the actor: see `RayWeightSyncScheme`.

    Raises:
        MissingExtraError: (an ImportError) Ray is not installed, or nixl is asked for and is not.
        ConfigurationError: (a ValueError) another update_method, or an empty key.
    """

    def __init__(
        self,
        actor_ref: Any = None,
        update_method: str = "tensordict",
        tensor_transport: TensorTransport | str = TensorTransport.OBJECT_STORE,
        *,
        key: Secret | None = None,
    ) -> None:
        methods = {"tensordict": TENSORDICT_METHOD, "state_dict": STATE_DICT_METHOD}
        if not isinstance(update_method, str) or update_method not in methods:
            raise ConfigurationError(f"update_method is {update_method!r}: it must be one of {', '.join(methods)}.")
        self._method = methods[update_method]
        super().__init__(actor_ref, tensor_transport, Generation.A, key)

    def _methods(self) -> Sequence[str]:
        return (CALL, self._method)

    def set_actor(self, actor_ref: Any) -> None:
        """Send to this actor from now on. Links to another actor are closed; its outstanding updates are ABANDONED."""
        with self._lock:  # a send in another thread would make a link to the former actor in between
            self._actor_ref = actor_ref
            self._hang_up()

    def send_ack(self, message: str = "updated") -> None:
        """Do nothing: the return of the call is the ack."""

    def check_ack(self, message: str = "updated") -> None:  # type: ignore[override]
        """Do nothing: `wait_ack` waits for the call to return."""

    def check_connection(self) -> bool:
        """Whether Ray is initialised in this process, and an actor is set."""
        return self._actor_ref is not None and super().check_connection()
