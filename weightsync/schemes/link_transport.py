"""What a scheme asks of TorchRL's transport classes; the classes themselves are in `weightsync.torchrl`."""

from __future__ import annotations

import abc
import importlib
from collections.abc import Callable
from typing import Any

from weightsync.engine.receiver import WeightReceiver
from weightsync.errors import ConfigurationError
from weightsync.transports.base import Link
from weightsync.transports.pipe.user_messages import UserMessages
from weightsync.weights.context import MISSING, optional


class LinkTransport(abc.ABC):
    """A transport in TorchRL's API that sends and receives over this library's links."""

    @abc.abstractmethod
    def link(self, model_id: str, peer: str) -> Link:
        """A link to the worker that this transport reaches.

        Raises:
            ConfigurationError: the transport was not told whom it reaches, or reaches several.
        """

    @abc.abstractmethod
    def listen(self, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Have ``accept`` called with each link by which a sender reaches us; what is returned ends that.

        Raises:
            ConfigurationError: the transport was not told where, or does not receive.
        """

    @abc.abstractmethod
    def user_messages(self) -> UserMessages:
        """The user's own messages on the transport's pipe.

        Raises:
            ConfigurationError: it has none.
        """

    @property
    @abc.abstractmethod
    def connection(self) -> Any:
        """The connection below.

        Raises:
            ConfigurationError: there is none.
        """

    @abc.abstractmethod
    def over(self, receiver: WeightReceiver) -> Any:
        """The transport over a receiver that a scheme has made; None: there is none at the worker's end."""


def torchrl_transport(name: str) -> Any:
    """One of TorchRL's transport classes, by its public name.

    `create_transport` is TorchRL's API, so schemes have it; only whoever calls it loads `weightsync.torchrl`.
    """
    return getattr(importlib.import_module("weightsync"), name)


def connection_of(endpoint: Any) -> Any:
    """The connection meant by a pipe's end, by an object whose ``.pipe`` is that, or by a transport over one.

    Raises:
        ConfigurationError: nothing was given.
    """
    if endpoint is None:
        raise ConfigurationError(
            "The worker was given no pipe: pass this side's end of multiprocessing.Pipe(). Nothing has changed."
        )
    if isinstance(endpoint, LinkTransport):
        return endpoint.connection
    pipe = optional(endpoint, "pipe")
    return endpoint if pipe is MISSING else pipe
