"""Frames on a socket that is shared with the user's messages, in the format of `multiprocessing.connection`.

A frame is a 4-byte big-endian signed length, or -1 and an 8-byte length, then that many bytes. Frames that begin with
our preamble are ours; all others are the user's and are passed through unread. Nothing here blocks, and the blocking
mode of the socket, which the user's descriptor shares, is never changed.

The preamble protects code that reads the raw pipe: `Connection.recv` unpickles whatever it reads, and the preamble is
a complete pickle that calls `weightsync.errors.raw_pipe`, which raises. We never unpickle it: we skip these bytes.
"""

from __future__ import annotations

import array
import errno
import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from msgspec import Struct

from weightsync.errors import ProtocolError
from weightsync.protocol import codec
from weightsync.protocol.codec import MAGIC, Readable
from weightsync.protocol.messages import Message, Update
from weightsync.transports.buffers import NoRoom, Segment, anonymous
from weightsync.transports.device import DeviceSlot

#: GLOBAL weightsync.errors.raw_pipe, EMPTY_TUPLE, REDUCE, STOP.
PREAMBLE: Final = b"cweightsync.errors\nraw_pipe\n)R."
_PREAMBLE_NBYTES: Final = len(PREAMBLE)


def framed(message: Message) -> bytes:
    """A message's control part as it is sent over a pipe."""
    return PREAMBLE + codec.encode(message)


#: The largest control part that is kept. Larger ones carry a layout or extra state, which is encoded elsewhere.
_KEPT_NBYTES: Final = 64 * 1024


class _FramedUpdates:
    """How the last update was framed: a sender gives the same one to the links of all its workers."""

    def __init__(self) -> None:
        self._last: tuple[Update, int, int, bytes] | None = None

    def control(self, update: Update, slot: Segment | DeviceSlot | None = None, descriptors: int = 0) -> bytes:
        """An update's control part as it is sent over a pipe. If this was the last update, it is not encoded again.

        Args:
            slot: where its payload lies, and no other while this version is sent; None if it follows inline.
        """
        number, last = 0 if slot is None else slot.number, self._last
        if last is not None and last[0] is update and last[1] == number and last[2] == descriptors:
            return last[3]
        control = PREAMBLE + codec.encode(update, descriptors, None if slot is None else slot.ref)
        self._last = (update, number, descriptors, control) if len(control) <= _KEPT_NBYTES else None
        return control


framed_updates: Final = _FramedUpdates()


def header_offset(content: Readable) -> int | None:
    """The offset of the header in a weightsync frame; None if the frame is a user message.

    Frames without the preamble are ours too: an older release writes them, and gets the error that names its version.
    """
    if content[: len(PREAMBLE)] == PREAMBLE:
        return len(PREAMBLE)
    return 0 if content[: len(MAGIC)] == MAGIC else None


def may_be_frame_start(content: Readable) -> bool:
    """Whether the part of a frame that has arrived may be the start of a weightsync frame."""
    start = bytes(content[: len(PREAMBLE)])
    return len(start) < len(PREAMBLE) and (
        PREAMBLE.startswith(start) or (len(start) < len(MAGIC) and MAGIC.startswith(start))
    )


_SHORT: Final = struct.Struct("!i")
_LONG: Final = struct.Struct("!iQ")
_CHUNK_NBYTES: Final = 64 * 1024
_SPARE_BUFFERS: Final = 2
#: Descriptors that have arrived and belong to no frame yet: a frame carries one, and is read before the next.
_MAX_DESCRIPTORS: Final = 8
# Plain integers: testing flags of an enum takes a microsecond.
_RECEIVE_FLAGS: Final = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
_TRUNCATED: Final = int(socket.MSG_CTRUNC)
#: Stands for a descriptor that arrived when this process could not open any more: the kernel has dropped it for good.
_DROPPED: Final = -1
_ANCILLARY_NBYTES: Final = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
_NO_DESCRIPTOR: Final = "The descriptor of the peer's shared memory could not be taken: Too many open files."


class Frame(Struct, frozen=True):
    """A complete weightsync frame."""

    message: Message
    payload: memoryview | None
    descriptors: tuple[int, ...]
    #: Why its payload or its descriptor could not be taken; empty if it was taken.
    untaken: str = ""


#: The descriptors of a frame without any, and why they could not be taken.
_UNCLAIMED: Final[tuple[tuple[int, ...], str]] = ((), "")


class UserMessage(NamedTuple):
    """A whole user message, not decoded."""

    data: bytearray


