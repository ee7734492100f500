"""The receiving half of TorchRL's transport classes."""

from __future__ import annotations

from typing import Any

from weightsync.clock import Deadline
from weightsync.engine.manual_ack import UPDATED
from weightsync.engine.receiver import WeightReceiver
from weightsync.errors import StateError
from weightsync.schemes.arguments import POLICY, UNSET, Form, Unset
from weightsync.torchrl.transports.foundation import Foundation
from weightsync.weights.strategy import WeightStrategy


class ReceivingHalf(Foundation):
    """Hands updates out, and acks them by hand."""

    def receive_weights(
        self,
        timeout: float | Unset | None = UNSET,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any:
        """The weights of the next update, which stays pending until `send_ack`.

        Args:
            timeout: seconds to wait for one; None: until one comes or the sender is gone; default: 1 s in
                generation A, None in B.
            weights: a TensorDict or dict that they are written into, too.
            model: what they are applied to, if a strategy is given.
            strategy: applies them to the model.

        Returns:
            Generation A: ``(model_id, weights)``; B: the weights. None: none came.

        Raises:
            StateError: the transport is closed.
            ConfigurationError: the transport does not receive, or was not told from where.
            LayoutError: they do not fit ``weights`` or the model, which are unchanged; the sender was told.
            TransportError: the sender is gone.
        """
        found = self._next(Deadline(self._default_wait() if isinstance(timeout, Unset) else timeout))
        if found is None:
            return None
        model_id, given = found
        try:
            if weights is not None:
                (strategy or self._services.strategy).apply_weights(weights, given)
            if model is not None and strategy is not None:
                strategy.apply_weights(model, given)
        except Exception as error:
            self._receivers[model_id].nack(error)
            raise
        return (model_id, given) if self._form is Form.A else given

    def send_ack(self, message: str = UPDATED) -> None:
        """Ack the update that was received last: the sender's outcome rests on the evidence `CALL`.

        Args:
            message: "updated": the weights are applied. Any other text tells the sender that they are not, unless its
                `check_ack` expects that text.

        Raises:
            StateError: no update that was received is pending.
        """
        with self._lock:
            if self._last is None:
                raise StateError(type(self).__name__, "ready", "send_ack", ["receive_weights"])
            receiver = self._receivers[self._last]
        receiver.ack(message)

    def _default_wait(self) -> float | None:
        return 1.0 if self._form is Form.A else None

    def _next(self, deadline: Deadline) -> tuple[str, Any] | None:
        """The next update that arrives for any model."""
        receiver = self._receiver(POLICY)
        weights = receiver.take_update(deadline.remaining)
        if weights is None:
            return None
        self._last = POLICY
        return POLICY, weights

    def _receiver(self, model_id: str) -> WeightReceiver:
        with self._lock:
            self._require_open("receive_weights")
            if model_id not in self._receivers:
                receiver = WeightReceiver(self._services)
                receiver.set_context(None, model_id)
                receiver.register_worker_transport(None)
                self._receivers[model_id] = receiver
            return self._receivers[model_id]
