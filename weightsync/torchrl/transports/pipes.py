"""A pipe for worker loops that read TorchRL's pipe messages: it delivers updates as messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from weightsync.clock import Deadline
from weightsync.engine.manual_ack import UPDATED
from weightsync.errors import TransportError
from weightsync.transports.base import Link, Waitable, Waker, wait
from weightsync.transports.pipe.connection import Channel
from weightsync.transports.pipe.user_messages import UserMessages

#: The name of the messages by which TorchRL's worker loops receive weights.
UPDATE_WEIGHTS: Final = "update_weights"


class Inbox(Protocol):
    """Where updates arrive, model by model."""

    def _arrived(self) -> Sequence[str]:
        """The models with an update that has not been returned yet."""

    def _take_weights(self, model_id: str) -> Any:
        """The weights of a model's update; None if there is none after all."""

    def _links(self) -> list[Link]:
        """The open links, to wait for."""

    def _owes_ack(self) -> bool:
        """Whether an update that was returned is pending."""

    def _require_open(self, asked: str) -> None:
        """Raises StateError: it is closed."""

    def send_ack(self, message: str = UPDATED) -> None:
        """Ack the update that was returned last."""


class ReferencePipe:
    """The methods of a `multiprocessing` connection, with each update as the message ``((model_id, weights),
    "update_weights")``.

    An update stays pending until ``receiver.apply_weights(weights)``, ``transport.send_ack()`` or, as TorchRL's loops
    do it, ``pipe.send((None, "updated"))``. All other messages are the user's own: they are delivered unchanged, in
    order, and keep their place among the updates.
    """

    def __init__(self, channel: Channel, inbox: Inbox) -> None:
        self._channel = channel
        self._inbox = inbox
        self._user = UserMessages(channel)

    @property
    def closed(self) -> bool:
        """Whether the connection is closed."""
        return self._channel.connection.closed

    def fileno(self) -> int:
        """The connection's descriptor. It may be readable although `recv` has nothing."""
        return self._channel.connection.fileno()

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Whether `recv` has something to return or raise within ``timeout`` seconds (None: wait forever)."""
        return self.await_any(Deadline(timeout))

    def recv(self) -> Any:
        """Wait for the next update or user message.

        Raises EOFError: the connection has ended, and nothing is left.
        """
        while True:
            self.await_any(Deadline(None))
            update = self.next_update(in_turn=True)
            if update is not None:
                return update, UPDATE_WEIGHTS
            if self._channel.has_user_message():
                return self._user.recv()

    def send(self, obj: Any) -> None:
        """Send an object of the user's own; ``(None, "updated")`` is an ack while an update is to be answered.

        Raises TransportError: the connection is dead or closed.
        """
        if _is_ack(obj) and self._inbox._owes_ack():
            self._inbox.send_ack()
        else:
            self._user.send(obj)

    def recv_bytes(self) -> bytes:
        """The next message of the user's own, as bytes: see `UserMessages.recv_bytes`."""
        return self._user.recv_bytes()

    def send_bytes(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes of the user's own: see `UserMessages.send_bytes`."""
        self._user.send_bytes(data)

    def next_update(self, *, in_turn: bool) -> tuple[str, Any] | None:
        """The next update, or None. With ``in_turn``, an update that arrived after a user message is left for later."""
        for model_id in self._inbox._arrived():
            if in_turn and self._channel.user_message_is_first(model_id):
                continue
            weights = self._inbox._take_weights(model_id)
            if weights is not None:
                return model_id, weights
        return None

    def await_update(self, deadline: Deadline) -> tuple[str, Any] | None:
        """The next update; None if none arrived in time.

        Raises:
            StateError: the inbox is closed, perhaps by another thread meanwhile.
            TransportError: the connection has ended.
        """
        while True:
            waker = self._channel.user_waker()
            fired = waker.fired
            self._inbox._require_open("receive_weights")
            has_ended = self._channel.has_ended()
            update = self.next_update(in_turn=False)
            if update is not None or deadline.passed:
                return update
            if has_ended:
                raise TransportError("The pipe has ended: its other end is closed, or that process is dead.")
            self._wait(waker, deadline, fired)

    def await_any(self, deadline: Deadline) -> bool:
        """Wait until there is an update, a message, or an end."""
        while True:
            waker = self._channel.user_waker()
            fired = waker.fired
            # What arrived before the end is found even after the end was noticed.
            if self._channel.has_user_message() or self._inbox._arrived():
                return True
            if deadline.passed:
                return False
            self._wait(waker, deadline, fired)

    def _wait(self, waker: Waker, deadline: Deadline, fired: int) -> None:
        watched: list[Waitable] = [*self._inbox._links(), self._channel]
        wait(waker, watched, deadline.nap, fired)


def _is_ack(obj: object) -> bool:
    """Whether this is ``(None, "updated")``. Only text is compared: ``==`` of arrays and tensors is no bool."""
    if not isinstance(obj, tuple) or len(obj) != 2:
        return False
    first, text = obj
    return first is None and isinstance(text, str) and text == UPDATED
