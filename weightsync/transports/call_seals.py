"""The sender's end of links whose messages are calls: how each is sealed, and what it brings home is opened."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from weightsync import wire
from weightsync.errors import AuthenticationError
from weightsync.keys import SharedKey
from weightsync.messages import Hello, Message, Update
from weightsync.transports.digests import sent_digest
from weightsync.transports.exposure import tell
from weightsync.transports.liveness import own_host
from weightsync.transports.memory import Buffer
from weightsync.transports.sealing import Identity, Kind, SenderSeal, is_envelope, without_key


class Challenged(AuthenticationError):
    """A call came home with the worker's challenge: it is to be made once more, under `CallSeal.again`."""


class CallSeal(Protocol):
    """What a courier seals by. Calls of one link may come home in any order, and in any thread."""

    def frame(self, number: int, message: Message, payload: Buffer | None) -> bytes:
        """What a call carries.

        Raises:
            ConfigurationError: the message does not fit the wire.
        """

    def again(self, number: int) -> bytes:
        """What carries a call that was challenged: the worker has kept what it brought."""

    def brought(self, frames: Sequence[bytes]) -> list[Message]:
        """The answers that a call brought home.

        Raises:
            Challenged: it brought the worker's challenge.
            AuthenticationError: the worker has another key, or it is not the worker that answered.
            ProtocolError: an answer is malformed.
        """


class NoSeal:
    """Without a key: messages travel as they are.

    Args:
        peer: who is at the other end, for messages to people.
    """

    def __init__(self, peer: str) -> None:
        self._peer = peer

    def frame(self, number: int, message: Message, payload: Buffer | None) -> bytes:  # noqa: ARG002 - sealed by nobody
        """The message."""
        return wire.encode(message)

    def again(self, number: int) -> bytes:
        """Nobody is challenged without a key."""
        raise AuthenticationError(f"{self._peer} challenged call {number}, which was under no key.")

    def brought(self, frames: Sequence[bytes]) -> list[Message]:
        """The answers, unless the worker has a key."""
        messages = decoded(frames, self._peer)
        if any(isinstance(each, Hello) and each.host not in {b"", own_host()} for each in messages):
            tell(f"The link to {self._peer} goes to another host")
        return messages


class KeyedSeal:
    """With a key.

    Args:
        key: shared with the worker.
        identity: of the link.
        peer: who is at the other end, for messages to people.
    """

    def __init__(self, key: SharedKey, identity: Identity, peer: str) -> None:
        self._seal = SenderSeal(key, identity, peer)
        self._peer = peer
        self._lock = threading.Lock()
        self._heard: set[int] = set()

    def frame(self, number: int, message: Message, payload: Buffer | None) -> bytes:
        """The message in an envelope, with the digest of its payload."""
        carries = isinstance(message, Update) and message.nbytes and payload is not None
        digest = sent_digest(message, payload) if carries else b""  # type: ignore[arg-type] # what `carries` says
        return self._seal.seal(number, wire.encode(message), digest)

    def again(self, number: int) -> bytes:
        """An envelope without content."""
        return self._seal.seal(number, b"")

    def brought(self, frames: Sequence[bytes]) -> list[Message]:
        """The answers, each of which is believed once."""
        messages = []
        for frame in _listed(frames):
            envelope = self._seal.open(frame)
            if envelope.kind is Kind.CHALLENGE:
                raise Challenged(f"{self._peer} challenged a call that answered its challenge.")
            with self._lock:
                if envelope.number in self._heard:
                    raise AuthenticationError(f"An answer of {self._peer} came again: it was not believed.")
                self._heard.add(envelope.number)
            messages.append(wire.decode(envelope.content))
        return messages


def seal_of(key: SharedKey | None, identity: Identity, peer: str) -> CallSeal:
    """What the sender's end of a link seals by."""
    return NoSeal(peer) if key is None else KeyedSeal(key, identity, peer)


def decoded(frames: Sequence[bytes], peer: str = "the worker") -> list[Message]:
    """The answers that a call brought home, under no key.

    Raises:
        AuthenticationError: the worker has a key.
        ProtocolError: a frame is malformed.
    """
    for frame in _listed(frames):
        if is_envelope(frame):
            raise without_key(frame, peer)
    return [wire.decode(frame) for frame in frames]


def _listed(frames: Sequence[bytes]) -> Sequence[bytes]:
    """The frames, of which a call may bring home anything else instead."""
    if not isinstance(frames, list | tuple):
        raise wire.malformed(f"A call brought home a {type(frames).__name__} where answers belong", b"")
    return frames
