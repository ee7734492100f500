"""Where each side of a scheme stands with `connect`, and the wait for a worker's first version."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import Any

from weightsync.clock import Deadline
from weightsync.engine.background import Background
from weightsync.engine.receiver import WeightReceiver
from weightsync.engine.sender import WeightSender
from weightsync.engine.sequential import SequentialSends
from weightsync.errors import AckTimeoutError, ConfigurationError, StateError, WeightSyncError


class Side(enum.Enum):
    """The two sides of a scheme, by the words that errors use."""

    SENDER = "sender"
    RECEIVER = "receiver"


class ConnectState(enum.Enum):
    """Where one side stands with `connect`, by the words that errors use."""

    NOT_CONNECTED = "not connected"
    CONNECTING = "connecting"
    CONNECTED = "connected"


class Rendezvous:
    """Both sides of one scheme. Each connects once; if that fails it may try again."""

    def __init__(self) -> None:
        self._states = dict.fromkeys(Side, ConnectState.NOT_CONNECTED)
        #: What the scheme's own `send` sends by; None until the sender connects.
        self.sends: SequentialSends | None = None

    def is_connected(self, side: Side) -> bool:
        """Whether a side has connected."""
        return self._states[side] is ConnectState.CONNECTED

    def next_side(
        self, sender: WeightSender | None, receiver: WeightReceiver | None, worker_idx: int | None, weights: Any
    ) -> Side:
        """The side that a call of `connect` means; of an object with both sides the sender's comes first.

        Raises:
            StateError: neither side is initialised.
            ConfigurationError: an argument of one side was given to the other.
        """
        if sender is None and receiver is None:
            raise StateError("scheme", "uninitialized", "connect", ["init_on_sender", "init_on_receiver"])
        if receiver is None and worker_idx is not None:
            raise ConfigurationError("connect() takes worker_idx= in a worker only: call it without in the trainer.")
        if sender is None:
            if weights is not None:
                raise ConfigurationError("connect() takes weights= in the trainer only: call it without in a worker.")
            return Side.RECEIVER
        connects_first = self._states[Side.SENDER] is ConnectState.NOT_CONNECTED or weights is not None
        return Side.SENDER if receiver is None or (connects_first and worker_idx is None) else Side.RECEIVER

    @contextlib.contextmanager
    def connecting(self, side: Side) -> Iterator[None]:
        """Connect a side inside; if an exception leaves the block, the side is not connected.

        Raises StateError: it has connected, or is connecting in another thread.
        """
        state = self._states[side]
        if state is not ConnectState.NOT_CONNECTED:
            raise StateError(f"scheme ({side.value})", state.value, "connect", ["send", "receive", "shutdown"])
        self._states[side] = ConnectState.CONNECTING
        try:
            yield
        except BaseException:
            self._states[side] = ConnectState.NOT_CONNECTED
            raise
        self._states[side] = ConnectState.CONNECTED

    def connected_sends(self, sender: WeightSender | None, asked: str) -> SequentialSends:
        """What to send by. Raises StateError: the sender is not initialised, or not connected."""
        if sender is None:
            raise StateError("scheme", "uninitialized on the sender", asked, ["init_on_sender"])
        if self.sends is None or not self.is_connected(Side.SENDER):
            raise StateError("scheme (sender)", self._states[Side.SENDER].value, asked, ["connect"])
        return self.sends

    def connected_receiver(self, receiver: WeightReceiver | None, asked: str) -> WeightReceiver:
        """The receiver. Raises StateError: it is not initialised, or not connected."""
        if receiver is None:
            raise StateError("scheme", "uninitialized on the receiver", asked, ["init_on_receiver"])
        if not self.is_connected(Side.RECEIVER):
            raise StateError("scheme (receiver)", self._states[Side.RECEIVER].value, asked, ["connect"])
        return receiver


def await_first_version(receiver: WeightReceiver, background: Background, deadline: Deadline) -> None:
    """Wait until the first version is live, was refused, or the sender's handshake says that it has none.

    Raises:
        AckTimeoutError: none of these came in time.
        WeightSyncError: the first version was refused.
    """
    driver = receiver.driver

    def decided() -> bool:
        return driver.data.decided != background.decided_before

    def sender_has_none() -> bool:
        return driver.greeting is not None and not driver.greeting.layout and not driver.greeting.version

    def met() -> bool:
        return receiver.version is not None or decided() or sender_has_none()

    if not background.wait_until(met, deadline):
        raise AckTimeoutError(
            f"no first version of {receiver.model_id!r} arrived in time: the sender has not connected, or has not "
            "sent. The model is unchanged; connect() may be called again."
        )
    background.seen()
    if receiver.version is None and decided():
        raise WeightSyncError(
            f"the first version of {receiver.model_id!r} was refused, and the sender was told: {receiver.last_refusal}"
        )


def require_weights(receiver: WeightReceiver) -> None:
    """Refuse to connect a model that came without weights if the trainer has sent none.

    Raises ConfigurationError: it has sent none. The receiver is closed, and the trainer told why.
    """
    if receiver.version is not None:
        return
    error = ConfigurationError(
        f"the model {receiver.model_id!r} came without its weights (on the meta device), and the trainer sends none "
        "with connect(): give its init_on_sender() model= or weights=, or make the model with weights."
    )
    receiver.fail(error)  # the trainer may still be waiting for other workers
    raise error
