"""The result channel of one worker: bounded, with back-pressure, and separate from the weights' pipe.

A worker may have `capacity` results on their way. Each result that the trainer has taken makes room for one more. The
trainer's end never blocks; the worker's end blocks in `put`, and wakes when the trainer closes its end or dies.

Results are pickled. Both ends are processes of one program, started by one another, as with `multiprocessing.Queue`.
"""

from __future__ import annotations

import contextlib
import pickle
import select
import socket
import struct
import traceback
from dataclasses import dataclass
from typing import Any, Final

from weightsync.errors import SenderClosed
from weightsync.transports.process import forget_after_fork

_LENGTH: Final = struct.Struct(">Q")
_CHUNK: Final = 1 << 20
_ROOM = b"r"
_STOP = b"s"


@dataclass(frozen=True, slots=True)
class Started:
    """A worker's first word: it serves its first version, and its function begins."""


@dataclass(frozen=True, slots=True)
class Put:
    """A result, still pickled: it is unpickled when the trainer takes it."""

    versions: tuple[int, ...]
    pickled: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker's last word: the exception that ended it."""

    reason: str
    remote_traceback: str
    version: int | None

    @classmethod
    def by(cls, error: BaseException, version: int | None) -> Failed:
        """Describe an exception."""
        reason = "".join(traceback.format_exception_only(error)).strip()
        return cls(reason, "".join(traceback.format_exception(error)), version)


@dataclass(frozen=True, slots=True)
class Finished:
    """A worker's last word: its function has returned."""


Frame = Started | Put | Failed | Finished


class TrainerEnd:
    """The trainer's end. No call blocks.

    Args:
        sock: one end of a socket pair.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._inbox = bytearray()
        #: Whether the worker's end is closed, and all that it sent has been read.
        self.ended = False
        forget_after_fork(self)

    def fileno(self) -> int:
        """Readable when something has come; -1 once it is closed."""
        return self._sock.fileno()

    def read(self) -> list[Frame]:
        """Everything that has come since the last call."""
        with contextlib.suppress(BlockingIOError):
            while not self.ended:
                self._take()
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def _take(self) -> None:
        try:
            data = self._sock.recv(_CHUNK)
        except BlockingIOError:
            raise
        except OSError:  # reset, or closed by us
            data = b""
        self._inbox += data
        self.ended = not data

    def _next(self) -> Frame | None:
        start = _LENGTH.size
        if len(self._inbox) < start:
            return None
        (nbytes,) = _LENGTH.unpack_from(self._inbox)
        if len(self._inbox) < start + nbytes:
            return None
        frame: Frame = pickle.loads(memoryview(self._inbox)[start : start + nbytes])
        del self._inbox[: start + nbytes]
        return frame

    def make_room(self) -> None:
        """Let the worker put one more result."""
        self._say(_ROOM)

    def stop(self) -> None:
        """Ask the worker to return."""
        self._say(_STOP)

    def _say(self, word: bytes) -> None:
        # It has always room: there are no more words on their way than results, and a stop.
        with contextlib.suppress(OSError):
            self._sock.send(word)

    def close(self) -> None:
        """Close both directions, whoever else holds this end. A worker that waits in `put` wakes."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self.forget()

    def forget(self) -> None:
        """In a forked child: close our copy of the descriptor, and nothing else."""
        self._sock.close()
        self.ended = True


class WorkerEnd:
    """The worker's end.

    Args:
        sock: the other end of the pair.
        capacity: how many results may be on their way.
    """

    def __init__(self, sock: socket.socket, capacity: int) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._room = capacity
        self._stop_asked = False
        self._ended = False

    @property
    def stopped(self) -> bool:
        """Whether the worker is to return: it was asked to, or the trainer has closed the group or is dead."""
        self._listen(wait=0)
        return self._stop_asked or self._ended

    def put(self, value: Any, versions: tuple[int, ...]) -> None:
        """Send a result; waits while `capacity` of them are on their way.

        Raises:
            SenderClosed: the trainer has closed the group, or is dead. The result is dropped.
        """
        frame = Put(versions, pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
        self._listen(wait=0)
        while not self._room and not self._ended:
            self._listen(wait=None)
        self._room -= 1
        self._send(frame)

    def say(self, word: Started | Failed | Finished) -> None:
        """Say the first word, or the last. It needs no room.

        Raises:
            SenderClosed: as `put`.
        """
        self._send(word)

    def _send(self, frame: Frame) -> None:
        data = pickle.dumps(frame, pickle.HIGHEST_PROTOCOL)
        try:
            self._sock.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            self._ended = True
            raise SenderClosed("the trainer has closed its worker group, or is gone: the result is dropped.") from error

    def _listen(self, wait: int | None) -> None:
        """Read what the trainer says: wait for it (None), or not (0)."""
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        while not self._ended and poller.poll(wait):
            try:
                words = self._sock.recv(_CHUNK)
            except OSError:
                words = b""
            self._room += words.count(_ROOM)
            self._stop_asked |= _STOP in words
            self._ended = not words
            wait = 0

    def close(self) -> None:
        """Close it."""
        self._sock.close()
