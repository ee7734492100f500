"""What senders and receivers need from their scheme."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from weightsync.engine.packer import Packer
from weightsync.transports.base import Link
from weightsync.transports.pipe.user_messages import UserMessages
from weightsync.weights.selection import Selection
from weightsync.weights.strategy import WeightStrategy
from weightsync.weights.target import Mode


class SchemeServices(Protocol):
    """A scheme, as its senders and receivers see it."""

    @property
    def strategy(self) -> WeightStrategy:
        """How weights are read from a model, and applied by hand."""

    @property
    def apply_mode(self) -> Mode:
        """How arrived weights become live."""

    @property
    def applied_selection(self) -> Selection | None:
        """Which weights of a worker's model are received; None: all."""

    @property
    def packer(self) -> Packer:
        """A new packer, with the type of buffer that suits the scheme's links."""

    def lay_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        """A link over ``endpoint`` (a pipe's end, or a context that has one) to ``peer``, a name for messages."""

    def listen(self, endpoint: Any, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Call ``accept`` with each link over which a sender reaches us at ``endpoint``, including the first.

        It may be called at once, and later from any thread. Call the returned function to stop listening.
        """

    def user_messages(self, endpoint: Any) -> UserMessages:
        """The user's own messages on the pipe behind ``endpoint``."""

    def transport_of(self, receiver: Any, endpoint: Any) -> Any:
        """One of TorchRL's transport classes over ``receiver``, which listens at ``endpoint``."""

    def weights_to_send(self, weights: Any, model_id: str, context: Any = None) -> Any:
        """What is packed and sent for these arguments: a module, a TensorDict or a dict."""

    def published(self, model_id: str, weights: Any) -> None:
        """Called with each version's weights before it is dispatched."""
