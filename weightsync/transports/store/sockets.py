"""Finds sockets that torch opens in this process without exposing them."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Connected:
    """A socket that is connected over IP, with the port of its other end."""

    identity: str
    fd: int
    peer: int

    def copy(self) -> socket.socket | None:
        """A copy of it; None if it was closed meanwhile: its number may belong to another socket already."""
        with contextlib.suppress(OSError):
            copied = os.dup(self.fd)
            if _identity(copied) == self.identity:
                return socket.socket(fileno=copied)
            os.close(copied)
        return None


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
                        found[identity] = Connected(identity, int(entry), sock.getpeername()[1])
                finally:
                    sock.detach()
    return found
