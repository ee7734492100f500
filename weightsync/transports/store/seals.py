"""What stands between a link and its letters: with a key, seals, numbered without a gap; without one, nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from weightsync.errors import AuthenticationError
from weightsync.keys import SharedKey
from weightsync.transports.sealing import Envelope, Identity, Kind, SenderSeal, WorkerSeal, is_envelope, without_key


class Opened(NamedTuple):
    """A letter that may be read."""

    text: memoryview
    #: Of the payload that follows by the process group; empty: it is not compared.
    digest: bytes


class Guard(Protocol):
    """One end's. `first` and `seal` are called by the writing thread, `open` by the reading one."""

    #: Whether payloads are to be digested.
    keyed: bool
    #: Whether what was for the guard alone is to be answered by an empty letter.
    replies: bool

    @property
    def admits(self) -> bool:
        """Whether what has been opened may be handed on; until then it is held back."""

    def first(self) -> Sequence[bytes]:
        """Letters of the guard's own, which leave before all others."""

    def seal(self, text: bytes, digest: bytes = b"") -> bytes:
        """A letter as it is written."""

    def open(self, text: memoryview) -> Opened | None:
        """A letter as it was before it was sealed; None: it was for the guard alone.

        Raises:
            AuthenticationError: it is not from whom it should be.
        """


class NoGuard:
    """Without a key: letters are written and read as they are.

    Args:
        peer: who is at the other end, for messages to people.
    """

    keyed = False
    replies = False
    admits = True

    def __init__(self, peer: str) -> None:
        self._peer = peer

    def first(self) -> Sequence[bytes]:
        """Nothing."""
        return ()

    def seal(self, text: bytes, digest: bytes = b"") -> bytes:  # noqa: ARG002 - nobody would believe it
        """The letter as it is."""
        return text

    def open(self, text: memoryview) -> Opened:
        """The letter as it is, unless the peer has a key."""
        if is_envelope(text):
            raise without_key(text, self._peer)
        return Opened(text, b"")


class SenderGuard:
    """The sender's, with a key."""

    keyed = True
    #: To the challenge: any letter proves that we live, and an empty one does where no other is to leave.
    replies = True

    def __init__(self, key: SharedKey, identity: Identity, peer: str) -> None:
        self._seal = SenderSeal(key, identity, peer)
        self._written = itertools.count()
        self._read = itertools.count()

    @property
    def admits(self) -> bool:
        """Whether the worker's challenge has come: before it, nothing does."""
        return self._seal.challenged

    def first(self) -> Sequence[bytes]:
        """Nothing: the link's name is our challenge."""
        return ()

    def seal(self, text: bytes, digest: bytes = b"") -> bytes:
        """A letter in its envelope."""
        return self._seal.seal(next(self._written), text, digest)

    def open(self, text: memoryview) -> Opened | None:
        """A worker's letter; None: it was its challenge."""
        envelope = self._seal.open(text)
        _require_next(envelope, self._read)
        return None if envelope.kind is Kind.CHALLENGE else Opened(envelope.content, envelope.digest)


class WorkerGuard:
    """The worker's, with a key."""

    keyed = True
    replies = False

    def __init__(self, key: SharedKey, identity: Identity) -> None:
        self._seal = WorkerSeal(key, identity)
        self._written = itertools.count(1)
        self._read = itertools.count()

    @property
    def admits(self) -> bool:
        """Whether the sender has proved that it lives."""
        return self._seal.proven

    def first(self) -> Sequence[bytes]:
        """Our challenge."""
        return (self._seal.challenge,)

    def seal(self, text: bytes, digest: bytes = b"") -> bytes:  # noqa: ARG002 - workers send no payloads
        """A letter in its envelope."""
        return self._seal.seal(next(self._written), text)

    def open(self, text: memoryview) -> Opened | None:
        """A sender's letter; None: it only proved the sender."""
        envelope = self._seal.open(text)
        _require_next(envelope, self._read)
        return Opened(envelope.content, envelope.digest) if len(envelope.content) else None


def _require_next(envelope: Envelope, numbers: itertools.count[int]) -> None:
    if envelope.number != next(numbers):
        raise AuthenticationError("A message came again, or out of turn: it was not believed.")
