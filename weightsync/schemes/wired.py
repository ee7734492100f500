"""What a scheme is to the senders and receivers that it wires: their links, their packer, their weights."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch.nn

from weightsync.engine.packer import Packer
from weightsync.engine.receiver import WeightReceiver
from weightsync.engine.sender import WeightSender
from weightsync.errors import ConfigurationError
from weightsync.options import Verify
from weightsync.schemes.link_transport import LinkTransport
from weightsync.schemes.peers.user_protocols import BareTransport
from weightsync.schemes.peers.user_receiving import hear
from weightsync.schemes.peers.user_transport import user_link
from weightsync.schemes.rendezvous import Rendezvous
from weightsync.schemes.sources import is_weightless
from weightsync.transports.base import Link
from weightsync.transports.pipe.user_messages import UserMessages
from weightsync.weights.context import optional
from weightsync.weights.model_path import _resolve_model
from weightsync.weights.strategy import WeightStrategy
from weightsync.weights.target import Mode


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

        Here: over a transport, TorchRL's or of the user's own, which ``endpoint`` is, or which `create_transport` makes
        of it.

        Raises:
            ConfigurationError: no link can be made of it.
        """
        transport = self._transport_for(endpoint)
        if isinstance(transport, LinkTransport):
            return transport.link(model_id, peer)
        if transport is None:
            raise ConfigurationError(
                f"{type(self).__name__} lays no links: give it a TransportBackend, have create_transport() return one, "
                "or override lay_link() to return a Link of your own."
            )
        return user_link(transport, peer)

    def _transport_for(self, endpoint: Any) -> LinkTransport | BareTransport | None:
        """The transport by which an endpoint is reached, TorchRL's or of the user's own; None: there is none."""
        made = endpoint if isinstance(endpoint, BareTransport) else self.create_transport(endpoint)
        return made if isinstance(made, LinkTransport | BareTransport) else None

    def listen(self, endpoint: Any, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Give ``accept`` the links by which senders reach us at ``endpoint``; here there is just one, at once.

        A transport of the user's own, which ``endpoint`` is or which `create_transport` makes of it, is asked for
        weights by a thread.

        Raises:
            ConfigurationError: no link can be made of the endpoint.
        """
        transport = self._transport_for(endpoint)
        lays_links = type(self).lay_link is not Wired.lay_link
        if isinstance(transport, LinkTransport) and (transport is endpoint or not lays_links):
            return transport.listen(model_id, accept)
        if transport is not None and not isinstance(transport, LinkTransport):
            return hear(transport, model_id, self.strategy, accept)
        accept(self.lay_link(endpoint, model_id, "the sender"))
        return _nothing

    def user_messages(self, endpoint: Any) -> UserMessages:
        """The user's own messages on the pipe behind ``endpoint``.

        Raises:
            ConfigurationError: this scheme has no pipes.
        """
        transport = self._transport_for(endpoint)
        if isinstance(transport, LinkTransport):
            return transport.user_messages()
        raise ConfigurationError(f"{type(self).__name__} has no pipes that could carry messages of your own.")

    def transport_of(self, receiver: Any, endpoint: Any) -> Any:
        """The transport over ``receiver``, which listens at ``endpoint``: its ``_transport``, or the user's own.

        Raises:
            ConfigurationError: this scheme has none at the worker's end.
        """
        transport = self._transport_for(endpoint)
        found = transport.over(receiver) if isinstance(transport, LinkTransport) else transport
        if found is not None:
            return found
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
        if is_weightless(weights) and self._is_ours(weights):
            return {}
        found = weights
        if weights is None or isinstance(weights, str):
            context = context if context is not None else self._context()
            found = self._registered(model_id, context) if weights is None else _resolve_model(context, weights)
        return strategy.extract_weights(found) if isinstance(found, torch.nn.Module) else found

    def _is_ours(self, model: Any) -> bool:
        """Whether this is the model that was given at init, or the context's policy."""
        return any(model is known for known in (self._given.get("model"), optional(self.context, "policy")))

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
