"""What a user's own transport must offer: TorchRL's protocols."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from weightsync.weights.strategy import WeightStrategy


@runtime_checkable
class TransportBackend(Protocol):
    """A user's own transport to one worker. `WeightSender.send` calls it in a thread.

    Both generations' signatures work: ``send_weights(model_id, weights)`` and ``send_weights(weights)``. An exception
    is reported as REFUSED, with its traceback. A return is reported as APPLIED, with the evidence `Evidence.CALL`. A
    transport whose ``send_weights`` returns only when the worker has applied the weights declares that with the class
    attribute ``evidence = Evidence.ANSWER``.
    """

    def send_weights(self, model_id: str, weights: Any) -> Any:
        """Send weights, and wait until they have arrived, or are applied."""

    def receive_weights(
        self, timeout: float = 1.0, *, weights: Any = None, model: Any = None, strategy: WeightStrategy | None = None
    ) -> Any:
        """The next ``(model_id, weights)``, or None.

        ``timeout`` is all that weightsync gives it, if that; the keywords are for programs that call it themselves.
        """

    def check_connection(self) -> bool:
        """Whether the worker can be reached. False before a call: the worker is LOST."""


@runtime_checkable
class BareTransport(Protocol):
    """The minimum of a user's own transport: generation B's protocol, which has no ``check_connection``."""

    def send_weights(self, weights: Any) -> Any:
        """Send weights, and wait until they have arrived, or are applied."""

    def receive_weights(self, timeout: float | None = None) -> Any:
        """The next weights, or None."""


@runtime_checkable
class InitialSyncTransport(Protocol):
    """A transport that transfers the first weights in its own way."""

    def setup_connection_and_weights_on_sender(self) -> None:
        """Connect, and send the first weights."""

    def setup_connection_and_weights_on_receiver(
        self, *, worker_idx: int, weights: Any = None, model: Any = None, strategy: WeightStrategy | None = None
    ) -> Any:
        """Connect, and return the first weights."""
