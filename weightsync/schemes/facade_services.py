"""The interfaces between schemes and TorchRL's transport classes, which are in `weightsync.torchrl`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import nn

from weightsync import names
from weightsync.engine.context import MISSING, optional
from weightsync.engine.packer import Packer
from weightsync.engine.receiver import WeightReceiver
from weightsync.errors import ConfigurationError, StateError
from weightsync.transports.base import Link
from weightsync.transports.pipe.user_messages import UserMessages
from weightsync.weights.strategy import WeightStrategy
from weightsync.weights.target import Mode

Class = TypeVar("Class", bound=type[Any])


class CreatesLinks(Protocol):
    """Creates the links of a facade."""

    def _create_link(self, endpoint: Any, model_id: str, peer: str) -> Link: ...

    def listen(self, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Have ``accept`` called with each link by which a sender reaches us."""

    def user_messages(self) -> UserMessages:
        """The user's own messages."""

    def _published(self, model_id: str, weights: Any) -> None: ...


class FacadeServices:
    """Does for the senders and receivers of a facade what a scheme does for its own: `SchemeServices`."""

    #: What a facade returns is always a copy.
    apply_mode = Mode.COPY
    #: All weights are received.
    applied_selection = None

    def __init__(self, facade: CreatesLinks, strategy: WeightStrategy | str) -> None:
        # A weak reference: without a cycle, all that a transport holds is freed together with it.
        self._reference = weakref.ref(facade)
        self.strategy = strategy if isinstance(strategy, WeightStrategy) else WeightStrategy(strategy)

    @property
    def _facade(self) -> CreatesLinks:
        facade = self._reference()
        if facade is None:
            raise StateError(
                "transport", "garbage-collected", "link", [], "Keep the transport while its links are used."
            )
        return facade

    @property
    def packer(self) -> Packer:
        """A new packer."""
        return Packer()

    def create_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        """The facade's link to a worker."""
        return self._facade._create_link(endpoint, model_id, peer)

    def listen(self, endpoint: Any, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
        """The facade's links to senders."""
        return self._facade.listen(model_id, accept)

    def user_messages(self, endpoint: Any) -> UserMessages:
        """The user's own messages, where the facade has a pipe."""
        return self._facade.user_messages()

    def prepare_weights(self, weights: Any, model_id: str, strategy: WeightStrategy, context: Any = None) -> Any:
        """A module is extracted; anything else is taken as it is. Raises ConfigurationError: there are none."""
        if weights is None:
            raise ConfigurationError("A transport has no model of its own: give it weights. Nothing was sent.")
        return strategy.extract_weights(weights) if isinstance(weights, nn.Module) else weights

    def weights_to_send(self, weights: Any, model_id: str, context: Any = None) -> Any:
        """As `prepare_weights`, since a facade's user may be shown what is sent."""
        return self.prepare_weights(weights, model_id, self.strategy, context)

    def published(self, model_id: str, weights: Any) -> None:
        """Pass each version to the facade before it is dispatched."""
        self._facade._published(model_id, weights)

    def transport_of(self, receiver: Any, endpoint: Any) -> Any:
        """The facade that made the receiver."""
        return self._facade


@runtime_checkable
class LinkTransport(Protocol):
    """A transport in TorchRL's API that sends and receives over this library's links."""

    def link(self, model_id: str, peer: str) -> Link:
        """A link to the worker that this transport reaches.

        Raises ConfigurationError: the transport was not given a worker, or reaches several.
        """

    def listen(self, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Have ``accept`` called with each link by which a sender reaches us; the returned function ends that.

        Raises ConfigurationError: the transport was not given an address to listen at, or does not receive.
        """

    def user_messages(self) -> UserMessages:
        """The user's own messages on the transport's pipe. Raises ConfigurationError: it has no pipe."""

    def pipe_end(self) -> Any:
        """Our end of the transport's pipe. Raises ConfigurationError: it has no pipe."""

    def over(self, receiver: WeightReceiver) -> Any:
        """The transport over a receiver that a scheme made; None if there is none at the worker's end."""


_transports: dict[str, Any] = {}


def torchrl_class(transport: Class) -> Class:
    """A class decorator: schemes make this transport where TorchRL's API has them make the one of the same name."""
    _transports[transport.__name__] = transport
    return transport


def torchrl_transport(name: str) -> Any:
    """One of TorchRL's transport classes, by its public name.

    `create_transport` is part of TorchRL's API, so schemes have it; only a call of it imports `weightsync.torchrl`.
    """
    if name not in _transports:
        names.lookup(name)  # its module registers it
    return _transports[name]


def nothing_to_stop() -> None:
    """What `listen` returns where it has given its only link: a receiver keeps it once, however many links it gets."""


def connection_of(endpoint: Any) -> Any:
    """The connection: ``endpoint`` itself, its ``.pipe``, or, if it is a transport, its end of the pipe.

    Raises ConfigurationError: nothing was given.
    """
    if endpoint is None:
        raise ConfigurationError("The worker was given no pipe: pass this side's end of multiprocessing.Pipe().")
    if isinstance(endpoint, LinkTransport):
        return endpoint.pipe_end()
    pipe = optional(endpoint, "pipe")
    return endpoint if pipe is MISSING else pipe
