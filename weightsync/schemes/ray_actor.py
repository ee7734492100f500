"""`WeightSyncActor`: the base that makes a Ray actor a receiver of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from weightsync.engine.receiver import WeightReceiver
from weightsync.errors import ConfigurationError
from weightsync.schemes.peers.ray_actors import CALL
from weightsync.schemes.ray import RayWeightSyncScheme
from weightsync.schemes.ray_server import ActorServer, actor_server_of
from weightsync.transports.calls.server import Frames

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _never_twice(function: _Function) -> _Function:
    # What Ray's own decorator sets: using that would import Ray with weightsync.
    function.__dict__["__ray_max_task_retries__"] = 0
    return function


class WeightSyncActor:
    """The base that makes a Ray actor a receiver of weights::

        @ray.remote
        class Collector(WeightSyncActor):
            def __init__(self):
                self.policy = make_policy()

    Weights are applied between two calls of a serial actor. If forward passes run in other threads
    (``max_concurrency``, your own threads), put them in ``with self.weight_receiver().serving():``. The model is what
    ``self.get_model(model_id)`` returns, else ``self.<model_id>``, such as ``self.policy``. An actor may initialise a
    `RayWeightSyncScheme` itself, by `init_on_worker`; that one is used then.

    Attributes:
        weight_key: the key shared with the trainer, for an actor that sets it in ``__init__``: senders with another
            key, or none, are rejected. None: the environment's ``WEIGHTSYNC_KEY``, if it is set.
    """

    weight_key: bytes | str | None = None

    def weight_receiver(self, model_id: str = "policy") -> WeightReceiver:
        """The receiver of a model in this actor, made now if there is none yet.

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
            if not actor_server.attended:
                RayWeightSyncScheme(key=self.weight_key).init_on_worker(model_id, context=self)
        return actor_server

    @_never_twice
    def _weightsync_call(  # noqa: PLR0917 - positional arguments cost Ray less
        self, model_id: str, link: str, number: int, frame: bytes, payload: Any, lost: tuple[int, ...] = ()
    ) -> Frames:
        """What senders call: see `weightsync.transports.ray.client.ActorCallClient`."""
        return self._weightsync_server(model_id).receive_and_apply(link, number, frame, payload, lost)


assert CALL in vars(WeightSyncActor)
