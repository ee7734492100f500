"""Payload buffers: shared memory where it is worthwhile, and when a buffer may be written again.

A `Segment` is anonymous kernel memory (memfd). It has no name, travels as a file descriptor, and is freed when the last
process that maps it has ended, however that process ended. The trainer maps it shared and writes to it. A worker maps
it private, so a worker that writes over its parameters changes only its own copy.

`Pins` are the payloads that a worker may still be reading. Its answers show when it is done.

`Named` and `Mapped` list the segments that a worker maps. Both ends of a link keep the same list without messages:
frames of a link arrive in order, so both lists change in step and drop the oldest segment when they are full. A worker
that could not map a segment refuses the update in it; the trainer then passes its descriptor again with the next
version in that segment.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from weightsync.errors import TransportError
from weightsync.protocol import codec
from weightsync.protocol.messages import Ack, Message, Refusal, SlotRef, Update
from weightsync.transports.process import forget_after_fork


class _Computed:
    """The digest of what one buffer held last."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.key: tuple[int, int] | None = None
        self.digest = b""


_lock = threading.Lock()
_known: WeakKeyDictionary[Buffer, _Computed] = WeakKeyDictionary()


def digest_of(payload: memoryview) -> bytes:
    """The SHA-256 of a payload."""
    return hashlib.sha256(payload).digest()


def sent_digest(update: Update, payload: Buffer) -> bytes:
    """The SHA-256 of an update's payload, while its buffer is pinned. Later callers wait for the first."""
    with _lock:
        computed = _known.setdefault(payload, _Computed())
    with computed.lock:
        key = update.incarnation, update.version
        if computed.key != key:
            computed.digest = digest_of(payload.view[: update.nbytes])
            computed.key = key
        return computed.digest


_Key = tuple[int, int]


class Pins:
    """The buffers that one link has shared with its worker.

    A worker maps the version that it serves. So a buffer stays pinned until the worker has acked a newer version,
    or has refused this version without ever having acked it, or is known dead.
    """

    def __init__(self) -> None:
        self._held: list[tuple[_Key, Buffer]] = []
        self._sent: _Key = (0, 0)
        self._acked: _Key = (0, 0)
        self._owner = object()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, update: Update, buffer: Buffer | None) -> None:
        """Pin the buffer of ``update``; None: the worker gets its own copy."""
        key = (update.incarnation, update.version)
        self._sent = max(self._sent, key)
        if buffer is not None:
            self._held.append((key, buffer))
            buffer.pin(self._token(key))

    def answered(self, message: Message) -> None:
        """Release what the worker's answer shows to be free. An ack of a version that was never sent does nothing."""
        if isinstance(message, Ack):
            key = (message.incarnation, message.version)
            self._acked = max(self._acked, key) if key <= self._sent else self._acked
            self._release([held for held in self._held if held[0] < self._acked])
        elif isinstance(message, Refusal):
            key = (message.incarnation, message.version)
            if key != self._acked:
                self._release([held for held in self._held if held[0] == key])

    def release(self) -> None:
        """Release everything: the worker's process is dead."""
        self._release(list(self._held))

    def retire(self) -> None:
        """Retire everything: the worker can no longer be asked, so these buffers must not be written again."""
        for _, buffer in self._held:
            buffer.retire()
        self.release()

    def _release(self, over: list[tuple[_Key, Buffer]]) -> None:
        self._held = [held for held in self._held if held not in over]
        for key, buffer in over:
            buffer.unpin(self._token(key))

    def _token(self, key: _Key) -> Hashable:
        return self._owner, key


#: Smaller payloads are cheaper to write into the pipe than to map from a segment.
INLINE_BELOW_NBYTES: Final = 64 * 1024
#: Unpinned buffers that a pool keeps besides the one in use: two alternate in a steady run.
SPARE_BUFFERS: Final = 1

