"""Frames written to a socket that carries the user's own too, as `multiprocessing.connection` frames them."""

from __future__ import annotations

import array
import errno
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

_SHORT: Final = struct.Struct("!i")
_LONG: Final = struct.Struct("!iQ")
_SHORT_MAX: Final = 0x7FFFFFFF
_SEND_FLAGS: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
#: What is written in one call to `Outflow.write`; the rest is for the next, so that no call lasts long.
_ROUNDS: Final = 256


def _nothing() -> None:
    return None


class Outgoing:
    """A frame on its way out.

    Args:
        control: its first bytes.
        payload: the bytes that follow; not copied, so they must stay as they are until the frame has left.
        descriptors: file descriptors that travel with its first byte.
        keep: what owns the descriptors, kept alive until it has left.
        done: called once, when it has left or never will.
    """

    def __init__(
        self,
        control: bytes,
        payload: memoryview | None = None,
        descriptors: Sequence[int] = (),
        keep: object = None,
        done: Callable[[], None] = _nothing,
    ) -> None:
        following = payload.nbytes if payload is not None else 0
        self._pieces = [memoryview(_prefix(len(control) + following) + control)]
        if payload is not None and following:
            self._pieces.append(payload.cast("B"))
        self._descriptors = descriptors
        self._keep = keep
        self._done = done
        self.over = False

    def write(self, sock: socket.socket) -> bool:
        """Write once; True when all has left.

        Raises:
            BlockingIOError: no room now.
            OSError: the connection broke.
        """
        ancillary = []
        if self._descriptors:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", self._descriptors))]
        nbytes = sock.sendmsg(self._pieces, ancillary, _SEND_FLAGS)
        self._descriptors = ()
        while self._pieces and nbytes >= len(self._pieces[0]):
            nbytes -= len(self._pieces.pop(0))
        if self._pieces:
            self._pieces[0] = self._pieces[0][nbytes:]
            return False
        return True

    def end(self) -> None:
        """It has left, or never will."""
        self.over = True
        self._pieces.clear()
        self._done()


def _prefix(nbytes: int) -> bytes:
    return _SHORT.pack(nbytes) if nbytes <= _SHORT_MAX else _LONG.pack(-1, nbytes)


class Outflow:
    """The writing half of a socket: frames leave whole and in order, each as far as there is room.

    Args:
        sock: a stream socket.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._queue: deque[Outgoing] = deque()
        self._broken: OSError | None = None
        self._midway = False

    def __bool__(self) -> bool:
        return bool(self._queue)

    def put(self, frame: Outgoing) -> None:
        """Queue a frame behind all others."""
        self._queue.append(frame)

    def write(self) -> bool:
        """Write what there is room for; True when nothing is left.

        Raises:
            OSError: the connection broke, now or before; what had not left never will.
        """
        if self._midway:
            # An exception from outside, as KeyboardInterrupt, came between writing and counting what was written.
            self._broken = InterruptedError(errno.EINTR, "interrupted in the middle of a frame")
        self._midway = self._broken is None
        try:
            if self._broken is not None:
                raise self._broken
            for _ in range(_ROUNDS):
                if not self._queue:
                    break
                if self._queue[0].write(self._socket):
                    self._queue.popleft().end()
        except BlockingIOError:
            pass
        except OSError as error:
            self._broken = error
            self._midway = False
            self.clear()
            raise
        self._midway = False
        return not self._queue

    def clear(self) -> None:
        """Give up what has not left."""
        while self._queue:
            self._queue.popleft().end()
