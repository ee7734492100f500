"""Warns in the log, once per process, about links that other hosts can reach and no key protects."""

from __future__ import annotations

import ipaddress
import logging
import socket
from pathlib import Path
from typing import Final

from weightsync.keys import VARIABLE
from weightsync.transports.process import PerProcess

logger = logging.getLogger("weightsync")

_LISTENS: Final = "0A"


class _Warning(PerProcess):
    """Whether this process has already warned."""

    def _begin(self) -> None:
        self._warned = False

    def once(self) -> bool:
        """Whether to warn now: True once in this process."""
        with self._lock:
            before, self._warned = self._warned, True
        return not before


_warning = _Warning()


_OUR_KEY: Final = f"Give both ends the same secret as key= or in {VARIABLE}"
#: The makers of a connection that is given as a pipe authenticate it.
AUTHKEY: Final = (
    f"Neither key= nor {VARIABLE} is used on a connection given as a pipe: give Listener and Client the same authkey="
)


def warn_exposed(link: str, remedy: str = _OUR_KEY) -> None:
    """Warn in the log, once per process, that others can reach a link without a key."""
    if _warning.once():
        logger.warning(
            "%s, and no key is set: anyone who reaches it can read the weights and send others. %s, or use a private "
            "network: see SECURITY.md. This warning is logged once per process.",
            link,
            remedy,
        )


def is_exposed(host: str, port: int) -> bool:
    """Whether other hosts can reach a server at that address: it is not the loopback's, or not only."""
    return not _resolves_to_loopback(host) or _listens_everywhere(port)


def is_loopback(address: str) -> bool:
    """Whether an address is one of a loopback; False for the name of a host."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _resolves_to_loopback(host: str) -> bool:
    try:
        return is_loopback(host) or is_loopback(socket.gethostbyname(host))
    except OSError:
        return False


def _listens_everywhere(port: int) -> bool:
    """Whether a process of our network namespace listens on that port of all interfaces, as a user's own store does."""
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
    """Whether the other end of a connected socket may be on another host."""
    try:
        return sock.family != socket.AF_UNIX and not is_loopback(sock.getpeername()[0])
    except OSError:
        return False
