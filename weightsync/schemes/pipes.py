"""`MultiProcessWeightSyncScheme` and what schemes over multiprocessing pipes share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weightsync.context import MISSING, held, optional
from weightsync.errors import ConfigurationError, StateError
from weightsync.receiver import WeightReceiver
from weightsync.schemes.base import WeightSyncScheme
from weightsync.sender import WeightSender
from weightsync.transports.base import Link
from weightsync.transports.channel import Channel
from weightsync.transports.pipe import PipeLink
from weightsync.transports.user import UserMessages

_SENDER_ARGUMENTS = ("pipes", "num_workers", "model", "source_model", "cached_weights", "fence")
_WORKER_ARGUMENTS = ("pipe", "model")


class PipeScheme(WeightSyncScheme):
    """A scheme whose control path is one duplex `multiprocessing.Pipe` a worker."""

    def init_on_sender(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Make the sender, put one worker a pipe on its roll (ids 0, 1, ...) and lay the links. Never waits.

        Args:
            model_id: the name of the model, the same on both sides; may be a path on the context.
            context: gives what is not given by keyword: ``.pipes``, ``.num_workers``, ``.get_model(model_id)``,
                ``.get_cached_weights(model_id)``. Held weakly.
            **kwargs: ``pipes`` (our ends, one a worker), ``num_workers``, ``model``, ``source_model``,
                ``cached_weights``, ``fence`` (the incarnation to rise above, after `WorkerLostError.fence`).

        Raises:
            StateError: initialised already.
            ConfigurationError: the pipes are missing, or their number is not ``num_workers``.
        """
        if self._sender is not None:
            raise StateError("scheme", "initialised on the sender", "init_on_sender", ["get_sender", "close"])
        given = _checked(kwargs, _SENDER_ARGUMENTS, "init_on_sender")
        pipes = _pipes(given, context)
        sender = WeightSender(self)
        self._given, self._context = given, held(context)
        sender.set_context(context, model_id)
        for worker_id, pipe in enumerate(pipes):
            sender.add_worker(worker_id, pipe)
        sender.connect(fence=given.get("fence"))
        self._sender = sender

    def init_on_worker(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Make the receiver and listen on its pipe. Never waits for the sender.

        Args:
            model_id: the name of the model, the same on both sides. Without a model it is resolved on the context when
                the first weights are received.
            context: gives what is not given by keyword: ``.pipe``, ``.get_model(model_id)``. Held weakly.
            **kwargs: ``pipe`` (our end), ``model``.

        Raises:
            StateError: initialised already.
            ConfigurationError: no pipe, or neither a model nor a context.
        """
        if self._receiver is not None:
            raise StateError("scheme", "initialised on the worker", "init_on_worker", ["get_receiver", "close"])
        given = _checked(kwargs, _WORKER_ARGUMENTS, "init_on_worker")
        pipe = given["pipe"] if "pipe" in given else optional(context, "pipe")
        if pipe is None or pipe is MISSING:
            raise ConfigurationError(
                "init_on_worker() needs pipe=, or a context with .pipe: this worker's end of a multiprocessing.Pipe()."
            )
        receiver = WeightReceiver(self)
        receiver.set_context(context, model_id)
        receiver.register_model(_model(given, context, model_id))
        receiver.register_worker_transport(pipe)
        self._receiver = receiver

    def create_transport(self, pipe_or_context: Any) -> Link:
        """A link over a pipe's end for the model ``"policy"``."""
        return self.lay_link(pipe_or_context, "policy", "the peer")

    def lay_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        """A link over a pipe's end, or over the ``.pipe`` of a context.

        Raises:
            ConfigurationError: it is no duplex pipe.
        """
        return PipeLink(_pipe(endpoint), model_id, peer=peer)

    def user_messages(self, endpoint: Any) -> UserMessages:
        """The user's own messages on the pipe behind ``endpoint``.

        Raises:
            ConfigurationError: it is no duplex pipe.
        """
        return UserMessages(Channel.of(_pipe(endpoint)))


class MultiProcessWeightSyncScheme(PipeScheme):
    """Over multiprocessing pipes; large payloads by shared memory. Workers copy out into their own parameters.

    Args:
        strategy: "state_dict" (default) or "tensordict", or a `WeightStrategy`.
        verify: "digest" or "layout": see `WeightSyncScheme`.
    """


def _checked(kwargs: Mapping[str, Any], allowed: Sequence[str], where: str) -> dict[str, Any]:
    unknown = sorted(set(kwargs) - set(allowed))
    if unknown:
        raise ConfigurationError(f"{where}() takes no {', '.join(unknown)}; it takes {', '.join(allowed)}.")
    return {name: value for name, value in kwargs.items() if value is not None}


def _pipe(endpoint: Any) -> Any:
    pipe = optional(endpoint, "pipe")
    return endpoint if pipe is MISSING else pipe


def _pipes(given: Mapping[str, Any], context: Any) -> Sequence[Any]:
    pipes = given["pipes"] if "pipes" in given else optional(context, "pipes")
    if pipes is None or pipes is MISSING:
        raise ConfigurationError(
            "init_on_sender() needs pipes=, or a context with .pipes: our end of one multiprocessing.Pipe() a worker."
        )
    count = given["num_workers"] if "num_workers" in given else optional(context, "num_workers")
    if count not in (None, MISSING, len(pipes)):
        raise ConfigurationError(f"num_workers is {count}, but there are {len(pipes)} pipes: give one pipe a worker.")
    _refuse_unusable(pipes)
    return list(pipes)


def _refuse_unusable(pipes: Sequence[Any]) -> None:
    """Refuse pipes before a link is laid over any of them, so that the good ones can be given again."""
    connections = [_pipe(pipe) for pipe in pipes]
    if len({id(connection) for connection in connections}) < len(connections):
        raise ConfigurationError("A pipe occurs twice in pipes=: give one pipe a worker.")
    for connection in connections:
        Channel.of(connection)


def _model(given: Mapping[str, Any], context: Any, model_id: str) -> Any:
    if "model" in given:
        return given["model"]
    get_model = optional(context, "get_model")
    found = MISSING if get_model is MISSING else get_model(model_id)
    if found is not None and found is not MISSING:
        return found
    if context is None:
        raise ConfigurationError("init_on_worker() needs model=, or a context on which model_id is resolved.")
    return model_id
