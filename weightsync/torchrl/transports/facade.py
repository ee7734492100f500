"""`TransportFacade`: the base of TorchRL's transport classes, over our senders and receivers."""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from weightsync.clock import Deadline, Timeout, seconds
from weightsync.engine.copies import Configured
from weightsync.engine.manual_ack import UPDATED, manual_refusal_reason
from weightsync.engine.receiver import WeightReceiver
from weightsync.engine.sender import WeightSender
from weightsync.errors import ConfigurationError, RefusedError, StateError
from weightsync.options import OnFailure, OnPending
from weightsync.protocol._tables import State
from weightsync.protocol.report import OutcomeKind, SyncReport
from weightsync.schemes.arguments import POLICY, UNSET, Generation, UnsetType, model_and_weights
from weightsync.schemes.facade_services import FacadeServices
from weightsync.transports.base import Link
from weightsync.transports.pipe.user_messages import UserMessages
from weightsync.transports.process import forget_after_fork
from weightsync.weights.strategy import WeightStrategy, refuse_misfit, strategy_of

#: What a user does to receive from another sender: the receivers of a facade are hidden.
_ANOTHER_SENDER: Final = "make a new transport, over a new pipe, new queues or another store"


class TransportFacade(Configured):
    """The methods that all of TorchRL's transport classes have; each class creates its own links.

    A subclass overrides `_create_link` to send, `listen` to receive, `check_connection`, and `_endpoints` if it may not
    have been given a worker.

    The methods use a `WeightSender` and a `WeightReceiver` for each model, made on first use: a late ack never counts
    for a newer update, a dead peer ends a wait, and every failure is raised. A pickled, copied or forked transport
    carries only its configuration.

    Args:
        generation: the generation of TorchRL whose results this transport returns.
        timeout: seconds that `send_weights`, `wait_ack` and `check_ack` wait; None: forever; default:
            `WEIGHTSYNC_TIMEOUT` or 60.
        strategy: the format of the weights returned, and how modules are extracted.
    """

    _not_copied: tuple[str, ...] = (
        *("_senders", "_receivers", "_outstanding", "_reported", "_last", "_lock", "_services", "_closed"),
    )

    #: Whether weights arrive at this end; if not, `receive_weights` returns None at once.
    _receives = True

    def __init__(
        self,
        *,
        generation: Generation = Generation.A,
        timeout: float | Timeout | None = Timeout.DEFAULT,
        strategy: WeightStrategy | str = "tensordict",
    ) -> None:
        seconds(timeout)
        self._generation = generation
        self.timeout = timeout
        self._strategy = strategy
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._services = FacadeServices(self, self._strategy)
        self._senders: dict[str, WeightSender] = {}
        self._receivers: dict[str, WeightReceiver] = {}
        # Models whose update is outstanding, oldest first, and those of them whose failure was already reported.
        self._outstanding: list[str] = []
        self._reported: set[str] = set()
        self._last: str | None = None
        self._closed = False
        forget_after_fork(self)

    def _endpoints(self) -> Mapping[int, Any]:
        """For `_create_link`, the endpoints of the workers that `send_weights` reaches, by id. Here one, with id 0.

        Raises ConfigurationError: the transport was not given a worker. Nothing was sent.
        """
        return {0: None}

    def _create_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        """The sender's end of a link.

        Raises ConfigurationError: the transport was not given a worker, or does not send. Nothing was sent.
        """
        raise ConfigurationError(f"{type(self).__name__} does not send: use it at the worker's end.")

    def listen(self, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Have ``accept`` called with each link by which a sender reaches us; the returned function ends that.

        Raises:
            ConfigurationError: the transport was not given an address to listen at, or does not receive.
        """
        raise ConfigurationError(f"{type(self).__name__} does not receive: use it at the trainer's end.")

    def user_messages(self) -> UserMessages:
        """The user's own messages on the transport's pipe.

        Raises:
            ConfigurationError: it has no pipe.
        """
        raise ConfigurationError(f"{type(self).__name__} has no pipe: send your own messages over another connection.")

    def _published(self, model_id: str, weights: Any) -> None:
        """Called with each version's weights before it is dispatched."""

    @abc.abstractmethod
    def check_connection(self) -> bool:
        """Whether the transport can be used now."""

    def link(self, model_id: str, peer: str) -> Link:
        """A link to the worker that this transport reaches.

        Raises:
            ConfigurationError: the transport was not given a worker, or reaches several.
        """
        endpoints = list(self._endpoints().values())
        if len(endpoints) != 1:
            raise ConfigurationError(
                f"{type(self).__name__} reaches {len(endpoints)} workers: a scheme's create_transport() makes one "
                "transport for each."
            )
        return self._create_link(endpoints[0], model_id, peer)

    def pipe_end(self) -> Any:
        """Our end of the pipe.

        Raises:
            ConfigurationError: there is no pipe.
        """
        raise ConfigurationError(f"{type(self).__name__} has no pipe.")

    def over(self, receiver: WeightReceiver) -> Any:
        """None: use the scheme's receiver."""
        return None

    def send_weights(
        self,
        first: Any = UNSET,
        second: Any = UNSET,
        /,
        *,
        model_id: Any = UNSET,
        weights: Any = UNSET,
        timeout: float | Timeout | UnsetType | None = UNSET,
        on_failure: OnFailure | str = OnFailure.RAISE,
    ) -> SyncReport:
        """Send weights and wait until they are acked: ``(model_id, weights)``, or ``(weights)`` of "policy".

        An update of that model whose failure was raised already is abandoned first.

        Args:
            first: the model's id, or the weights.
            second: the other one of these.
            model_id: the model's id, by its name.
            weights: a module, a TensorDict or a dict of tensors.
            timeout: seconds; default: the transport's.
            on_failure: "raise", or "report".

        Raises:
            StateError: an update sent by `send_weights_async` is outstanding, or the transport is closed.
            ConfigurationError: the transport was not given a worker, or there are no weights. Nothing was sent.
            AckTimeoutError, WorkerLostError, RefusedError, LayoutError: as for `WeightSender.send`.
        """
        model_id, weights = model_and_weights(first, second, model_id, weights)
        sender = self._sender(model_id)
        pending = self._pending(model_id, sender, "send_weights")
        with self._track_outcome(model_id, sender):
            return sender.send(
                weights, timeout=self._timeout_or_default(timeout), on_failure=on_failure, on_pending=pending
            )

    def send_weights_async(
        self, first: Any = UNSET, second: Any = UNSET, /, *, model_id: Any = UNSET, weights: Any = UNSET
    ) -> SyncReport:
        """Send weights and return; `wait_ack` reports the outcome. After the return the caller may change its tensors.

        Raises:
            WeightSyncError: as for `send_weights`, except for failed outcomes.
        """
        model_id, weights = model_and_weights(first, second, model_id, weights)
        sender = self._sender(model_id)
        report = sender.send_async(weights, on_pending=self._pending(model_id, sender, "send_weights_async"))
        with self._lock:
            self._reported.discard(model_id)
            self._update_outstanding(model_id, sender)
        return report

    def wait_ack(
        self, *, timeout: float | Timeout | UnsetType | None = UNSET, on_failure: OnFailure | str = OnFailure.RAISE
    ) -> SyncReport:
        """Wait for the ack of the oldest outstanding update.

        Raises:
            StateError: nothing is outstanding.
            AckTimeoutError: it did not arrive in time; it can be waited for again.
            WorkerLostError, RefusedError: as for `WeightSender.wait_async`.
        """
        with self._lock:
            if not self._outstanding:
                self._require_open("wait_ack")
                raise StateError(type(self).__name__, "ready", "wait_ack", ["send_weights_async"])
            model_id = self._outstanding[0]
            sender = self._senders[model_id]
        with self._track_outcome(model_id, sender):
            return sender.wait_async(timeout=self._timeout_or_default(timeout), on_failure=on_failure)

    def check_ack(self, message: str = UPDATED) -> SyncReport:
        """Wait for the ack, as `wait_ack` does, and check that its text is ``message``.

        Raises:
            RefusedError: (a RuntimeError) the ack has another text.
            StateError, AckTimeoutError, WorkerLostError: as for `wait_ack`.
        """
        if message == UPDATED:
            return self.wait_ack()
        report = self.wait_ack(on_failure=OnFailure.REPORT)
        for worker, outcome in report.outcomes.items():
            if outcome.kind is OutcomeKind.APPLIED:
                text = f"worker {worker} acked version {report.version} with {UPDATED!r}, not {message!r}"
                raise RefusedError(text, report, {worker: text})
            if outcome.reason != manual_refusal_reason(message):
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

    def _pending(self, model_id: str, sender: WeightSender, method: str) -> OnPending:
        """What a send does about an outstanding update. Raises StateError: its outcome was not reported yet."""
        if model_id in self._reported:
            return OnPending.SUPERSEDE
        if sender.state is State.PENDING_ASYNC:
            hint = f"version {sender.version} of {model_id!r} is outstanding. wait_ack() waits for its ack."
            raise StateError(type(self).__name__, sender.state.value, method, ["wait_ack", "check_ack"], hint)
        return OnPending.RAISE

    @contextlib.contextmanager
    def _track_outcome(self, model_id: str, sender: WeightSender) -> Iterator[None]:
        """Every failure inside is reported to the caller, so an update that is then outstanding may be abandoned."""
        try:
            yield
        except StateError:
            raise
        except BaseException:
            self._record_outcome(model_id, sender)
            raise
        else:
            self._record_outcome(model_id, sender)

    def _record_outcome(self, model_id: str, sender: WeightSender) -> None:
        with self._lock:
            if self._senders.get(model_id) is not sender:
                return  # it was closed meanwhile: what is outstanding now is another sender's
            self._update_outstanding(model_id, sender)
            if model_id in self._outstanding:
                self._reported.add(model_id)
            else:
                self._reported.discard(model_id)

    def _update_outstanding(self, model_id: str, sender: WeightSender) -> None:
        outstanding = sender.state is State.PENDING_ASYNC
        if outstanding and model_id not in self._outstanding:
            self._outstanding.append(model_id)
        elif not outstanding and model_id in self._outstanding:
            self._outstanding.remove(model_id)

    def _timeout_or_default(self, timeout: float | Timeout | UnsetType | None) -> float | Timeout | None:
        return self.timeout if isinstance(timeout, UnsetType) else timeout

    def receive_weights(
        self,
        timeout: float | UnsetType | None = UNSET,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | str | None = None,
    ) -> Any:
        """The weights of the next update, which stays pending until `send_ack`.

        Args:
            timeout: seconds to wait for one; None: until one arrives or the sender is gone; default: 1 s in
                generation A, None in B.
            weights: a TensorDict or dict that the weights are also written into.
            model: the model that the weights are applied to, if a strategy is given.
            strategy: applies them to the model; a `WeightStrategy`, or its name.

        Returns:
            Generation A: ``(model_id, weights)``; B: the weights. None: no weights arrived.

        Raises:
            StateError: the transport is closed.
            ConfigurationError: the transport does not receive, or was not given an address to listen at; or there is
                no strategy of that name.
            LayoutError: the weights do not fit ``weights`` or the model, which are unchanged; the sender was notified.
            TransportError: the sender is gone.
        """
        if not self._receives:
            return None
        strategy_object = None if strategy is None else strategy_of(strategy)
        update = self._next(Deadline(self._default_wait() if isinstance(timeout, UnsetType) else timeout))
        if update is None:
            return None
        model_id, received = update
        try:
            self._write(received, weights, model, strategy_object)
        except BaseException as error:  # after an interrupt too the sender would wait for an ack
            receiver = self._receivers.get(model_id)
            if receiver is not None:  # the transport was not closed meanwhile
                receiver.nack(error)
            raise
        return (model_id, received) if self._generation is Generation.A else received

    def _write(self, received: Any, weights: Any, model: Any, strategy: WeightStrategy | None) -> None:
        """Write what arrived into a buffer and a model. If it does not fit one, a plain strategy changes neither."""
        if weights is not None and model is not None and type(strategy) is WeightStrategy:  # others may rename
            refuse_misfit(weights, received)
            strategy.apply_weights(model, received)
            strategy.apply_weights(weights, received)
            return
        if weights is not None:
            (strategy or self._services.strategy).apply_weights(weights, received)
        if model is not None and strategy is not None:
            strategy.apply_weights(model, received)

    def send_ack(self, message: str = UPDATED) -> None:
        """Ack the update that was received last. The sender's outcome has the evidence `CALL`.

        Args:
            message: "updated": the weights are applied. Any other text says that they are not, unless its
                `check_ack` expects that text.

        Raises:
            StateError: no update that was received is pending.
        """
        receiver = self._last_receiver()
        if receiver is None:
            self._require_open("send_ack")
            raise StateError(type(self).__name__, "ready", "send_ack", ["receive_weights"])
        receiver.ack(message)

    def _last_receiver(self) -> WeightReceiver | None:
        """The receiver of the update that was received last; None: there is none, or the transport was closed."""
        with self._lock:
            return None if self._last is None else self._receivers.get(self._last)

    def setup_connection_and_weights_on_sender(self) -> None:
        """Do nothing: the first send creates a link, and sends the first weights like all others."""

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | str | None = None,
    ) -> Any:
        """Do nothing: the first weights arrive like all others."""

    def _default_wait(self) -> float | None:
        return 1.0 if self._generation is Generation.A else None

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
                receiver.advise_on_another_sender(_ANOTHER_SENDER)
                receiver.set_context(None, model_id)
                receiver.register_worker_transport(None)
                self._receivers[model_id] = receiver
            return self._receivers[model_id]

    def close(self) -> None:
        """Close for good: links close, and outstanding updates are ABANDONED. Closing twice is allowed."""
        with self._lock:
            self._closed = True
            self._hang_up()

    def _hang_up(self) -> None:
        """Close the senders and receivers; the next use makes new ones."""
        with self._lock:
            sides = [*self._senders.values(), *self._receivers.values()]
            self._senders, self._receivers = {}, {}
            self._outstanding, self._reported, self._last = [], set(), None
        for side in sides:
            side.close()

    def _close_on_error(self, error: BaseException) -> None:
        for receiver in list(self._receivers.values()):
            receiver.fail(error)
        self.close()

    def _require_open(self, method: str) -> None:
        if self._closed:
            raise StateError(type(self).__name__, "closed", method, ["close"])
