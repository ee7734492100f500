"""`Rendezvous`: whether one side of a scheme has connected."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import Final

from weightsync.engine.copies import Participant
from weightsync.errors import StateError
from weightsync.protocol._tables import State
from weightsync.protocol.machine import Role

_ONCE: Final = "A scheme connects once, for one trainer or collector: make a new scheme for another."
#: Why a side is not initialised a second time.
_INITIALISED_ONCE: Final = "A scheme is initialised once, for one trainer or collector: make a new scheme for another."
_CLOSED: Final = "A closed scheme is not initialised again: make a new scheme."


class ConnectState(enum.Enum):
    """Whether one side has connected, in the words that errors use."""

    NOT_CONNECTED = "not connected"
    CONNECTING = "connecting"
    CONNECTED = "connected"


class Rendezvous:
    """One side of a scheme connects once; if that fails it may try again."""

    def __init__(self, side: Role) -> None:
        self._side = side
        self._state = ConnectState.NOT_CONNECTED

    @property
    def is_connected(self) -> bool:
        """Whether this side has connected."""
        return self._state is ConnectState.CONNECTED

    @property
    def not_connected(self) -> bool:
        """Whether this side neither has connected nor is connecting."""
        return self._state is ConnectState.NOT_CONNECTED

    @contextlib.contextmanager
    def connecting(self, participant: Participant | None) -> Iterator[None]:
        """Connect this side, whose sender or receiver is given, inside; if an exception leaves, it is not connected.

        Raises StateError: it has connected, is connecting in another thread, or was closed since.
        """
        if self._state is not ConnectState.NOT_CONNECTED:
            if participant is not None:
                participant.require_open("connect")
            raise self._state_error("connect", ["send", "receive", "shutdown"], _ONCE)
        self._state = ConnectState.CONNECTING
        try:
            yield
        except BaseException:
            self._state = ConnectState.NOT_CONNECTED
            raise
        self._state = ConnectState.CONNECTED

    def require_connected(self, method: str, participant: Participant) -> None:
        """Raises StateError: this side has not connected; or its sender or receiver was closed before it had."""
        if not self.is_connected:
            participant.require_open(method)
            raise self._state_error(method, ["connect"])

    def _state_error(self, asked: str, allowed: list[str], hint: str = "") -> StateError:
        return StateError(f"scheme ({self._side.value})", self._state.value, asked, allowed, hint)


def not_initialised_error(state: str, method: str, *allowed: str) -> StateError:
    """The error of a scheme, or of one side of it, that was not initialised in this process.

    Args:
        state: in the words of messages.
        method: the method that was called.
        allowed: the methods that initialise it.
    """
    first = " or ".join(f"{each}()" for each in allowed)
    hint = f"Call {first} first, also on a copy of a scheme (pickled, copied or inherited by a forked process)."
    return StateError("scheme", state, method, allowed, hint)


def already_initialised_error(participant: Participant, side: str, method: str, allowed: str) -> StateError:
    """The error of a side that is to be initialised a second time.

    Args:
        participant: its sender or receiver.
        side: in the words of messages, "sender" or "worker".
        method: the method that was called.
        allowed: the method that returns the participant.
    """
    if participant.state is State.CLOSED:
        return StateError("scheme", f"closed on the {side}", method, [], _CLOSED)
    return StateError("scheme", f"initialised on the {side}", method, [allowed, "close"], _INITIALISED_ONCE)
