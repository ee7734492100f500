"""A user's connection as a socket of ours, and how the ways it can fail are told."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
import termios
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final

from weightsync.errors import ConfigurationError, ProtocolError, TransportError, WeightSyncError

PLEASE: Final = "give one end of multiprocessing.Pipe(duplex=True)"

_COUNT: Final = struct.Struct("i")

#: Makes the error, given what the asker calls the peer: one instance raised twice would mix tracebacks.
Failure = Callable[[str], WeightSyncError]


class _Socket(socket.socket):
    """Closes when it is let go of, without a warning: whoever leaves a link unclosed has its channel close it."""

    def __del__(self) -> None:
        self.close()


def socket_of(connection: Connection[Any, Any]) -> socket.socket:
    """A socket on a descriptor of our own: closing it leaves the user's open, and the reverse.

    Raises:
        ConfigurationError: the connection is closed, one-way or not a socket.
        TransportError: no file descriptor is left.
    """
    if not isinstance(connection, Connection):
        raise ConfigurationError(f"A {type(connection).__name__} is no connection: {PLEASE}.")
    if connection.closed:
        raise ConfigurationError("The connection is closed.")
    two_way = connection.readable and connection.writable
    if not (two_way and stat.S_ISSOCK(os.fstat(connection.fileno()).st_mode)):
        raise ConfigurationError(f"The connection goes one way only: {PLEASE}.")
    try:
        sock = _Socket(fileno=os.dup(connection.fileno()))
    except OSError as error:
        raise TransportError(f"The connection cannot be used: {error.strerror}.") from error
    if socket.getdefaulttimeout() is not None:
        # Python has just made the shared descriptor non-blocking: it is the user's too.
        sock.settimeout(None)
    return sock


def unread_nbytes(sock: socket.socket) -> int:
    """How much memory holds what was written to a socket of this host and not read at its other end; 0: none."""
    counted = bytearray(_COUNT.size)
    fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, counted)
    (nbytes,) = _COUNT.unpack(counted)
    return int(nbytes)


def lost(what: str, cause: Exception | None = None) -> Failure:
    """The connection is gone."""

    def error(peer: str) -> WeightSyncError:
        gone = TransportError(f"The connection to {peer} {what}.")
        gone.__cause__ = cause
        return gone

    return error


def broken(cause: ProtocolError) -> Failure:
    """The peer broke the protocol."""
    return lambda peer: ProtocolError(f"From {peer}: {cause.message}", unread=cause.unread)
