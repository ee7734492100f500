"""`NoTransport`: for workers that need no weights."""

from __future__ import annotations

from typing import Any

from weightsync.engine.copies import Closing
from weightsync.schemes.facade_services import torchrl_class


@torchrl_class
class NoTransport(Closing):
    """Ignores what is sent, and never receives anything. Like the other transports it may be closed, or be used by a
    `with` block; nothing changes then.
    """

    def send_weights(
        self, first: Any = None, second: Any = None, /, *, model_id: Any = None, weights: Any = None
    ) -> None:
        """Do nothing."""

    def send_weights_async(
        self, first: Any = None, second: Any = None, /, *, model_id: Any = None, weights: Any = None
    ) -> None:
        """Do nothing."""

    def wait_ack(self) -> None:
        """There is nothing to wait for."""

    def receive_weights(
        self, timeout: float | None = 1.0, *, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> None:
        """Nothing ever arrives."""

    def send_ack(self, message: str = "updated") -> None:
        """There is no sender to ack to."""

    def check_ack(self, message: str = "updated") -> None:
        """There is nothing to wait for."""

    def check_connection(self) -> bool:
        """True: there is no connection that could fail."""
        return True

    def setup_connection_and_weights_on_sender(self) -> None:
        """There is nothing to connect to."""

    def setup_connection_and_weights_on_receiver(
        self, *, worker_idx: int, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> None:
        """There is nothing to connect to."""

    def close(self) -> None:
        """Do nothing."""

    def _close_on_error(self, error: BaseException) -> None:
        """There is no sender to notify."""
