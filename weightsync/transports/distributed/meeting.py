"""Where the two ranks of a private process group find each other: either both connect or neither does."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from weightsync.errors import TransportError
from weightsync.transports.distributed.c10d import Store
from weightsync.transports.distributed.store import FOR_EVER, Client

#: How often a rank looks whether the other has come. Once a link: both are on their way already.
_LOOK: Final = 0.001
#: Where two ranks agree whether they connect. The first to write decides.
_AGREED: Final = "agreed"
_CONNECT: Final = "connect"
_GIVEN_UP: Final = "given up"


class Meeting(Store):
    """The store by which two ranks find each other; unlike a plain one it can be given up.

    A rank that has found the other connects, and waits for it in gloo, where nobody can reach it. So they agree before:
    either both connect or neither does.

    Args:
        client: used by one thread at a time.
        prefix: of all keys.
        over: set once this end wants no group any more.
    """

    def __init__(self, client: Client, prefix: str, over: threading.Event) -> None:
        super().__init__()
        self._client = client
        self._prefix = prefix
        self._over = over
        self._own: set[str] = set()
        #: The values that the two ranks have told each other: for gloo, where each can be reached.
        self.told: set[bytes] = set()

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override] # torch passes bytes
        """Write a value."""
        self._own.add(key)
        self.told.add(bytes(value))
        self._client.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """The value of a key, once it has one."""
        self.wait([key])
        value = self._client.await_value(self._prefix + key)
        self.told.add(value)
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values."""
        return all(self._client.present(self._prefix + key) for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        return self._client.add(self._prefix + key, amount)

    def wait(self, keys: Sequence[str], timeout: timedelta = FOR_EVER) -> None:  # noqa: ARG002
        """Return once all keys have values and the other rank is known to connect, too.

        Raises:
            TransportError: the meeting was given up, here or there.
        """
        if self._own.issuperset(keys):
            return  # gloo asks for its own as well, which says nothing of the other
        while not self.check(keys):
            if self._over.wait(_LOOK):
                self._agree(_GIVEN_UP)
            if self._client.value(self._prefix + _AGREED) == _GIVEN_UP.encode():
                break
        else:
            if self._agree(_CONNECT) == _CONNECT:
                return
        raise TransportError("the process group was given up while it was being made")

    def _agree(self, wish: str) -> str:
        return self._client.claim(self._prefix + _AGREED, wish, (_CONNECT, _GIVEN_UP).__contains__)

    def give_up(self) -> None:
        """Have whoever still waits here for the other wait no longer."""
        self._client.set(self._prefix + _AGREED, _GIVEN_UP.encode())

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys."""
        return [self.get(key) for key in keys]

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        self._client.delete(self._prefix + key)
        return True
