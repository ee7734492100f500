"""Finds and watches sockets that torch opens in this process without exposing them."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Connected:
    """A socket that is connected over IP, with the ports of both ends."""

    identity: str
    fd: int
    family: int
    own: int
    peer: int

    def copy(self) -> socket.socket | None:
        """A copy of it; None if it was closed meanwhile: its number may belong to another socket already."""
        with contextlib.suppress(OSError):
            copied = os.dup(self.fd)
            if _identity(copied) == self.identity:
                return socket.socket(fileno=copied)
            os.close(copied)
        return None

    def named_in(self, addresses: Collection[bytes]) -> bool:
        """Whether one of its ends is in one of these texts, each with addresses as the kernel has them."""
        names = [struct.pack("=H", self.family) + struct.pack("!H", port) for port in (self.own, self.peer)]
        return any(name in address for address in addresses for name in names)


def _identity(fd: int | str) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def connected() -> dict[str, Connected]:
    """This process's connected sockets, by identity."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            identity = _identity(entry)
            if identity.startswith("socket:"):
                # Not copied: another thread that looks now would take the copy, which is closed soon, for the socket.
                sock = socket.socket(fileno=int(entry))
                try:
                    if sock.family in (socket.AF_INET, socket.AF_INET6):
                        ports = sock.getsockname()[1], sock.getpeername()[1]
                        found[identity] = Connected(identity, int(entry), sock.family, *ports)
                finally:
                    sock.detach()
    return found


class Watched:
    """A connection that another owner uses and may close, watched through a copy of its socket."""

    def __init__(self, copied: socket.socket) -> None:
        self._socket = copied

    @property
    def ended(self) -> bool:
        """Whether the peer or the network has ended it, and everything that arrived was read."""
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
    """Make an object that opens a connection, and watch that connection.

    Args:
        make: makes the object.
        addresses: texts with the addresses of the connection, once it is made. Others that are opened meanwhile are
            ignored.

    Returns:
        The object, and its connection, or None if that has ended already or cannot be identified.
    """
    before = connected()
    made = make()
    fresh = [each for identity, each in connected().items() if identity not in before and each.named_in(addresses)]
    # Where both ends are ours, each is the other's.
    own = len(fresh) == 1 or (len(fresh) == 2 and fresh[0].own == fresh[1].peer)
    copied = fresh[0].copy() if own else None
    return made, Watched(copied) if copied is not None else None