class _Filling:
    """Bytes being gathered, in memory that grows with what has arrived: a false length costs nothing."""

    def __init__(self, nbytes: int, memory: memoryview | None = None) -> None:
        self.nbytes = nbytes
        self.filled = 0
        self.grown = bytearray()
        self._memory = memory

    @property
    def missing(self) -> int:
        return self.nbytes - self.filled

    def room(self) -> memoryview:
        if self._memory is not None:
            return self._memory[self.filled :]
        if self.filled == len(self.grown):
            self.grown.extend(bytes(min(self.missing, max(len(self.grown), _CHUNK_NBYTES))))
        return memoryview(self.grown)[self.filled :]

    def take(self, source: memoryview) -> int:
        """Copy what fits from ``source``; returns how much that was."""
        taken = 0
        while taken < len(source) and self.missing:
            with self.room() as room:
                nbytes = min(len(room), len(source) - taken)
                room[:nbytes] = source[taken : taken + nbytes]
            self.filled += nbytes
            taken += nbytes
        return taken


class _Skipping(_Filling):
    """Bytes that are read and dropped for lack of memory, so that the following frames can be read.

    Args:
        nbytes: how many bytes.
    """

    def __init__(self, nbytes: int, why: str) -> None:
        super().__init__(nbytes)
        self.why = why
        self._scratch = memoryview(bytearray(_CHUNK_NBYTES))

    def room(self) -> memoryview:
        return self._scratch[: self.missing]


