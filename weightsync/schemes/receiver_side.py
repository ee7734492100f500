"""`ReceiverSide`: a scheme in a worker, from `init_on_worker` to `shutdown`.

It has the receiver, which takes versions in the background once connected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weightsync.clock import Deadline
from weightsync.engine.background import Background, RelayCall
from weightsync.engine.receiver import WeightReceiver
from weightsync.errors import AckTimeoutError, ConfigurationError, WeightSyncError
from weightsync.protocol.machine import Role
from weightsync.protocol.report import SyncReport
from weightsync.schemes.collector_kinds import await_own_workers
from weightsync.schemes.relay import is_torchrl_collector, relay_call
from weightsync.schemes.rendezvous import Rendezvous, already_initialised_error, not_initialised_error
from weightsync.weights.loader import Loader
from weightsync.weights.selection import Selection
from weightsync.weights.strategy import WeightStrategy


class ReceiverSide:
    """The worker's side of one scheme. It is initialised once."""

    def __init__(self) -> None:
        self.rendezvous = Rendezvous(Role.RECEIVER)
        self.receiver: WeightReceiver | None = None
        #: This worker's id, or None if it was not given.
        self.worker_idx: int | None = None
        #: Whether the model came without weights, and serves nothing before its first version.
        self.on_meta_device = False

    def require_uninitialized(self) -> None:
        """Raises StateError: this side was initialised before; it may be closed by now."""
        if self.receiver is not None:
            raise already_initialised_error(self.receiver, "worker", "init_on_worker", "get_receiver")

    def require_receiver(self, method: str) -> WeightReceiver:
        """The receiver. Raises StateError: this side is not initialised."""
        if self.receiver is None:
            raise not_initialised_error("uninitialized on the worker", method, "init_on_worker", "init_on_receiver")
        return self.receiver

    @property
    def participant(self) -> WeightReceiver | None:
        """The receiver, if this side is initialised."""
        return self.receiver

    def connect(
        self,
        relay: Callable[[], RelayCall | None],
        await_first: Callable[[WeightReceiver, Background, Deadline], None],
        deadline: Deadline,
    ) -> None:
        """Receive in the background from now on, and wait for the first version.

        Raises:
            ConfigurationError: the model takes no hooks.
            Otherwise as ``await_first``; after each error nothing is received in the background any more.
        """
        receiver = self.require_receiver("connect")
        receiver.require_open("connect")
        background = Background(receiver, relay)
        try:
            background.start()
            await_first(receiver, background, deadline)
        except BaseException:
            background.discard()  # the next connect() makes another
            raise

    def await_first(self, receiver: WeightReceiver, background: Background, deadline: Deadline) -> None:
        """Wait until the first version is live or refused, or the sender's handshake says that there is none.

        Raises:
            AckTimeoutError: none of these happened in time.
            WeightSyncError: the first version was refused.
            ConfigurationError: the model came without weights, and the trainer has sent none. The receiver is closed,
                and the trainer is told why.
        """
        driver = receiver.driver

        def sender_has_none() -> bool:
            return driver.greeting is not None and not driver.greeting.layout and not driver.greeting.version

        def is_settled() -> bool:
            return receiver.version is not None or background.decided or sender_has_none()

        if not background.wait_until(is_settled, deadline):
            why = "the sender has not connected, or has not sent"
            if driver.data.decided is not None and receiver.last_refusal:
                why = f"the last one was refused ({receiver.last_refusal.rstrip('.')}), and the sender sends none again"
            raise AckTimeoutError(
                f"no first version of {receiver.model_id!r} arrived in time: {why}. The model is unchanged; have the "
                "trainer send, and call connect() again."
            )
        background.mark_seen()
        if receiver.version is None and background.decided:
            raise WeightSyncError(
                f"the first version of {receiver.model_id!r} was refused, and the reason was sent to the trainer: "
                f"{receiver.last_refusal}"
            )
        if receiver.version is None and self.on_meta_device:
            error = ConfigurationError(
                f"the model {receiver.model_id!r} came without its weights (on the meta device), and the trainer sends "
                "none with connect(): give its init_on_sender() model= or weights=, or make the model with weights."
            )
            receiver.fail(error)  # the trainer may still be waiting for other workers
            raise error

    def relay_call(self, context: Any, strategy: WeightStrategy) -> RelayCall | None:
        """How a version is passed on to this worker's own workers; None if it has none."""
        receiver = self.require_receiver("connect")
        relay = relay_call(context, receiver.model_id)
        if relay is None or isinstance(receiver.model, Loader):
            return None  # a loader has the weights: passing them on is up to the loader
        form = WeightStrategy("tensordict") if is_torchrl_collector(context) else strategy

        def weights() -> Any:
            if receiver.version is None:
                raise WeightSyncError("other weights took its place in this worker before it was passed on")
            return form.extract_weights(receiver.target().destination)

        def relay_version() -> SyncReport | None:
            await_own_workers(context, receiver.model_id)
            return relay(receiver.version, weights)

        return relay_version

    def receive(self, timeout: float | None, strategy: WeightStrategy, selection: Selection | None) -> Any:
        """The chosen weights that the model holds now, or a loader's version; None if no new version went live.

        Raises:
            As `WeightSyncScheme.receive`.
        """
        receiver = self.require_receiver("receive")
        self.rendezvous.require_connected("receive", receiver)
        if not receiver.receive(timeout):
            return None
        destination = receiver.target().destination
        if isinstance(destination, Loader):
            return receiver.version
        return strategy.extract_weights(destination if selection is None else selection.state_dict(destination))
