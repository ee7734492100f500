"""Links that others than their two ends can reach, and that no key protects: said once a process, in the log."""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
from pathlib import Path
from typing import Final

from weightsync.keys import VARIABLE
from weightsync.transports.process import forget_after_fork

logger = logging.getLogger("weightsync")

_LISTENS: Final = "0A"


class _Said:
    """Whether it was said in this process."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a forked child: not yet."""
        self._lock = threading.Lock()
        self._said = False
        forget_after_fork(self)

    def once(self) -> bool:
        """Whether it is to be said now."""
        with self._lock:
            before, self._said = self._said, True
        return not before


_said = _Said()


_OUR_KEY: Final = f"Give both ends the same secret as key= or in {VARIABLE}"
#: Connections given as pipes are authenticated by who makes them.
AUTHKEY: Final = (
    f"Neither key= nor {VARIABLE} is used on a connection given as a pipe: give Listener and Client the same authkey="
)


def tell(link: str, remedy: str = _OUR_KEY) -> None:
    """Say in the log, once a process, that a link without a key can be reached by others.

    Args:
        link: which, and how: the beginning of a sentence.
        remedy: what to do: the beginning of a sentence.
    """
    if _said.once():
        logger.warning(
            "%s, and has no key of ours: whoever reaches it can read the weights and send others. %s, or keep the "
            "network to yourself: see SECURITY.md. This is said once.",
            link,
            remedy,
        )


def is_exposed(host: str, port: int) -> bool:
    """Whether others than this host can reach what listens there: its address is not the loopback's, or not only."""
    return not _is_loopback(host) or _listens_everywhere(port)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        pass  # a name
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:
        return False


def _listens_everywhere(port: int) -> bool:
    """Whether somebody in our network namespace listens on that port of all interfaces, as a user's own store does."""
    for name in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/net/{name}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            _, local, _, state, *_ = row.split()
            address, _, listened = local.partition(":")
            if state == _LISTENS and int(listened, 16) == port and not int(address, 16):
                return True
    return False


def leaves_host(sock: socket.socket) -> bool:
    """Whether a connected socket's other end may be on another host."""
    try:
        return sock.family != socket.AF_UNIX and not _is_loopback(sock.getpeername()[0])
    except OSError:
        return False
