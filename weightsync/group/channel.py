"""The result channel of one worker: bounded, with back-pressure, and separate from the weights' pipe.

A worker may have `capacity` results in flight. Each result that the trainer has taken makes room for one more. The
trainer's end never blocks; the worker's end blocks in `put`, and wakes when the trainer closes its end or dies.

It is a socket pair, or for a worker of another parent a TCP connection (`weightsync.group.reception`). Results are
pickled. Both ends are processes of one program, as with `multiprocessing.Queue`.
"""

from __future__ import annotations

import contextlib
import pickle
import select
import socket
import struct
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol

from weightsync.clock import Deadline
from weightsync.engine.driver import Shield
from weightsync.errors import ConfigurationError, SenderClosed
from weightsync.group.pickling import pickled
from weightsync.transports.process import forget_after_fork

#: The lengths of a frame, and of the result that follows it; 0: none does.
_LENGTHS: Final = struct.Struct(">QQ")
_CHUNK: Final = 1 << 20
#: Smaller results are written together with their frames.
_JOINED_NBYTES: Final = 64 << 10
#: What the trainer says: one of these, and a version if it is announced.
_WORD: Final = struct.Struct(">cQ")
_ROOM: Final = b"r"
_STOP: Final = b"s"
_VERSION: Final = b"v"
#: Milliseconds after which a worker that waits for room looks again: another of its threads may have read the word.
_LOOK_MS: Final = 100


@dataclass(frozen=True, slots=True)
class Started:
    """A worker's first word: it serves its first version, and its function begins."""


@dataclass(frozen=True, slots=True)
class Held:
    """A worker waits at a step for a newer version."""


@dataclass(frozen=True, slots=True)
class Released:
    """A worker that was held has gone on."""


@dataclass(frozen=True, slots=True)
class Put:
    """A result, still pickled: it is unpickled when the trainer takes it."""

    versions: tuple[int, ...]
    pickled: bytes | memoryview


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """A result that a worker has put.

    Attributes:
        worker: the worker's index.
        versions: the versions that the result was made with, oldest first; several if a new one went live in between.
        value: the item that was passed to `Worker.put`.
    """

    worker: int
    versions: tuple[int, ...]
    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker's last word: the exception that ended it."""

    reason: str
    remote_traceback: str
    version: int | None
    #: Whether a restarted worker would fail in the same way.
    lasting: bool = False

    @classmethod
    def by(cls, error: BaseException, version: int | None) -> Failed:
        """Describe an exception."""
        reason, trace = "".join(traceback.format_exception_only(error)).strip(), traceback.format_exception(error)
        return cls(reason, "".join(trace), version, isinstance(error, ConfigurationError))


@dataclass(frozen=True, slots=True)
class Finished:
    """A worker's last word: its function has returned."""


Frame = Started | Held | Released | Put | Failed | Finished


class Arrival(Protocol):
    """Where the connection of a worker that is not there yet will come in."""

    def fileno(self) -> int:
        """Readable when a connection waits to be accepted."""

    def admit(self) -> None:
        """Accept waiting connections and hand each to the end that expects it. Never blocks."""


