"""`MultiProcessWeightSyncScheme` and what schemes over multiprocessing pipes share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weightsync.compat.mp import MPTransport, WorkerTransport
from weightsync.context import MISSING, optional
from weightsync.errors import ConfigurationError
from weightsync.schemes.base import WeightSyncScheme, given_or_found
from weightsync.transports.base import Link
from weightsync.transports.channel import Channel
from weightsync.transports.pipe import PipeLink
from weightsync.transports.user import UserMessages


class PipeScheme(WeightSyncScheme):
    """A scheme whose control path is one duplex `multiprocessing.Pipe` a worker."""

    _sender_arguments = ("pipes",)
    _worker_arguments = ("pipe",)

    def _endpoints(self, given: Mapping[str, Any], context: Any, model_id: str) -> Mapping[int, Any]:
        """Our end of one pipe a worker, from ``pipes=`` or ``context.pipes``."""
        pipes = given_or_found(given, context, "pipes")
        if pipes is None:
            raise ConfigurationError(
                "init_on_sender() needs pipes=, or a context with .pipes: our end of one multiprocessing.Pipe() a "
                "worker."
            )
        count = given_or_found(given, context, "num_workers")
        if count not in (None, len(pipes)):
            raise ConfigurationError(
                f"num_workers is {count}, but there are {len(pipes)} pipes: give one pipe a worker."
            )
        _refuse_unusable(pipes)
        return dict(enumerate(pipes))

    def _endpoint(self, given: Mapping[str, Any], context: Any, model_id: str) -> Any:
        """This worker's end of its pipe, from ``pipe=`` or ``context.pipe``."""
        pipe = given_or_found(given, context, "pipe")
        if pipe is None:
            raise ConfigurationError(
                "init_on_worker() needs pipe=, or a context with .pipe: this worker's end of a multiprocessing.Pipe()."
            )
        return pipe

    def create_transport(self, pipe_or_context: Any = None, *, pipe: Any = None, **queues: Any) -> Any:
        """TorchRL's transport class over a pipe's end (or a context that has one), by whatever name it is given.

        Args:
            pipe_or_context: our end of a pipe, or an object whose ``.pipe`` is that.
            pipe: the same.
            **queues: generation B's ``weight_queue``, ``ack_queue`` and ``timeout``.

        Raises:
            ConfigurationError: nothing is wrong yet if it is incomplete: it raises at the first send.
        """
        given = pipe if pipe_or_context is None else pipe_or_context
        return MPTransport(given, **queues) if given is not None else MPTransport(**queues)

    def transport_of(self, receiver: Any, endpoint: Any) -> WorkerTransport:
        """`MPTransport` over a receiver that listens on a pipe."""
        return WorkerTransport(receiver, _pipe(endpoint))

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


def _pipe(endpoint: Any) -> Any:
    pipe = optional(endpoint, "pipe")
    return endpoint if pipe is MISSING else pipe


def _refuse_unusable(pipes: Sequence[Any]) -> None:
    """Refuse pipes before a link is laid over any of them, so that the good ones can be given again."""
    connections = [_pipe(pipe) for pipe in pipes]
    if len({id(connection) for connection in connections}) < len(connections):
        raise ConfigurationError("A pipe occurs twice in pipes=: give one pipe a worker.")
    for connection in connections:
        Channel.of(connection)
