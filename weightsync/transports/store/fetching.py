"""A worker gets a payload from its parent in a fan-out."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Final

import xxhash

from weightsync.errors import TransportError
from weightsync.transports.store.forwarding import LENGTH
from weightsync.transports.store.routes import FetchFailure, Routed
from weightsync.transports.store.stream import connection_to

#: Seconds without a byte after which a parent is given up, and how often the link is checked meanwhile.
SILENCE: Final = 1.0
_LOOKS: Final = 10
_SHA256_NBYTES: Final = 32
_FLAGS: Final = int(socket.MSG_NOSIGNAL)


class NotFetched(Exception):
    """The payload did not arrive whole from the parent."""

    def __init__(self, why: FetchFailure) -> None:
        super().__init__(why.name)
        self.why = why


def fetch(route: Routed, buffer: memoryview, reach: Callable[[int], None], go_on: Callable[[], None]) -> None:
    """Get a payload from the parent that ``route`` names.

    Args:
        buffer: where it goes. After an error its contents are undefined.
        reach: called with the number of bytes that are there.
        go_on: called from time to time; raises to give up.

    Raises NotFetched: not all of it arrived, or it is not the payload.
    """
    try:
        sock = connection_to(route.parent, SILENCE)
    except OSError as error:
        raise NotFetched(FetchFailure.UNREACHABLE) from error
    digest = sha256() if len(route.digest) == _SHA256_NBYTES else xxhash.xxh3_128()
    with sock, _errors_as_not_fetched():
        sock.settimeout(SILENCE / _LOOKS)
        sock.sendall(route.token, _FLAGS)
        filled = 0
        while filled < len(buffer):
            piece = buffer[filled : filled + _next_length(sock, len(buffer) - filled, go_on)]
            _fill(sock, piece, go_on)
            digest.update(piece)
            filled += len(piece)
            reach(filled)
    if digest.digest() != route.digest:
        raise NotFetched(FetchFailure.WRONG)


@contextlib.contextmanager
def _errors_as_not_fetched() -> Iterator[None]:
    try:
        yield
    except TransportError:
        raise
    except OSError as error:
        raise NotFetched(FetchFailure.ENDED) from error


def _next_length(sock: socket.socket, nbytes_left: int, go_on: Callable[[], None]) -> int:
    """The length of the next piece; 0: the parent is waiting itself."""
    head = bytearray(LENGTH.size)
    _fill(sock, memoryview(head), go_on)
    (nbytes,) = LENGTH.unpack(head)
    if nbytes > nbytes_left:
        raise NotFetched(FetchFailure.WRONG)
    return int(nbytes)


def _fill(sock: socket.socket, buffer: memoryview, go_on: Callable[[], None]) -> None:
    filled, silent_looks = 0, 0
    while filled < len(buffer):
        try:
            nbytes = sock.recv_into(buffer[filled:])
        except TimeoutError:
            silent_looks += 1
            go_on()
            if silent_looks >= _LOOKS:
                raise NotFetched(FetchFailure.SILENT) from None
            continue
        if not nbytes:
            raise NotFetched(FetchFailure.ENDED)
        filled, silent_looks = filled + nbytes, 0
