"""Sockets that torch opens in this process without handing them out: found by what is new, and watched from beside."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from weightsync.errors import AuthenticationError
from weightsync.keys import SharedKey
from weightsync.transports.sealing import Envelope, Identity, Kind, SenderSeal, WorkerSeal, is_envelope, without_key

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Connected:
    """A socket that is connected over IP, with the ports of both its ends."""

    identity: str
    fd: int
    family: int
    own: int
    peer: int

    def copy(self) -> socket.socket | None:
        """A copy of it; None if it has been closed since: its number may be another's already."""
        with contextlib.suppress(OSError):
            copied = os.dup(self.fd)
            if _identity(copied) == self.identity:
                return socket.socket(fileno=copied)
            os.close(copied)
        return None

    def named_in(self, addresses: Collection[bytes]) -> bool:
        """Whether one of its ends is in one of those texts, each with addresses as the kernel has them."""
        names = [struct.pack("=H", self.family) + struct.pack("!H", port) for port in (self.own, self.peer)]
        return any(name in address for address in addresses for name in names)


def _identity(fd: int | str) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def connected() -> dict[str, Connected]:
    """This process's connected sockets, by their identity."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            identity = _identity(entry)
            if identity.startswith("socket:"):
                # Without a copy: another thread that looks just now would take that for the socket, and it ends soon.
                sock = socket.socket(fileno=int(entry))
                try:
                    if sock.family in (socket.AF_INET, socket.AF_INET6):
                        ports = sock.getsockname()[1], sock.getpeername()[1]
                        found[identity] = Connected(identity, int(entry), sock.family, *ports)
                finally:
                    sock.detach()
    return found


class Watched:
    """A connection that somebody else uses, and may close: whether it has ended is still seen here."""

    def __init__(self, copied: socket.socket) -> None:
        self._socket = copied

    @property
    def ended(self) -> bool:
        """Whether the peer, or the network, has ended it, and all that had come was read."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """End the connection, whoever else still holds it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def watching(make: Callable[[], Made], addresses: Collection[bytes]) -> tuple[Made, Watched | None]:
    """Make something that opens a connection, and watch that.

    Args:
        make: makes it.
        addresses: texts that hold the addresses where it connects, once it is made. Whoever else opens connections
            meanwhile is left alone.

    Returns:
        What was made; and its connection, or None if that has ended already, or nobody can tell which it is.
    """
    before = connected()
    made = make()
    fresh = [each for identity, each in connected().items() if identity not in before and each.named_in(addresses)]
    # Where both ends are ours, each is the other's.
    own = len(fresh) == 1 or (len(fresh) == 2 and fresh[0].own == fresh[1].peer)
    copied = fresh[0].copy() if own else None
    return made, Watched(copied) if copied is not None else None


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
