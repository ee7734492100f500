"""The sending half of TorchRL's transport classes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from weightsync.clock import Timeout
from weightsync.engine.manual_ack import UPDATED, other_text
from weightsync.engine.sender import WeightSender
from weightsync.errors import RefusedError, StateError
from weightsync.options import OnFailure, OnPending
from weightsync.protocol._tables import State
from weightsync.protocol.report import OutcomeKind, SyncReport
from weightsync.schemes.arguments import UNSET, Unset, model_and_weights
from weightsync.torchrl.transports.foundation import Foundation


class SendingHalf(Foundation):
    """Sends, and waits for acks."""

    def send_weights(
        self,
        model_id: Any = UNSET,
        weights: Any = UNSET,
        *,
        timeout: float | Timeout | Unset | None = UNSET,
        on_failure: OnFailure | str = OnFailure.RAISE,
    ) -> SyncReport:
        """Send weights and wait until they are acked: ``(model_id, weights)``, or ``(weights)`` of "policy".

        An update of that model whose failure was raised already is given up first.

        Args:
            model_id: the model's id; alone: the weights.
            weights: a module, a TensorDict or a dict of tensors.
            timeout: seconds; default: the transport's.
            on_failure: "raise", or "report".

        Raises:
            StateError: an update sent by `send_weights_async` is outstanding, or the transport is closed.
            ConfigurationError: the transport was not told whom it reaches, or there are no weights. Nothing was sent.
            AckTimeoutError, WorkerLostError, RefusedError, LayoutError: as `WeightSender.send`.
        """
        model_id, weights = model_and_weights(model_id, weights)
        sender = self._sender(model_id)
        with self._followed(model_id, sender):
            return sender.send(
                weights, timeout=self._seconds(timeout), on_failure=on_failure, on_pending=self._pending(model_id)
            )

    def send_weights_async(self, model_id: Any = UNSET, weights: Any = UNSET) -> SyncReport:
        """Send weights and go on; `wait_ack` tells what became of them. The caller may change its tensors now.

        Raises:
            As `send_weights`, but for the outcomes.
        """
        model_id, weights = model_and_weights(model_id, weights)
        sender = self._sender(model_id)
        report = sender.send_async(weights, on_pending=self._pending(model_id))
        with self._lock:
            self._told.discard(model_id)
            self._remember(model_id, sender)
        return report

    def wait_ack(
        self, *, timeout: float | Timeout | Unset | None = UNSET, on_failure: OnFailure | str = OnFailure.RAISE
    ) -> SyncReport:
        """Wait for the ack of the update sent first of those that are outstanding.

        Raises:
            StateError: nothing is outstanding.
            AckTimeoutError: it did not come in time; it can be waited for again.
            WorkerLostError, RefusedError: as `WeightSender.wait_async`.
        """
        with self._lock:
            if not self._outstanding:
                raise StateError(
                    type(self).__name__, "closed" if self._closed else "ready", "wait_ack", ["send_weights_async"]
                )
            model_id = self._outstanding[0]
            sender = self._senders[model_id]
        with self._followed(model_id, sender):
            return sender.wait_async(timeout=self._seconds(timeout), on_failure=on_failure)

    def check_ack(self, message: str = UPDATED) -> SyncReport:
        """Wait for the ack, as `wait_ack`, and see to it that its text is ``message``.

        Raises:
            RefusedError: (a RuntimeError) the ack has another text.
            StateError, AckTimeoutError, WorkerLostError: as `wait_ack`.
        """
        if message == UPDATED:
            return self.wait_ack()
        report = self.wait_ack(on_failure=OnFailure.REPORT)
        for worker, outcome in report.outcomes.items():
            if outcome.kind is OutcomeKind.APPLIED:
                text = f"worker {worker} acked version {report.version} with {UPDATED!r}, not {message!r}"
                raise RefusedError(text, report, {worker: text})
            if outcome.reason != other_text(message):
                report.raise_on_failure()
        return report

    def _sender(self, model_id: str) -> WeightSender:
        with self._lock:
            self._require_open("send_weights")
            if model_id not in self._senders:
                sender = WeightSender(self._services)
                sender.set_context(None, model_id)
                for worker_id, endpoint in self._endpoints().items():
                    sender.add_worker(worker_id, endpoint)
                self._senders[model_id] = sender
            return self._senders[model_id]

    def _pending(self, model_id: str) -> OnPending:
        return OnPending.SUPERSEDE if model_id in self._told else OnPending.RAISE

    @contextlib.contextmanager
    def _followed(self, model_id: str, sender: WeightSender) -> Iterator[None]:
        """Whatever happens inside is told to the caller; what is outstanding afterwards may be given up."""
        try:
            yield
        except StateError:
            raise
        except BaseException:
            self._note(model_id, sender)
            raise
        else:
            self._note(model_id, sender)

    def _note(self, model_id: str, sender: WeightSender) -> None:
        with self._lock:
            self._remember(model_id, sender)
            if model_id in self._outstanding:
                self._told.add(model_id)
            else:
                self._told.discard(model_id)

    def _remember(self, model_id: str, sender: WeightSender) -> None:
        outstanding = sender.state is State.PENDING_ASYNC
        if outstanding and model_id not in self._outstanding:
            self._outstanding.append(model_id)
        elif not outstanding and model_id in self._outstanding:
            self._outstanding.remove(model_id)

    def _seconds(self, timeout: float | Timeout | Unset | None) -> float | Timeout | None:
        return self.timeout if isinstance(timeout, Unset) else timeout