class Inflow:
    """The reading half of a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._chunk = memoryview(bytearray(_CHUNK_NBYTES))
        self._start = 0
        #: Where the chunk's bytes end that `next` has not used up; 0 if there are none.
        self.end = 0
        self._descriptors: deque[int] = deque()
        #: The part of a frame that is being gathered; None if none is.
        self.filling: _Filling | None = None
        self._head: codec.Head | None = None
        self._message: Message | None = None
        self._payload: memoryview | None = None
        self._receive_buffers = ReceiveBuffers()

    def read(self) -> bool:
        """Read once; whether more may be there.

        Raises:
            BlockingIOError: there is nothing to read now.
            EOFError: the peer's end is closed.
            OSError: the connection broke.
            ProtocolError: more descriptors arrived than frames that name them.
        """
        filling = self.filling
        if filling is None and self.end == len(self._chunk):
            self._compact()
        with self._chunk[self.end :] if filling is None else filling.room() as room:
            nbytes, ancillary, flags, _ = self._socket.recvmsg_into([room], _ANCILLARY_NBYTES, _RECEIVE_FLAGS)
            if ancillary or flags & _TRUNCATED:
                self._keep_descriptors(ancillary, flags)
            if nbytes == 0:
                raise EOFError
            if filling is None:
                self.end += nbytes
            else:
                filling.filled += nbytes
            return nbytes == len(room)

    def _compact(self) -> None:
        kept = bytes(self._chunk[self._start : self.end])
        self._chunk[: len(kept)] = kept
        self._start, self.end = 0, len(kept)

    def _keep_descriptors(self, ancillary: list[tuple[int, int, bytes]], flags: int) -> None:
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors = array.array("i")
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
                self._descriptors.extend(descriptors)
        if flags & _TRUNCATED:
            self._descriptors.append(_DROPPED)
        if len(self._descriptors) > _MAX_DESCRIPTORS:
            count = len(self._descriptors)
            raise codec.malformed(f"The peer passed {count} descriptors that no frame of its own names", b"")

    def next(self) -> Frame | UserMessage | None:
        """The next whole frame that was read; None if there is none. Raises ProtocolError: the bytes are malformed."""
        if self.filling is None:
            if self._start == self.end:
                return None
            frame = self._whole()
            if frame is not None or not self._begin():
                return frame
        while self.filling is not None:
            self._start += self.filling.take(self._chunk[self._start : self.end])
            if self._start == self.end:
                self._start = self.end = 0
            if self.filling.missing:
                return None
            frame = self._advance(self.filling)
            if frame is not None:
                return frame
        return None

    def _whole(self) -> Frame | UserMessage | None:
        """The frame at the head of the chunk if it is whole there, as most are."""
        content = self._start + _SHORT.size
        if content > self.end:
            return None
        (nbytes,) = _SHORT.unpack_from(self._chunk, self._start)
        if not 0 <= nbytes <= self.end - content:
            return None
        frame = self._chunk[content : content + nbytes]
        self._start = content + nbytes
        if self._start == self.end:
            self._start = self.end = 0
        beginning: Readable = frame[:_PREAMBLE_NBYTES]
        start = _PREAMBLE_NBYTES if beginning == PREAMBLE else header_offset(frame)
        if start is None:
            return UserMessage(bytearray(frame))
        frame = frame[start:]
        head = codec.peek(frame)
        control = codec.HEADER_NBYTES + head.body_nbytes
        if control + head.payload_nbytes != nbytes - start:
            raise _size_mismatch(frame, nbytes - start)
        message = codec.decode_with(head, frame[:control])
        payload = memoryview(bytearray(frame[control:])) if head.payload_nbytes else None
        claimed = self._claim_fds(head, message, frame) if head.descriptors else _UNCLAIMED
        return Frame(message, payload, *claimed)

    def _begin(self) -> bool:
        """Start on the frame at the head of the chunk, once enough of it is there to identify it."""
        read = self._chunk[self._start : self.end]
        if len(read) < _SHORT.size:
            return False
        prefix_nbytes, (nbytes,) = _SHORT.size, _SHORT.unpack_from(read)
        if nbytes == -1:
            if len(read) < _LONG.size:
                return False
            prefix_nbytes, (_, nbytes) = _LONG.size, _LONG.unpack_from(read)
        if nbytes < 0:
            raise codec.malformed(f"A frame claims {nbytes} bytes", read)
        content = read[prefix_nbytes : prefix_nbytes + nbytes]
        if len(content) < nbytes and may_be_frame_start(content):
            return False
        start = header_offset(content)
        if start is not None:
            prefix_nbytes, nbytes, content = prefix_nbytes + start, nbytes - start, content[start:]
            if len(content) < min(codec.HEADER_NBYTES, nbytes):
                return False
            self._head = codec.peek(content)
            if self._head.control_nbytes + self._head.payload_nbytes != nbytes:
                raise _size_mismatch(content, nbytes)
            nbytes = self._head.control_nbytes
        self._start += prefix_nbytes
        self.filling = _Filling(nbytes)
        return True

    def _advance(self, part: _Filling) -> Frame | UserMessage | None:
        """Process a part that is now whole: it completes the frame, or its payload is awaited next."""
        self.filling = None
        if self._head is None:
            return UserMessage(part.grown)
        if self._message is None:
            self._message = codec.decode_with(self._head, part.grown)
            if self._head.payload_nbytes:
                self.filling = self._payload_buffer(self._head.payload_nbytes)
                return None
        if isinstance(part, _Skipping):
            frame = Frame(self._message, None, (), part.why)
        else:
            frame = Frame(self._message, self._payload, *self._claim_fds(self._head, self._message, part.grown))
        self._head = self._message = self._payload = None
        return frame

    def _payload_buffer(self, nbytes: int) -> _Filling:
        """Where to put a payload; nowhere if there is no memory for it."""
        try:
            self._payload = self._memory_for(nbytes)
        except NoRoom as error:
            return _Skipping(nbytes, str(error))
        return _Filling(nbytes, self._payload)

    def _claim_fds(self, head: codec.Head, message: Message, control: codec.Readable) -> tuple[tuple[int, ...], str]:
        """The descriptors of a frame: that of a segment, with the first update in it.

        If the kernel has dropped it, there is none, and the second value says why.
        """
        if not head.descriptors:
            return (), ""
        if head.descriptors > 1 or not isinstance(message, Update) or message.slot is None:
            kind = type(message).__name__
            raise codec.malformed(f"The peer passed {head.descriptors} descriptors with a frame of {kind}", control)
        if head.descriptors > len(self._descriptors):
            raise codec.malformed(f"A frame arrived without its {head.descriptors} descriptors", control)
        descriptor = self._descriptors.popleft()
        return ((descriptor,), "") if descriptor != _DROPPED else ((), _NO_DESCRIPTOR)

    def _memory_for(self, nbytes: int) -> memoryview:
        """Memory for a payload; for a large one see `ReceiveBuffers`."""
        if nbytes < _CHUNK_NBYTES:
            return memoryview(bytearray(nbytes))
        return self._receive_buffers.find(nbytes)

    def close(self) -> None:
        """Close the descriptors that belong to no frame."""
        while self._descriptors:
            descriptor = self._descriptors.popleft()
            if descriptor != _DROPPED:
                os.close(descriptor)


def _size_mismatch(frame: memoryview, nbytes: int) -> ProtocolError:
    return codec.malformed(f"A frame of {nbytes} bytes has a header with another size", frame)


class ReceiveBuffers:
    """Memory for payloads: pages used before, once nothing refers to them."""

    def __init__(self) -> None:
        self._known: deque[mmap.mmap] = deque(maxlen=_SPARE_BUFFERS)

    def find(self, nbytes: int) -> memoryview:
        """Memory for a payload, valid as long as something refers to it. Raises NoRoom: there is not enough."""
        buffer = next((known for known in self._known if len(known) >= nbytes and _is_unused(known)), None)
        if buffer is None:
            buffer = anonymous(nbytes)
            self._known.append(buffer)
        return memoryview(buffer)[:nbytes]


def _is_unused(memory: mmap.mmap) -> bool:
    """Whether no view of it is left: only then can it be resized, here to its own size."""
    try:
        memory.resize(len(memory))
    except BufferError:
        return False
    return True


_SHORT_MAX: Final = 0x7FFFFFFF
_SEND_FLAGS: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
#: What one call to `Outflow.write` writes at most. The rest is left for the next, so that no call takes long.
_ROUNDS: Final = 256


class OutgoingFrame:
    """A frame to be written.

    Args:
        control: its first bytes.
        payload: the bytes that follow. They are not copied, so they must not change until the frame was written.
    """

    def __init__(
        self,
        control: bytes,
        payload: memoryview | None = None,
        descriptors: Sequence[int] = (),
        keep: object = None,
        done: Callable[[], None] | None = None,
    ) -> None:
        payload_nbytes = payload.nbytes if payload is not None else 0
        nbytes = len(control) + payload_nbytes
        prefix = _SHORT.pack(nbytes) if nbytes <= _SHORT_MAX else _LONG.pack(-1, nbytes)
        #: What is left to be written.
        self.pieces = [memoryview(prefix + control)]
        self.nbytes = len(prefix) + nbytes
        if payload is not None and payload_nbytes:
            self.pieces.append(payload.cast("B"))
        #: What is passed with the next byte.
        self.descriptors = descriptors
        self._keep = keep
        self._done = done
        #: Whether it was written whole.
        self.written = False

    def taken(self, nbytes: int) -> None:
        """Record that the socket has taken more bytes, but not all, and the descriptors."""
        self.nbytes -= nbytes
        self.descriptors = ()
        while self.pieces and nbytes >= len(self.pieces[0]):
            nbytes -= len(self.pieces.pop(0))
        if self.pieces:
            self.pieces[0] = self.pieces[0][nbytes:]

    def end(self, written: bool = False) -> None:
        """Record that it was written, or never will be."""
        self.written = written
        self.pieces.clear()
        if self._done is not None:
            self._done()


class Outflow:
    """The writing half of a socket. Frames are written whole and in order, each as far as there is room."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        #: The frames that were not written whole.
        self.queue: deque[OutgoingFrame] = deque()
        #: Number and text of the error that broke it. The error itself would keep the frames of its traceback alive.
        self.broken: tuple[int, str] | None = None
        #: Whether nothing is left to be written, and it is not broken.
        self.idle = True
        self._midway = False

    def write(self, frame: OutgoingFrame | None = None) -> bool:
        """Queue a frame after all others, if one is given, and write what there is room for.

        Returns:
            Whether nothing is left.

        Raises OSError: the connection broke, now or before. What was not written never will be.
        """
        self.idle = False
        if frame is not None:
            self.queue.append(frame)
        if self._midway:
            # An exception from outside, such as KeyboardInterrupt, came between writing and counting the bytes.
            self.broken = errno.EINTR, "interrupted in the middle of a frame"
        self._midway = self.broken is None
        try:
            if self.broken is not None:
                raise OSError(*self.broken)
            for _ in range(_ROUNDS):
                if not self.queue:
                    break
                first = self.queue[0]
                ancillary = []
                if first.descriptors:
                    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", first.descriptors))]
                nbytes = self._socket.sendmsg(first.pieces, ancillary, _SEND_FLAGS)
                if nbytes == first.nbytes:
                    self.queue.popleft().end(written=True)
                else:
                    first.taken(nbytes)
        except BlockingIOError:
            pass
        except OSError as error:
            self.broken = error.errno or 0, error.strerror or str(error)
            self._midway = False
            self.clear()
            raise
        self._midway = False
        self.idle = not self.queue
        return self.idle

    def clear(self) -> None:
        """Drop what was not written."""
        while self.queue:
            self.queue.popleft().end()
