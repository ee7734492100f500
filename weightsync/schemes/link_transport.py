"""What a scheme asks of TorchRL's transport classes; the classes themselves are in `weightsync.torchrl`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from weightsync.engine.copies import MISSING, optional
from weightsync.engine.receiver import WeightReceiver
from weightsync.errors import ConfigurationError
from weightsync.transports.base import Link
from weightsync.transports.pipe.user_messages import UserMessages


@runtime_checkable
class LinkTransport(Protocol):
    """A transport in TorchRL's API that sends and receives over this library's links."""

    def link(self, model_id: str, peer: str) -> Link:
        """A link to the worker that this transport reaches.

        Raises ConfigurationError: the transport was not given a worker, or reaches several.
        """

    def listen(self, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Have ``accept`` called with each link by which a sender reaches us; calling what is returned ends that.

        Raises ConfigurationError: the transport was not given an address to listen at, or does not receive.
        """

    def user_messages(self) -> UserMessages:
        """The user's own messages on the transport's pipe. Raises ConfigurationError: it has no pipe."""

    def pipe_end(self) -> Any:
        """Our end of the transport's pipe. Raises ConfigurationError: it has no pipe."""

    def over(self, receiver: WeightReceiver) -> Any:
        """The transport over a receiver that a scheme made; None: there is none at the worker's end."""


def torchrl_transport(name: str) -> Any:
    """One of TorchRL's transport classes, by its public name.

    `create_transport` is TorchRL's API, so schemes have it; `weightsync.torchrl` is imported when it is called.
    """
    return getattr(importlib.import_module("weightsync"), name)


def connection_of(endpoint: Any) -> Any:
    """The connection: ``endpoint`` itself, its ``.pipe``, or the end of the pipe that it is a transport over.

    Raises ConfigurationError: nothing was given.
    """
    if endpoint is None:
        raise ConfigurationError(
            "The worker was given no pipe: pass this side's end of multiprocessing.Pipe(). Nothing has changed."
        )
    if isinstance(endpoint, LinkTransport):
        return endpoint.pipe_end()
    pipe = optional(endpoint, "pipe")
    return endpoint if pipe is MISSING else pipe
