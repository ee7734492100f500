"""Guards of a link's messages: with a key they seal and number them; without one they do nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from weightsync.errors import AuthenticationError
from weightsync.keys import SharedKey
from weightsync.transports.sealing import (
    Envelope,
    EnvelopeKind,
    Identity,
    SenderSeal,
    WorkerSeal,
    is_envelope,
    without_key,
)


class Opened(NamedTuple):
    """An opened message."""

    text: memoryview
    #: The digest of the payload behind the message; empty if it is not compared.
    digest: bytes


class Guard(Protocol):
    """Guards one end. The writing thread calls `first` and `seal`, the reading thread `open`."""

    #: Whether payloads need a digest.
    keyed: bool
    #: Whether a message for the guard alone is answered with an empty message.
    replies: bool

    @property
    def admits(self) -> bool:
        """Whether opened messages may be delivered; until then they are held back."""

    def first(self) -> Sequence[bytes]:
        """The guard's own messages, which are sent before all others."""

    def seal(self, text: bytes, digest: bytes = b"") -> bytes:
        """The message as it is written."""

    def open(self, text: memoryview) -> Opened | None:
        """The message as it was before it was sealed; None if it was for the guard alone.

        Raises AuthenticationError: it is not from the peer.
        """


class NoGuard:
    """For links without a key: messages are written and read unchanged."""

    keyed = False
    replies = False
    admits = True

    def __init__(self, peer: str) -> None:
        self._peer = peer

    def first(self) -> Sequence[bytes]:
        """None."""
        return ()

    def seal(self, text: bytes, digest: bytes = b"") -> bytes:  # noqa: ARG002 - it would prove nothing
        """The message, unchanged."""
        return text

    def open(self, text: memoryview) -> Opened:
        """The message, unchanged, unless the peer has a key."""
        if is_envelope(text):
            raise without_key(text, self._peer)
        return Opened(text, b"")


class SenderGuard:
    """The sender's guard, with a key."""

    keyed = True
    #: Answers the challenge: any message proves that this end is alive, and an empty one does if there is no other.
    replies = True

    def __init__(self, key: SharedKey, identity: Identity, peer: str) -> None:
        self._seal = SenderSeal(key, identity, peer)
        self._written = self._read = 0

    @property
    def admits(self) -> bool:
        """Whether the worker's challenge has arrived, which is its first message."""
        return self._seal.challenged

    def first(self) -> Sequence[bytes]:
        """None: the link's name is our challenge."""
        return ()

    def seal(self, text: bytes, digest: bytes = b"") -> bytes:
        """The message in its envelope."""
        number, self._written = self._written, self._written + 1
        return self._seal.seal(number, text, digest)

    def open(self, text: memoryview) -> Opened | None:
        """A worker's message; None if it was the challenge."""
        envelope = self._seal.open(text)
        number, self._read = self._read, self._read + 1
        _require_number(envelope, number)
        return None if envelope.kind is EnvelopeKind.CHALLENGE else Opened(envelope.content, envelope.digest)


class WorkerGuard:
    """The worker's guard, with a key."""

    keyed = True
    replies = False

    def __init__(self, key: SharedKey, identity: Identity) -> None:
        self._seal = WorkerSeal(key, identity)
        self._written, self._read = 1, 0

    @property
    def admits(self) -> bool:
        """Whether the sender has proved that it is alive."""
        return self._seal.proven

    def first(self) -> Sequence[bytes]:
        """Our challenge."""
        return (self._seal.challenge,)

    def seal(self, text: bytes, digest: bytes = b"") -> bytes:  # noqa: ARG002 - workers send no payloads
        """The message in its envelope."""
        number, self._written = self._written, self._written + 1
        return self._seal.seal(number, text)

    def open(self, text: memoryview) -> Opened | None:
        """A sender's message; None if it only proved the sender."""
        envelope = self._seal.open(text)
        number, self._read = self._read, self._read + 1
        _require_number(envelope, number)
        return Opened(envelope.content, envelope.digest) if len(envelope.content) else None


def _require_number(envelope: Envelope, number: int) -> None:
    if envelope.number != number:
        raise AuthenticationError("A message was repeated or is out of order: it was rejected.")
