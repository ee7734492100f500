"""Sockets that torch opens in this process without handing them out: found by what is new, and watched from beside."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Connected:
    """A socket that is connected over IP."""

    fd: int
    own: int
    peer: int


def connected() -> dict[str, Connected]:
    """This process's connected sockets, by their identity."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            identity = os.readlink(f"/proc/self/fd/{entry}")
            if identity.startswith("socket:"):
                # Without a copy: another thread that looks just now would take that for the socket, and it ends soon.
                sock = socket.socket(fileno=int(entry))
                try:
                    if sock.family in (socket.AF_INET, socket.AF_INET6):
                        found[identity] = Connected(int(entry), sock.getsockname()[1], sock.getpeername()[1])
                finally:
                    sock.detach()
    return found


class Watched:
    """A connection that somebody else uses, and may close: whether it has ended is still seen here."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=os.dup(fd))

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


def watching(make: Callable[[], Made], but: int) -> tuple[Made, Watched | None]:
    """Make something that opens a connection, and watch that.

    Args:
        make: makes it.
        but: the peer's port of connections that are not meant.

    Returns:
        What was made; and its connection, or None if others were opened meanwhile, and nobody can tell.
    """
    before = connected()
    made = make()
    fresh = [each for identity, each in connected().items() if identity not in before and each.peer != but]
    # Where both ends are ours, each is the other's.
    own = len(fresh) == 1 or (len(fresh) == 2 and fresh[0].own == fresh[1].peer)
    return made, Watched(fresh[0].fd) if own else None
