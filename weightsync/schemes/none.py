"""`NoWeightSyncScheme`: for workers that need no weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Never

from torch import nn

from weightsync.clock import Deadline, Timeout
from weightsync.engine.receiver import WeightReceiver
from weightsync.engine.sender import WeightSender
from weightsync.errors import ConfigurationError
from weightsync.options import OnFailure
from weightsync.protocol.report import SyncReport
from weightsync.schemes.base import WeightSyncScheme
from weightsync.schemes.facade_services import torchrl_transport
from weightsync.schemes.sources import model_or_empty
from weightsync.schemes.worker_set import Groups
from weightsync.weights.meta_device import lacks_weights


class NoSender(WeightSender):
    """Its sends succeed with an empty report; weights are ignored."""

    def _known_layout(self) -> None:
        """There are no weights, so there is no layout."""

    def send(self, weights: Any = None, worker_ids: Any = None, **_: Any) -> SyncReport:
        """Send nothing.

        Raises:
            StateError: the sender is closed.
        """
        self._driver.require_open("send")
        return self._reporter.empty()

    def send_async(self, weights: Any = None, worker_ids: Any = None, **_: Any) -> SyncReport:
        """Send nothing.

        Raises:
            StateError: the sender is closed.
        """
        self._driver.require_open("send_async")
        return self._reporter.empty()

    def wait_async(self, **_: Any) -> SyncReport:
        """Wait for nothing."""
        return self._reporter.empty()


class NoReceiver(WeightReceiver):
    """Never has anything to apply."""

    def receive(self, timeout: float | None = 0.001) -> bool:
        """False, at once.

        Raises:
            StateError: the receiver is closed.
        """
        self._driver.require_open("receive")
        return False

    def apply_weights(
        self,
        weights: Any,
        *,
        inplace: bool = True,
        timeout: float | Timeout | None = Timeout.DEFAULT,
    ) -> None:
        """Write weights into the registered model; no sender is notified.

        Raises:
            StateError: the receiver is closed.
            ConfigurationError: no model is registered, or an unsupported type of weights; nothing was changed.
            LayoutError: they do not fit; nothing was changed.
        """
        self._driver.require_open("apply_weights")
        if self.model is None:
            raise ConfigurationError("no model is registered: call register_model() first.")
        self._scheme.strategy.apply_weights(self.model, weights, inplace)


class NoWeightSyncScheme(WeightSyncScheme):
    """Sends nothing: for workers without a model, or with one that never changes."""

    def init_on_sender(self, model_id: str | None = "policy", context: Any = None, **kwargs: Any) -> None:
        """Make a sender that needs nothing; all other arguments are ignored.

        Raises:
            StateError: initialised already.
        """
        self._sender_side.require_uninitialized()
        sender = self.create_sender()
        with self._events.reported_by(sender.report_to):
            sender.set_context(None, "policy" if model_id is None else model_id)
            sender.connect()
            self._sender_side.sender = sender

    def init_on_receiver(self, *, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Make a receiver that needs nothing: see `init_on_worker`.

        Raises:
            StateError: initialised already.
            ConfigurationError: the model came without its weights (on the meta device, as a TorchRL collector sends a
                policy to its workers), and will never receive any.
        """
        model = kwargs.get("model")
        if isinstance(model, nn.Module) and lacks_weights(model):
            raise ConfigurationError(
                f"the model {model_id!r} came without its weights (on the meta device), and NoWeightSyncScheme sends "
                "none. Give the collector policy_factory= instead of policy=, so that each worker makes its own, or "
                "another scheme."
            )
        self.init_on_worker(model_id, context, **kwargs)

    def init_on_worker(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Make a receiver that needs nothing; a model is kept, all other arguments are ignored.

        Raises:
            StateError: initialised already.
            ConfigurationError, LayoutError: weights cannot be applied to the model. The scheme is not initialised, and
                this may be called again.
        """
        self._receiver_side.require_uninitialized()
        receiver = self.create_receiver()
        with self._events.reported_by(lambda events: receiver.report_to(events, lambda: self.worker_idx)):
            receiver.set_context(None, model_id)
            if kwargs.get("model") is not None:
                receiver.register_model(model_or_empty(kwargs["model"]))
            self._become_worker({}, None)
            self._receiver_side.receiver = receiver

    def connect(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        timeout: float | Timeout | None = Timeout.START,
    ) -> None:
        """Connect this side, without waiting. It may be called again.

        Raises:
            StateError: this side is closed, or neither side was initialised.
            ConfigurationError: ``worker_idx`` on the sender's side, or ``weights`` on the receiver's.
        """
        side = self._next_side(worker_idx, weights)
        if side.participant is not None and side.rendezvous.is_connected:
            side.participant.require_open("connect")
        else:
            super().connect(worker_idx=worker_idx, weights=weights, timeout=timeout)

    def _connect_sender(self, weights: Any, deadline: Deadline) -> None:
        """Do not wait."""
        self._sender_side.begin_sends()

    def _connect_receiver(self, worker_idx: int | None, deadline: Deadline) -> None:
        """Do not wait, and receive nothing in the background."""

    def _groups(self, weights: Any, worker_ids: Sequence[int] | None) -> Groups:
        """The weights are ignored."""
        return [(None, None)]

    def send(
        self,
        weights: Any = None,
        worker_ids: int | Sequence[int] | None = None,
        *,
        timeout: float | Timeout | None = Timeout.DEFAULT,
        on_failure: OnFailure | str = OnFailure.RAISE,
    ) -> SyncReport:
        """Send nothing, whether this side is initialised and connected or not.

        Raises:
            StateError: the sender is closed.
        """
        return (self._sender_side.sender or self.create_sender()).send(weights, worker_ids)

    def receive(self, timeout: float | None = None) -> None:
        """Return None at once, on either side: nothing ever arrives.

        Raises:
            StateError: the receiver is closed.
        """
        receiver = self._receiver_side.receiver
        if receiver is not None:
            receiver.receive(timeout)

    def create_sender(self) -> WeightSender:
        """A sender that sends nothing."""
        return NoSender(self)

    def create_receiver(self) -> WeightReceiver:
        """A receiver that receives nothing."""
        return NoReceiver(self)

    def create_transport(self, pipe_or_context: Any = None) -> Any:
        """A transport that ignores what it is given."""
        return torchrl_transport("NoTransport")()

    def create_link(self, endpoint: Any, model_id: str, peer: str) -> Never:
        """There are no links.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError("NoWeightSyncScheme makes no links: use another scheme to reach workers.")