_F_SEAL_FUTURE_WRITE: Final = 0x10
_SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
#: The numbers of slots: no two of this process have the same.
NUMBERS: Final = itertools.count(1)


#: The errors with which the kernel reports that a process or the machine has no resources left.
_NO_ROOM: Final = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN})


class NoRoom(TransportError):
    """This process has no memory or file descriptor left for a payload. It may have some again later."""


class Storage(Enum):
    """The memory in which a pool's buffers are."""

    #: Large buffers in segments that another process can map.
    SEGMENTS = "segments"
    #: All buffers in this process's own memory.
    HEAP = "heap"


class Segment:
    """Anonymous shared memory, mapped for writing by the process that made it.

    A forked child drops an inherited segment: the memory is the parent's.

    Args:
        nbytes: the size, which never changes.

    Raises:
        TransportError: there is not enough memory, or no file descriptor is left.
    """

    def __init__(self, nbytes: int) -> None:
        self.fd = -1
        self.number = next(NUMBERS)
        self.nbytes = nbytes
        self._view: memoryview | None = None
        try:
            self._allocate()
        except OSError as error:
            raise TransportError(f"No shared memory for {nbytes} bytes: {error.strerror}.") from error
        forget_after_fork(self)

    def _allocate(self) -> None:
        _require_memory(self.nbytes)
        self.fd = os.memfd_create("weightsync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # The kernel makes it readable by everybody who may look into this process's descriptors.
        os.fchmod(self.fd, 0o600)
        # Allocate it now: a lack of memory is an error here, not a SIGBUS at the first write.
        os.posix_fallocate(self.fd, 0, self.nbytes)
        shared = mmap.mmap(self.fd, self.nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._view = memoryview(shared)
        # A process that receives the descriptor can neither resize the memory nor map it for writing.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)

    @property
    def view(self) -> memoryview:
        """The whole segment, writable.

        Raises:
            TransportError: in a forked child.
        """
        if self._view is None:
            raise TransportError("This shared memory belongs to the process that this one was forked from.")
        return self._view

    def forget(self) -> None:
        """In a forked child: release the memory."""
        self._view = None
        self._close()

    def _close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self._close()


def _require_memory(nbytes: int) -> None:
    # The kernel's tmpfs would invoke the out-of-memory killer rather than refuse.
    with contextlib.suppress(FileNotFoundError, PermissionError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable" and int(value.split()[0]) * 1024 < nbytes:
                raise OSError(0, f"only {value.strip()} are available")


class Mapping:
    """A peer's segment, mapped private: reads see the peer's writes, writes stay in this process.

    Args:
        fd: the segment's descriptor, which the caller closes.

    Raises:
        NoRoom: there is not enough memory, or no file descriptor is left.
        TransportError: it cannot be mapped, or is not a sealed segment.
    """

    def __init__(self, fd: int) -> None:
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SIZE_SEALS != _SIZE_SEALS:
                raise TransportError("The peer's shared memory is not sealed, so it could shrink while it is read.")
            nbytes = os.fstat(fd).st_size
            self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE)
        except (OSError, ValueError) as error:
            if isinstance(error, TransportError):
                raise
            kind = NoRoom if isinstance(error, OSError) and error.errno in _NO_ROOM else TransportError
            raise kind(f"The peer's shared memory cannot be mapped: {error}.") from error
        self.view = memoryview(self._map)

    def remap(self) -> None:
        """Drop this process's own pages, so that everything reads as the peer wrote it."""
        self._map.madvise(mmap.MADV_DONTNEED)

    @property
    def nbytes(self) -> int:
        """The size."""
        return len(self._map)


class Buffer:
    """Memory for one payload, with the pins of those who may still be reading it.

    Args:
        nbytes: the size that it must have.
        storage: the kind of memory.
    """

    def __init__(self, nbytes: int, storage: Storage = Storage.HEAP) -> None:
        self.segment: Segment | None = None
        self._heap: memoryview | None = None
        if storage is Storage.SEGMENTS and nbytes >= INLINE_BELOW_NBYTES:
            self.segment = Segment(nbytes)
        else:
            self._heap = memoryview(anonymous(nbytes))[:nbytes]
        self._pins: set[Hashable] = set()
        self._retired = False

    @property
    def view(self) -> memoryview:
        """The whole buffer, writable."""
        if self._heap is not None:
            return self._heap
        assert self.segment is not None
        return self.segment.view

    @property
    def nbytes(self) -> int:
        """Its capacity in bytes."""
        return self.segment.nbytes if self.segment is not None else len(self.view)

    @property
    def pinned(self) -> bool:
        """Whether it may still be read by somebody."""
        return bool(self._pins)

    @property
    def retired(self) -> bool:
        """Whether it must never be written again."""
        return self._retired

    def pin(self, token: Hashable) -> None:
        """Keep it from being written; pinning twice with one token counts once."""
        self._pins.add(token)

    def unpin(self, token: Hashable) -> None:
        """Undo `pin`; an unknown token is ignored."""
        self._pins.discard(token)

    def retire(self) -> None:
        """Never write it again: somebody who cannot be asked may be reading it."""
        self._retired = True


def anonymous(nbytes: int) -> mmap.mmap:
    """New memory of this process alone, aligned to a page.

    Raises:
        NoRoom: there is not enough memory.
    """
    try:
        heap = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise NoRoom(f"No memory for a payload of {nbytes} bytes: {error}.") from error
    with contextlib.suppress(OSError):
        heap.madvise(mmap.MADV_HUGEPAGE)
    return heap


class PoolStatistics(NamedTuple):
    """The contents of a pool."""

    buffers: int
    pinned: int
    segments: int
    nbytes: int


class Pool:
    """The payload buffers of one sender. Called under its driver's lock.

    Args:
        storage: the kind of memory of its buffers.
        make: makes a buffer of at least so many bytes; None: of that kind.
    """

    def __init__(self, storage: Storage = Storage.SEGMENTS, make: Callable[[int], Buffer] | None = None) -> None:
        self._make = make or (lambda nbytes: Buffer(nbytes, storage))
        self._buffers: list[Buffer] = []

    def acquire(self, nbytes: int) -> Buffer:
        """A buffer of at least ``nbytes`` bytes that nobody reads: a used one or a new one.

        The caller may write to it until the next `acquire`; pin it (`Link.send` does) to keep it longer.

        Raises:
            TransportError: there is not enough memory. The pool is unchanged.
        """
        self._buffers = [buffer for buffer in self._buffers if not buffer.retired]
        free = [buffer for buffer in self._buffers if not buffer.pinned]
        fitting = sorted((buffer for buffer in free if buffer.nbytes >= nbytes), key=lambda buffer: buffer.nbytes)
        chosen = fitting[0] if fitting else self._make(nbytes)
        spares = fitting[1 : 1 + SPARE_BUFFERS]
        self._buffers = [buffer for buffer in self._buffers if buffer.pinned]
        self._buffers += [chosen, *spares]
        return chosen

    def statistics(self) -> PoolStatistics:
        """The current contents, without retired buffers."""
        held = [buffer for buffer in self._buffers if not buffer.retired]
        return PoolStatistics(
            buffers=len(held),
            pinned=sum(buffer.pinned for buffer in held),
            segments=sum(buffer.segment is not None for buffer in held),
            nbytes=sum(buffer.nbytes for buffer in held),
        )

    def close(self) -> None:
        """Drop all buffers. Each is freed when nobody maps it any more."""
        self._buffers.clear()


#: Two alternate in a steady run; a third is there for a worker that is behind.
MAX_SEGMENTS: Final = 4


class Numbered(Protocol):
    """A slot that links name: a segment, or memory of a device."""

    @property
    def number(self) -> int:
        """Its number."""

    @property
    def fd(self) -> int:
        """The descriptor by which another process opens it."""


class OnDevice(Protocol):
    """Memory on a device, as the adapters see it."""

    @property
    def identity(self) -> bytes:
        """The device's identity, the same in all processes of the host: 16 bytes."""

    @property
    def nbytes(self) -> int:
        """Its size."""

    @property
    def fd(self) -> int:
        """The descriptor by which another process opens it."""

    def read(self, view: memoryview) -> None:
        """Copy its first bytes to the host."""


class Named:
    """The trainer's list: the segments that this link has named last."""

    def __init__(self) -> None:
        #: For each segment's number, the key of the version that it was named for last.
        self._keys: OrderedDict[int, tuple[int, int]] = OrderedDict()
        #: Segments whose descriptors must be passed again, since the worker may not have mapped them.
        self._again: set[int] = set()

    def missing(self, segment: Numbered) -> tuple[int, ...]:
        """The descriptors to pass with the next frame that names ``segment``."""
        passed = segment.number in self._keys and segment.number not in self._again
        return () if passed else (segment.fd,)

    def name(self, segment: Numbered, update: Update) -> None:
        """Record that a frame names this segment."""
        self._keys[segment.number] = update.incarnation, update.version
        self._keys.move_to_end(segment.number)
        self._again.discard(segment.number)
        if len(self._keys) > MAX_SEGMENTS:
            self._again.discard(self._keys.popitem(last=False)[0])

    def answered(self, message: Message) -> None:
        """Process an answer: the worker may have refused a version because it could not map its segment."""
        if isinstance(message, Refusal):
            key = message.incarnation, message.version
            self._again.update(number for number, named_for in self._keys.items() if named_for == key)


class Mapped:
    """The worker's list: the segments that it maps. Tensors keep a mapping alive after it has left the list.

    Args:
        opener: opens slots that lie on a device; None: this end cannot open any.
    """

    def __init__(self, opener: Callable[[SlotRef, int], OnDevice] | None = None) -> None:
        self.opener = opener
        #: The mapping of each segment, or why there was no room for it.
        self._mappings: OrderedDict[int, Mapping | OnDevice | str] = OrderedDict()

    def find(self, slot: SlotRef, descriptors: tuple[int, ...], untaken: str = "") -> Mapping | OnDevice:
        """The mapping of a segment, made now if its descriptor came with the frame.

        Args:
            slot: names the segment.
            descriptors: the descriptors that came with the frame.
            untaken: why a passed descriptor could not be taken; empty: none was lost.

        Raises:
            ProtocolError: the peer never passed that segment.
            NoRoom: there is no room to map it now, or there was none when its descriptor came.
            TransportError: it cannot be mapped.
        """
        try:
            if untaken or descriptors:
                self._take(slot, descriptors, untaken)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        found = self._mappings.get(slot.segment)
        if found is None:
            raise codec.malformed(f"The peer names segment {slot.segment}, which it never passed", b"")
        self._mappings.move_to_end(slot.segment)
        if len(self._mappings) > MAX_SEGMENTS:
            self._mappings.popitem(last=False)
        if isinstance(found, str):
            raise NoRoom(found)
        return found

    def _take(self, slot: SlotRef, descriptors: tuple[int, ...], untaken: str) -> None:
        if not isinstance(self._mappings.get(slot.segment, ""), str):
            return  # passed again after a refusal for another reason
        try:
            self._mappings[slot.segment] = untaken or self._opened(slot, descriptors[0])
        except NoRoom as error:
            self._mappings[slot.segment] = str(error)

    def _opened(self, slot: SlotRef, descriptor: int) -> Mapping | OnDevice:
        if not slot.device:
            return Mapping(descriptor)
        if self.opener is None:
            raise codec.malformed("The peer names a slot on a device, and this end said that it opens none", b"")
        return self.opener(slot, descriptor)

    def clear(self) -> None:
        """Drop all mappings, except those that something still uses."""
        self._mappings.clear()
