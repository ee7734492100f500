"""The messages that the ends of a link exchange in the store: numbered keys in each direction, each read once.

Each end introduces itself here. All later messages travel over the link's own connection.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from weightsync.errors import TransportError
from weightsync.transports.sealing import is_envelope
from weightsync.transports.store.seals import Guard
from weightsync.transports.store.store import Client

logger = logging.getLogger("weightsync")

#: Payloads up to this size are part of their message.
INLINE_NBYTES: Final = 64 * 1024

#: A process, its network, and where it awaits a connection.
_NAME: Final = re.compile(rb"[0-9a-f]{32}( [0-9a-f]{32})?( \S+:[0-9]{1,5})?")
#: Before a name, or before what a guard says.
_WORDS: Final = b"L"
#: The last value of an end that writes no more.
_CLOSED: Final = b"C"
#: The value that `Inbox.end` writes.
_END: Final = "E"
#: Why a link has no connection yet, while its end has none to the store.
NO_ANSWER: Final = "the store has not answered this process so far"
#: Seconds between two checks of a key that another program has written to.
_LOOK_SECONDS: Final = 0.05


def _do_nothing() -> None:
    return None


def _ignore_client(_: Client) -> None:
    return None


def _no_remark(_: Client, __: Callable[[str], None]) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Side:
    """One end of a link."""

    #: The rank: 0 the sender's, 1 the worker's.
    rank: int
    writes: str
    reads: str
    peer: str
    #: Called by the writing thread once this end has written its name, and after its last action.
    introduced: Callable[[Client], None] = _ignore_client
    leave: Callable[[Client], None] = _ignore_client
    #: Called before this end says goodbye, or its connection ends.
    before_goodbye: Callable[[], None] = _do_nothing
    #: Called by the reading thread when the other end has said goodbye.
    peer_left: Callable[[], None] = _do_nothing
    #: Called by the reading thread before it reports that the other end has said goodbye or has ended.
    before_end: Callable[[Client], None] = _ignore_client
    #: Called now and then until there is a connection: why there may never be one; empty if there is nothing to say. It
    #: calls what follows a process, if one has taken the link.
    remark: Callable[[Client, Callable[[str], None]], str] = _no_remark
    #: What to look at if nobody has taken the link.
    untaken: str = ""
    #: Called if the store could not be reached: the link was not announced.
    unconnected: Callable[[], object] = _do_nothing

    def end_reason(self, ending: str) -> str:
        """Why nothing more comes from the other end.

        Args:
            ending: what is known about its end; empty: nothing.
        """
        return f"{self.peer} has ended: {ending}." if ending else f"{self.peer} has closed this link, or is dead."

    @property
    def listens(self) -> bool:
        """Whether this end awaits the other's connection: the worker's does."""
        return self.rank == 1


@dataclass(frozen=True, slots=True)
class QueuedMessage:
    """A message that waits to be written to the link's own connection. It does not go through the store."""

    frame: bytes
    payload: memoryview | None
    #: TorchRL's key and value for it, which are written to the store.
    hint: tuple[str, str] | None = None
    #: Called once the payload is no longer read.
    done: Callable[[], None] = _do_nothing
    #: The payload's SHA-256, computed where there is a key.
    digest: Callable[[], bytes] = bytes
    #: Called by the writing thread before the message is written.
    before: Callable[[], None] = _do_nothing
    #: Makes what precedes the frame: how the payload travels through a fan-out. None: nothing does.
    head: Callable[[], bytes] | None = None
    #: The payload that this is a part of, or whose parts it names; empty: none.
    payload_id: bytes = b""
    #: Whether the frame is what is left of a text that was begun: see `WriteQueue.begin`.
    begun: bool = False

    def sealed(self, guard: Guard) -> bytes:
        """All that is written but the payload behind it, if it has one."""
        text = self.frame if self.head is None else self.head() + self.frame
        if self.has_payload_behind:
            return guard.seal(text, self.digest() if guard.keyed else b"")
        return guard.seal(text if self.payload is None else text + self.payload)

    @property
    def is_plain(self) -> bool:
        """Whether it is small, and nothing is done before it is written."""
        return not self.needs_peer and self.before is _do_nothing

    @property
    def is_part(self) -> bool:
        """Whether it is a part of a payload, of no use without the update that names it."""
        return bool(self.payload_id) and self.payload is not None

    @property
    def needs_peer(self) -> bool:
        """Whether its payload follows it, comes in parts or from another worker, and is not part of it."""
        return self.head is not None or bool(self.payload_id) or self.has_payload_behind

    @property
    def has_payload_behind(self) -> bool:
        """Whether its payload follows it."""
        return self.payload is not None and len(self.payload) > INLINE_NBYTES

    def write_hint(self, client: Client) -> None:
        """Write TorchRL's key, if there is one. Raises TransportError: the store is gone."""
        if self.hint is not None:
            client.set(self.hint[0], self.hint[1].encode())

    def alone(self) -> QueuedMessage:
        """The same message with its own copy of the payload, so that its owner need not be notified."""
        payload = None if self.payload is None else memoryview(bytes(self.payload))
        return QueuedMessage(self.frame, payload, self.hint, before=self.before, begun=self.begun)


