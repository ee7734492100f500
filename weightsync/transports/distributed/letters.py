"""Messages as values in a store: one direction of a link is a row of numbered keys, read once each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from weightsync.errors import ProtocolError
from weightsync.transports.distributed.store import Client

#: Payloads up to this size travel through the store, behind their message.
INLINE_NBYTES: Final = 64 * 1024
#: A store refuses values of more than 8 MiB.
PIECE_NBYTES: Final = 4 * 2**20

_LAST: Final = b"L"
_MORE: Final = b"M"
_CLOSED: Final = b"C"
_END: Final = "E"


@dataclass(frozen=True, slots=True)
class Side:
    """One end of a link."""

    #: In the process group.
    rank: int
    writes: str
    reads: str
    peer: str
    #: Called by the writing thread first of all, and last of all.
    begin: Callable[[Client], None]
    leave: Callable[[Client], None]


@dataclass(frozen=True, slots=True)
class Letter:
    """A message to be written."""

    frame: bytes
    payload: memoryview | None
    #: TorchRL's key and word for it.
    hint: tuple[str, str] | None
    #: Called once nobody reads the payload any more.
    done: Callable[[], None]
    #: The payload's SHA-256, asked for where there is a key.
    digest: Callable[[], bytes] = bytes

    @property
    def needs_the_peer(self) -> bool:
        """Whether its payload goes over the process group, where the peer has to take it."""
        return self.payload is not None and len(self.payload) > INLINE_NBYTES

    def alone(self) -> Letter:
        """The same, with a copy of its payload that nobody has to be told of."""
        payload = None if self.payload is None else memoryview(bytes(self.payload))
        return Letter(self.frame, payload, self.hint, _nothing)


def _nothing() -> None:
    return None


class Outbox:
    """Writes letters under numbered keys.

    Args:
        key: what the numbers are appended to.
    """

    def __init__(self, client: Client, key: str) -> None:
        self._client = client
        self._key = key
        self._number = 0

    def put(self, letter: bytes | memoryview) -> None:
        """Write a letter, in as many values as it takes.

        Raises:
            TransportError: the store is gone.
        """
        for start in range(0, max(len(letter), 1), PIECE_NBYTES):
            piece = bytes(letter[start : start + PIECE_NBYTES])
            self._write((_MORE if start + PIECE_NBYTES < len(letter) else _LAST) + piece)

    def shut(self) -> None:
        """Tell the reader that nothing more will come.

        Raises:
            TransportError: the store is gone.
        """
        self._write(_CLOSED)

    def _write(self, value: bytes) -> None:
        self._client.set(f"{self._key}/{self._number}", value)
        self._number += 1


class Shut(Exception):
    """The other end will write nothing more."""


class Ended(Exception):
    """This end wants to read nothing more: see `end`."""


class Inbox:
    """Reads the letters of an `Outbox`.

    Args:
        key: the outbox's.
    """

    def __init__(self, client: Client, key: str) -> None:
        self._client = client
        self._key = key
        self._read_keys: list[str] = []
        self.number = 0

    def forget(self) -> None:
        """Remove from the store what was read: once a letter is dealt with, since that takes as long as reading it.

        Raises:
            TransportError: the store is gone.
        """
        while self._read_keys:
            self._client.delete(self._read_keys.pop())

    def take(self) -> bytes:
        """The next letter, once it is whole.

        Raises:
            Shut, Ended: there is none.
            TransportError: the store is gone.
            ProtocolError: something else is written there.
        """
        pieces = []
        while True:
            kind, piece = self._read()
            pieces.append(piece)
            if kind == _LAST:
                return piece if len(pieces) == 1 else b"".join(pieces)

    def _read(self) -> tuple[bytes, bytes]:
        key = f"{self._key}/{self.number}"
        value = self._client.await_value(key)
        self._read_keys.append(key)
        self.number += 1
        kind = value[:1]
        if kind == _CLOSED:
            raise Shut
        if kind == _END.encode():
            raise Ended
        if kind not in (_LAST, _MORE):
            raise ProtocolError(f"the store's key {key} holds what nobody of ours wrote.", value[:64])
        return kind, value[1:]


def end(client: Client, key: str, number: int) -> None:
    """Have the inbox of ``key`` end behind all that has been written to it, from ``number`` on.

    Raises:
        TransportError: the store is gone.
    """
    while client.claim(f"{key}/{number}", _END) != _END:
        number += 1
