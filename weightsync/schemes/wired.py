"""What a scheme is to the senders and receivers that it wires: their links, their packer, their weights."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch.nn

from weightsync.compat.base import BareTransport
from weightsync.compat.facade import TransportFacade
from weightsync.compat.none import NoTransport
from weightsync.compat.user import user_link
from weightsync.driving.packing import Packer
from weightsync.errors import ConfigurationError
from weightsync.options import Verify
from weightsync.paths import _resolve_model
from weightsync.receiver import WeightReceiver
from weightsync.schemes.rendezvous import Rendezvous
from weightsync.sender import WeightSender
from weightsync.strategy import WeightStrategy
from weightsync.target import Mode
from weightsync.transports.base import Link
from weightsync.transports.user import UserMessages


class Wired(Rendezvous, abc.ABC):
    """A scheme's lower half: it makes senders and receivers, and is asked by them."""

    _verify: Verify

    #: How arrived weights become live.
    apply_mode = Mode.COPY

    @abc.abstractmethod
    def create_transport(self, pipe_or_context: Any) -> Any:
        """A link to one worker, or to the sender."""

    def create_sender(self) -> WeightSender:
        """A sender without workers: `register_worker` wires it."""
        return WeightSender(self)

    def create_receiver(self) -> WeightReceiver:
        """A receiver without a link: `register_model` and `register_worker_transport` wire it."""
        return WeightReceiver(self)

    @property
    def strategy(self) -> WeightStrategy:
        """How weights are taken from a model; equals and hashes like its name."""
        return self._strategy

    @property
    def packer(self) -> Packer:
        """A new packer with buffers of the kind that this scheme's links carry best."""
        return Packer(self._verify)

    def lay_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        """A link over ``endpoint`` for one model; ``peer`` says who is at the other end, for messages to people.

        Here: over a transport of the user's own, which ``endpoint`` is, or which `create_transport` makes of it.

        Raises:
            ConfigurationError: no link can be made of it.
        """
        users = self._users_transport(endpoint)
        if users is None:
            raise ConfigurationError(
                f"{type(self).__name__} lays no links: give it a TransportBackend, have create_transport() return one, "
                "or override lay_link() to return a Link of your own."
            )
        return user_link(users, peer)

    def _users_transport(self, endpoint: Any) -> BareTransport | None:
        """The transport of the user's own by which an endpoint is reached; None: the scheme has links of its own."""
        made = endpoint if isinstance(endpoint, BareTransport) else self.create_transport(endpoint)
        ours = isinstance(made, TransportFacade | NoTransport) or not isinstance(made, BareTransport)
        return None if ours else made

    def listen(self, endpoint: Any, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Give ``accept`` the links by which senders reach us at ``endpoint``; here there is just one, at once.

        Raises:
            ConfigurationError: no link can be made of the endpoint.
        """
        if self._users_transport(endpoint) is not None:
            raise ConfigurationError(
                "A transport of your own brings weights by its own receive_weights(): call that in the worker, and "
                "WeightStrategy.apply_weights()."
            )
        accept(self.lay_link(endpoint, model_id, "the sender"))
        return _nothing

    def user_messages(self, endpoint: Any) -> UserMessages:
        """The user's own messages on the pipe behind ``endpoint``.

        Raises:
            ConfigurationError: this scheme has no pipes.
        """
        raise ConfigurationError(f"{type(self).__name__} has no pipes that could carry messages of your own.")

    def transport_of(self, receiver: Any, endpoint: Any) -> Any:
        """TorchRL's transport class over ``receiver``, which listens at ``endpoint``: its ``_transport``.

        Raises:
            ConfigurationError: this scheme has none at the worker's end.
        """
        raise ConfigurationError(f"{type(self).__name__} has no transport at the worker's end: use the receiver.")

    def published(self, model_id: str, weights: Any) -> None:
        """Called with each version's weights before it is dispatched; keeps nothing of them."""
        return

    def prepare_weights(self, weights: Any, model_id: str, strategy: WeightStrategy, context: Any = None) -> Any:
        """The weights that a send means.

        Args:
            weights: None: the cached weights, else the model found by `get_model`, the path ``model_id`` on the
                context, its fallback policy, or the model given at init, in this order. A module is extracted; a str is
                a path on the context; anything else is taken as it is.
            model_id: the model that is sent.
            strategy: how a module's weights are extracted.
            context: where models are found; None: the one given at init.

        Raises:
            ConfigurationError: None was given and no model is found.
            ModelPathError: a path does not resolve.
        """
        found = weights
        if weights is None or isinstance(weights, str):
            context = context if context is not None else self._context()
            found = self._registered(model_id, context) if weights is None else _resolve_model(context, weights)
        return strategy.extract_weights(found) if isinstance(found, torch.nn.Module) else found

    def _registered(self, model_id: str, context: Any) -> Any:
        found = self._found(model_id, context)
        if found is not None:
            return found
        raise ConfigurationError(
            f"send() was given no weights and no model is registered for {model_id!r}: pass weights, or give "
            "init_on_sender() model=, source_model=, cached_weights= or a context that has the model. Nothing was sent."
        )


def _nothing() -> None:
    return None