class TrainerEnd:
    """The trainer's end. No call blocks.

    Args:
        sock: one end of a socket pair; None if the worker will connect.
        arrival: where that connection will arrive.
    """

    def __init__(self, sock: socket.socket | None, arrival: Arrival | None = None) -> None:
        self._sock: socket.socket | None = None
        self._arrival = arrival
        #: What has arrived of frames that were not read yet, in pieces.
        self._pieces: deque[bytes] = deque()
        self._outbox = bytearray()
        self._announced = self._told = 0
        self._nbytes_read = 0
        #: Whether the worker's end is closed, and all that it sent has been read.
        self.ended = False
        forget_after_fork(self)
        if sock is not None:
            self.attach(sock)

    def attach(self, sock: socket.socket) -> None:
        """The worker has connected."""
        sock.setblocking(False)
        self._sock = sock
        self._flush()

    @property
    def attached(self) -> bool:
        """Whether the worker has connected."""
        return self._sock is not None

    def fileno(self) -> int:
        """Readable when something has arrived; -1 once it is closed."""
        if self._sock is not None:
            return self._sock.fileno()
        return -1 if self.ended or self._arrival is None else self._arrival.fileno()

    @property
    def events(self) -> int:
        """What to poll for: something to read, and room for what could not be written yet."""
        return select.POLLIN | (select.POLLOUT if self._outbox and self.attached else 0)

    def read(self) -> list[Frame]:
        """Everything that has arrived since the last call."""
        if self._arrival is not None and not self.attached:
            self._arrival.admit()
        self._flush()
        if self._sock is not None and not self.ended:
            self._take(self._sock)
        return self._take_frames()

    def _take(self, sock: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                # One call: a signal handler's exception, such as KeyboardInterrupt, loses nothing that has arrived.
                self._pieces.extend(iter(partial(sock.recv, _CHUNK, socket.MSG_DONTWAIT), b""))
            except BlockingIOError:
                raise
            except OSError:  # reset, or closed here
                pass
            self.ended = True

    @property
    def nbytes(self) -> int:
        """How many bytes have arrived: a large result is on its way while this grows."""
        return self._nbytes_read + sum(map(len, self._pieces))

    def _take_frames(self) -> list[Frame]:
        """The whole frames among what has arrived. They are taken from it last, for the same reason."""
        frames: list[Frame] = []
        if not self._has_whole_frame():
            return frames
        data, start = memoryview(b"".join(self._pieces)), 0
        while nbytes := _nbytes_of_first(data[start:]):
            frames.append(_frame(data[start : start + nbytes]))
            start += nbytes
        left = deque([bytes(data[start:])] if start < len(data) else [])
        self._nbytes_read, self._pieces = self._nbytes_read + start, left
        return frames

    def _has_whole_frame(self) -> bool:
        """Whether the first frame is there."""
        if self._pieces and len(self._pieces[0]) < _LENGTHS.size:
            self._pieces = deque([b"".join(self._pieces)])
        there = sum(map(len, self._pieces))
        return there >= _LENGTHS.size and there >= _LENGTHS.size + sum(_LENGTHS.unpack_from(self._pieces[0]))

    def make_room(self) -> None:
        """Let the worker put one more result."""
        self._say(_ROOM)

    def stop(self) -> None:
        """Ask the worker to return."""
        self._say(_STOP)

    def announce(self, version: int) -> None:
        """Tell the worker which version is the newest one dispatched. The newest wins if the worker is slow to read."""
        self._announced = max(version, self._announced)
        self._flush()

    def _say(self, word: bytes) -> None:
        self._outbox += _WORD.pack(word, 0)
        self._flush()

    def _flush(self) -> None:
        """Write what there is room for. The rest is written when the group next reads."""
        if self._sock is None or not (self._outbox or self._told < self._announced):
            return
        # Shielded: if a handler raised between a write and its count, the same would be written again.
        with Shield(lambda: None), contextlib.suppress(BlockingIOError):
            while self._outbox or self._told < self._announced:
                if not self._outbox:
                    self._told = self._announced
                    self._outbox += _WORD.pack(_VERSION, self._told)
                try:
                    del self._outbox[: self._sock.send(self._outbox)]
                except BlockingIOError:
                    raise
                except OSError:  # the worker is gone
                    self._outbox.clear()

    def close(self) -> None:
        """Close both directions, even if another process holds this end. A worker that waits in `put` wakes."""
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        self.forget()

    def forget(self) -> None:
        """In a forked child: close our copy of the descriptor, and nothing else."""
        if self._sock is not None:
            self._sock.close()
        self.ended = True


def _nbytes_of_first(data: memoryview) -> int:
    """The size of the first frame, with all that belongs to it; 0: it is not whole."""
    if len(data) < _LENGTHS.size:
        return 0
    nbytes = _LENGTHS.size + sum(_LENGTHS.unpack_from(data))
    return nbytes if len(data) >= nbytes else 0


def _frame(data: memoryview) -> Frame:
    """Read a whole frame. A result stays where it is."""
    end = _LENGTHS.size + _LENGTHS.unpack_from(data)[0]
    frame: Frame = pickle.loads(data[_LENGTHS.size : end])
    return replace(frame, pickled=data[end:]) if isinstance(frame, Put) else frame


class WorkerEnd:
    """The worker's end. All threads of the worker may use it.

    Args:
        sock: the other end of the pair, or of the connection.
        capacity: how many results may be in flight.
    """

    def __init__(self, sock: socket.socket, capacity: int) -> None:
        sock.setblocking(True)
        self._sock = sock
        # Re-entrant: a signal handler may use this end too while its own thread holds them.
        self._lock = threading.RLock()
        #: Held by the thread that puts: the others have their turn after it, and a handler of its own in the middle.
        self._putting = threading.RLock()
        self._inbox = bytearray()
        #: What is still to be written. It stays whole if a signal handler's exception ends the call that writes it.
        self._outbox: deque[memoryview] = deque()
        self._room = capacity
        self._stop_asked = False
        self._ended = False
        self._announced = 0

    @property
    def stopped(self) -> bool:
        """Whether the worker is to return: it was asked to, or the trainer has closed the group or is dead."""
        self._listen(milliseconds=0)
        return self._stop_asked or self._ended

    def stops_within(self, seconds: float) -> bool:
        """Whether the worker is to return, now or within some seconds."""
        deadline = Deadline(seconds)
        while not self.stopped and not deadline.passed:
            self._listen(milliseconds=_LOOK_MS)
        return self.stopped

    @property
    def version(self) -> int:
        """The newest version that the trainer has announced over this channel; 0: none."""
        self._listen(milliseconds=0)
        return self._announced

    def put(self, value: Any, versions: Callable[[], tuple[int, ...]]) -> None:
        """Send a result. Blocks while `capacity` results are in flight.

        Args:
            value: the result.
            versions: asked for the versions it was made with, once there is room for it.

        Raises:
            SenderClosed: the trainer has closed the group, or is dead. The result is dropped.
            ConfigurationError: the value cannot be pickled. Nothing was sent.
        """
        result = _pickle_result(value)
        with self._putting:
            self._listen(milliseconds=0)
            while not self._room and not self._ended:
                self._listen(milliseconds=_LOOK_MS)
            self._send(Put(versions(), result))

    def say(self, word: Started | Failed | Finished) -> None:
        """Say the first word, or the last. It needs no room.

        Raises:
            SenderClosed: as `put`.
        """
        self._send(word)

    def mention(self, word: Held | Released) -> None:
        """Say a word as soon as the trainer reads. Never waits.

        Raises:
            SenderClosed: as `put`.
        """
        self._queue(word)
        self.flush()

    def _send(self, frame: Frame) -> None:
        self._queue(frame)
        self.flush()
        while self._outbox:
            self._is_ready(select.POLLOUT, None)
            self.flush()

    def _queue(self, frame: Frame) -> None:
        result: bytes | memoryview = b""
        if isinstance(frame, Put):  # as it is: a pickle of the pickle would be a copy
            result, frame = frame.pickled, replace(frame, pickled=b"")
        data = pickle.dumps(frame, pickle.HIGHEST_PROTOCOL)
        pieces = [_LENGTHS.pack(len(data), len(result)) + data, result]
        joined, needs_room = pieces if len(result) >= _JOINED_NBYTES else [b"".join(pieces)], isinstance(frame, Put)
        with self._lock:  # `_hear` makes room
            self._outbox += map(memoryview, joined)
            self._room -= needs_room  # last: a result that an interrupt leaves out takes none

    def flush(self) -> None:
        """Write what there is room for. Never waits.

        Raises:
            SenderClosed: as `put`.
        """
        if self._ended:  # TCP would still take the first bytes
            raise self._closed()
        try:
            with Shield(lambda: None), self._lock, contextlib.suppress(BlockingIOError):  # as in `TrainerEnd._flush`
                while self._outbox:
                    first = self._outbox[0]
                    self._outbox[0] = first[self._sock.send(first, socket.MSG_DONTWAIT) :]
                    if not self._outbox[0]:
                        self._outbox.popleft()
        except OSError as error:
            self._ended = True
            raise self._closed() from error

    def _closed(self) -> SenderClosed:
        gone = "the trainer has closed its worker group, or is gone"
        why = "this worker's function has returned" if self._sock.fileno() < 0 else gone
        return SenderClosed(f"{why}: the result is dropped.")

    def _listen(self, milliseconds: int) -> None:
        """Read what the trainer says, and wait at most this many milliseconds for it."""
        if self._ended or not self._is_ready(select.POLLIN, milliseconds):
            return
        with Shield(lambda: None), self._lock, contextlib.suppress(BlockingIOError):
            while not self._ended:
                self._hear(_receive_available(self._sock))

    def _is_ready(self, events: int, milliseconds: int | None) -> bool:
        """Wait at most these milliseconds for events of the socket. Returns whether there are any, or it is closed."""
        poller = select.poll()
        try:
            poller.register(self._sock, events)
        except ValueError:  # another thread has closed it meanwhile
            return True
        return bool(poller.poll(milliseconds))

    def _hear(self, data: bytes) -> None:
        self._ended |= not data
        self._inbox += data
        whole_nbytes = len(self._inbox) // _WORD.size * _WORD.size
        for word, version in _WORD.iter_unpack(self._inbox[:whole_nbytes]):
            self._room += word == _ROOM
            self._stop_asked |= word == _STOP
            self._announced = max(self._announced, version)
        del self._inbox[:whole_nbytes]

    def close(self) -> None:
        """Close it. A thread that goes on putting gets `SenderClosed`."""
        self._ended = True
        self._sock.close()


def _pickle_result(value: Any) -> memoryview:
    with Shield(lambda: None):  # what a signal handler raises is no error of pickle's
        try:
            return pickled(value)
        except Exception as error:  # pickle raises several kinds, and a value's own methods any
            raise ConfigurationError(
                f"put() was given a {type(value).__name__} that cannot be pickled ({type(error).__name__}: {error}): "
                "put tensors, arrays, numbers, containers of these, or instances of classes that a module defines at "
                "its top level. Nothing was sent."
            ) from error


def _receive_available(sock: socket.socket) -> bytes:
    """What has arrived; empty if the other end is gone. Raises BlockingIOError: nothing has arrived."""
    try:
        return sock.recv(_CHUNK, socket.MSG_DONTWAIT)
    except BlockingIOError:
        raise
    except OSError:  # reset, or closed here
        return b""