class Outbox:
    """Writes an end's messages under numbered keys of the store."""

    def __init__(self, client: Client, key: str) -> None:
        self._client = client
        self._key = key
        self._number = 0

    def put(self, words: bytes) -> None:
        """Write the end's name, or what its guard says. Raises TransportError: the store is gone."""
        self._write(_WORDS + words)

    def shut(self) -> None:
        """Tell the reader that nothing more will be written. Raises TransportError: the store is gone."""
        self._write(_CLOSED)

    def _write(self, value: bytes) -> None:
        self._client.set(f"{self._key}/{self._number}", value)
        self._number += 1


class PeerClosed(Exception):
    """The other end will write nothing more."""


class Ended(Exception):
    """This end will read nothing more: see `Inbox.end`."""


class Inbox:
    """Reads the messages of an `Outbox`.

    A stranger may write under its keys. A value that is not a message is skipped, since the other end has yet to write
    there.
    """

    def __init__(self, client: Client, key: str) -> None:
        self._client = client
        self._key = key
        self._read_keys: list[str] = []
        self.number = 0

    def delete_read(self) -> None:
        """Delete the values that were read. Called once a message was processed, since it takes as long as reading.

        Raises TransportError: the store is gone.
        """
        while self._read_keys:
            self._client.delete(self._read_keys.pop())

    def take(self) -> bytes:
        """The next message, once it is whole.

        Raises:
            PeerClosed, Ended: there is none.
            TransportError: the store is gone, or another program has overwritten a message.
        """
        value = self._await_value()
        if value == _CLOSED:
            raise PeerClosed
        if value == _END.encode():
            raise Ended
        return value[1:]

    @staticmethod
    def end(client: Client, key: str, number: int) -> None:
        """End the inbox of ``key`` after everything that was written to it, from ``number`` on.

        Its reader is another thread, or has not begun. Raises TransportError: the store is gone.
        """
        while client.claim(f"{key}/{number}", _END) != _END:
            number += 1

    def _await_value(self) -> bytes:
        """The value of the next key, once the other end has written it."""
        key = self._key_of(self.number)
        value = self._client.await_value(key)
        if not _is_own_value(value):
            logger.warning("the store's key %s holds a value that is not ours: it is skipped", key)
            value = self._await_rewritten()
        self._read_keys.append(key)
        self.number += 1
        return value

    def _await_rewritten(self) -> bytes:
        """The value of the next key, once the other end has overwritten a value that is not its own."""
        key, next_key = self._key_of(self.number), self._key_of(self.number + 1)
        pause = threading.Event()
        while True:
            # Checked in this order, since the keys are written in order.
            next_value = self._client.value(next_key)
            value = self._client.value(key)
            if value is not None and _is_own_value(value):
                return value
            if next_value == _END.encode():
                raise Ended
            if next_value is not None and next_value[:1] in (_WORDS, _CLOSED):
                raise TransportError(f"a message was overwritten in the store by someone else, under the key {key}")
            pause.wait(_LOOK_SECONDS)

    @property
    def next_key(self) -> str:
        """The key of the next value."""
        return self._key_of(self.number)

    def _key_of(self, number: int) -> str:
        return f"{self._key}/{number}"


def _is_own_value(value: bytes) -> bool:
    """Whether a value is one that an `Outbox` or `Inbox.end` writes."""
    words = value[1:]
    ours = value[:1] == _WORDS and (is_envelope(words) or _NAME.fullmatch(words) is not None)
    return ours or value in (_CLOSED, _END.encode())
