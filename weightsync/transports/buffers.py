"""Payload buffers: shared memory where it is worthwhile, and when a buffer may be written again.

A `Segment` is anonymous kernel memory (memfd). It has no name, travels as a file descriptor, and is freed when the last
process that maps it has ended, however that process ended. The trainer maps it shared and writes to it; a worker maps
it as a `weightsync.transports.mapping.Mapping`.

Behind its payload a segment has a seal: 16 random bytes, drawn each time it is filled; zeros while it may be written.
An update names the seal. A worker that reads the same 16 bytes in its own mapping maps that very memory, and nobody has
begun to write it since.

`Pins` are the payloads that a worker may still be reading. Its answers show when it is done.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
from collections import deque
from collections.abc import Callable, Hashable
from enum import Enum
from operator import attrgetter
from typing import Final

from weightsync.errors import TransportError
from weightsync.protocol.messages import SEAL_NBYTES, Ack, Message, Refusal, SlotRef, Update
from weightsync.transports.memory_limit import require_memory
from weightsync.transports.process import forget_after_fork

_Key = tuple[int, int]


class Pins:
    """The buffers that one link has shared with its worker.

    A worker maps the version that it serves. So a buffer stays pinned until the worker has acked a newer version,
    or has refused this version without ever having acked it, or is known dead.
    """

    def __init__(self) -> None:
        self._held: list[tuple[_Key, Buffer]] = []
        self._sent: _Key = (0, 0)
        #: The newest version that the worker has acked.
        self.acked: _Key = (0, 0)
        self._owner = object()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, update: Update, buffer: Buffer | None) -> None:
        """Pin the buffer of ``update``; None if the worker gets its own copy."""
        key = (update.incarnation, update.version)
        self._sent = max(self._sent, key)
        if buffer is not None:
            self._held.append((key, buffer))
            buffer.pins.add((self._owner, key))

    def answered(self, message: Message) -> None:
        """Release what the worker's answer shows to be free. An ack of a version that was never sent does nothing."""
        if isinstance(message, Ack):
            key = (message.incarnation, message.version)
            if self.acked < key <= self._sent:
                self.acked = key
            still_held, acked = [], self.acked
            for pinned in self._held:
                if pinned[0] < acked:
                    pinned[1].pins.discard((self._owner, pinned[0]))
                else:
                    still_held.append(pinned)
            self._held = still_held
        elif isinstance(message, Refusal):
            key = (message.incarnation, message.version)
            if key != self.acked:
                self._release(key)

    def release(self) -> None:
        """Release everything: the worker's process is dead."""
        for key, _ in tuple(self._held):
            self._release(key)

    def retire(self) -> None:
        """Retire everything: the worker can no longer be asked, so these buffers must not be written again."""
        for _, buffer in self._held:
            buffer.retire()
        self.release()

    def _release(self, version: _Key) -> None:
        for key, buffer in self._held:
            if key == version:
                buffer.pins.discard((self._owner, key))
        self._held = [held for held in self._held if held[0] != version]


#: Smaller payloads are cheaper to write into the pipe than to map from a segment.
INLINE_BELOW_NBYTES: Final = 64 * 1024
#: Unpinned buffers that a pool keeps besides the one in use: two alternate in a steady run.
SPARE_BUFFERS: Final = 1
#: For how many payloads a pool keeps one more buffer, once more than two were in use.
KEPT_PAYLOADS: Final = 16

#: What to do if there is no memory for a segment; and for what other reasons there may be none.
_FREE_MEMORY: Final = "Free memory, or let the trainer have more (`ulimit -v`, its container's limit), and send again."
_REMEDIES: Final = {
    errno.EFBIG: "Run `ulimit -f unlimited` before the trainer.",
    errno.EMFILE: "Run `ulimit -n 4096` before the trainer.",
}

_F_SEAL_FUTURE_WRITE: Final = 0x10
#: Its size can never change.
SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
#: The numbers of slots: no two of this process have the same.
NUMBERS: Final = itertools.count(1)

#: The seal of a segment that may be written.
_UNSEALED: Final = bytes(SEAL_NBYTES)
#: Allocates and maps the pages of a mapping (Linux 5.14).
_MADV_POPULATE_WRITE: Final = 23
#: How many bytes are populated at a time: meanwhile no other thread of this process runs Python.
_PIECE_NBYTES: Final = 64 * 1024 * 1024


class NoRoom(TransportError):
    """This process has no memory or file descriptor left for a payload. A later attempt may succeed."""


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
        TransportError: there is not enough memory, no file descriptor is left, or files may not be that large.
    """

    def __init__(self, nbytes: int) -> None:
        self.fd = -1
        self.number = next(NUMBERS)
        self.nbytes = nbytes
        self._view: memoryview | None = None
        self._seal = _UNSEALED
        #: The seal that it gets once it is filled. While it is being filled, parts name the payload by this seal.
        self.next_seal = os.urandom(SEAL_NBYTES)
        self._pinned: object | None = None
        self._asked = False
        try:
            self._allocate()
        except OSError as error:
            remedy = _REMEDIES.get(error.errno or 0, _FREE_MEMORY)
            raise TransportError(f"No shared memory for {nbytes} bytes: {error.strerror}. {remedy}") from error
        forget_after_fork(self)

    def _allocate(self) -> None:
        require_memory(self.nbytes)  # the kernel would kill a process rather than refuse
        self.fd = os.memfd_create("weightsync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # The kernel lets every process read it that may read this process's descriptors.
        os.fchmod(self.fd, 0o600)
        os.ftruncate(self.fd, self.nbytes + SEAL_NBYTES)
        shared = mmap.mmap(self.fd, self.nbytes + SEAL_NBYTES, flags=mmap.MAP_SHARED)
        # Mapped before it is populated: the advice to use huge pages applies only to mapped pages.
        _populate(shared)
        # Allocate what is missing: a lack of memory is an error here, not a SIGBUS at the first write.
        os.posix_fallocate(self.fd, 0, len(shared))
        self._view = memoryview(shared)
        # A process that receives the descriptor can neither resize the memory nor map it for writing.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SIZE_SEALS | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)

    @property
    def view(self) -> memoryview:
        """The whole segment but its seal, writable.

        Raises:
            TransportError: in a forked child.
        """
        return self._whole[: self.nbytes]

    @property
    def _whole(self) -> memoryview:
        if self._view is None:
            raise TransportError("This shared memory belongs to the process that this one was forked from.")
        return self._view

    def sealed(self) -> bytes:
        """The seal of what it holds. Written now if it was unsealed: it must be filled.

        Raises:
            TransportError: in a forked child.
        """
        if self._seal == _UNSEALED:
            self.seal_with(self.next_seal)
        return self._seal

    @property
    def ref(self) -> SlotRef:
        """The reference to it in an update, once it is filled. Raises TransportError: in a forked child."""
        return SlotRef(segment=self.number, seal=self.sealed())

    def seal_with(self, seal: bytes) -> None:
        """Give it the seal of the memory whose contents it has."""
        self._whole[self.nbytes :] = seal
        self._seal = seal

    def unseal(self) -> None:
        """Remove the seal, so that it may be written: readers see that it has none. The next seal is a new one."""
        self.seal_with(_UNSEALED)
        self.next_seal = os.urandom(SEAL_NBYTES)

    def pin(self, register: Callable[[memoryview], object | None]) -> None:
        """Pin the memory for copies from a device, once; it stays so for as long as the segment lives.

        Args:
            register: see `weightsync.weights.device.base.Device.register`.
        """
        if not self._asked:
            self._asked, self._pinned = True, register(self._whole)

    def forget(self) -> None:
        """In a forked child: release the memory."""
        self._view = self._pinned = None
        self._close()

    def _close(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1  # first: after an interrupt its number may be another file's
            os.close(fd)

    def __del__(self) -> None:
        self._close()


class Buffer:
    """Memory for one payload, with a pin for each reader that may still be reading it.

    Args:
        nbytes: the size that it must have.
        storage: the kind of memory.
    """

    def __init__(self, nbytes: int, storage: Storage = Storage.HEAP) -> None:
        self.segment: Segment | None = None
        #: Its capacity in bytes.
        self.nbytes = nbytes
        self._heap: memoryview | None = None
        if storage is Storage.SEGMENTS and nbytes >= INLINE_BELOW_NBYTES:
            self.segment = Segment(nbytes)
        else:
            self._heap = memoryview(anonymous(nbytes))[:nbytes]
        #: Whether other processes may map it.
        self.mappable = self.segment is not None
        #: A token for each reader that may still be reading it.
        self.pins: set[Hashable] = set()
        #: Whether it must never be written again.
        self.retired = False

    @property
    def view(self) -> memoryview:
        """The whole buffer, writable."""
        if self._heap is not None:
            return self._heap
        assert self.segment is not None
        return self.segment.view

    def sealed(self) -> bytes:
        """The seal of what it holds, once it is filled: see `Segment.sealed`. Empty: no worker can map it."""
        return b"" if self.segment is None else self.segment.sealed()

    def unseal(self) -> None:
        """Remove the seal, so that it may be written: see `Segment.unseal`."""
        if self.segment is not None:
            self.segment.unseal()

    @property
    def pinned(self) -> bool:
        """Whether somebody may still read the buffer."""
        return bool(self.pins)

    def pin(self, token: Hashable) -> None:
        """Keep the buffer from being written; pinning twice with one token counts once."""
        self.pins.add(token)

    def unpin(self, token: Hashable) -> None:
        """Undo `pin`; an unknown token is ignored."""
        self.pins.discard(token)

    def retire(self) -> None:
        """Never write it again: a worker that cannot be asked may be reading it."""
        self.retired = True


def anonymous(nbytes: int) -> mmap.mmap:
    """New memory of this process alone, aligned to a page.

    Raises:
        NoRoom: there is not enough memory.
    """
    try:
        heap = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise NoRoom(f"No memory for a payload of {nbytes} bytes: {error}.") from error
    _populate(heap)
    return heap


def _populate(mapping: mmap.mmap) -> None:
    """Allocate and map the pages of a new mapping, huge ones where the kernel gives them. Does what the kernel can."""
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    with contextlib.suppress(OSError):
        for start in range(0, len(mapping), _PIECE_NBYTES):
            mapping.madvise(_MADV_POPULATE_WRITE, start, _PIECE_NBYTES)  # the last piece ends with the mapping


_NBYTES: Final = attrgetter("nbytes")


class Pool:
    """The payload buffers of one sender. Called under its packer's lock.

    Args:
        make: makes a buffer of at least the given size in bytes; None: one in a segment, if it is large.
    """

    def __init__(self, make: Callable[[int], Buffer] | None = None) -> None:
        self._make = make or (lambda nbytes: Buffer(nbytes, Storage.SEGMENTS))
        self._buffers: list[Buffer] = []
        #: How many were in use when the last payloads came.
        self._in_use: deque[int] = deque(maxlen=KEPT_PAYLOADS)

    def acquire(self, nbytes: int) -> Buffer:
        """A buffer of at least ``nbytes`` bytes that is not being read: a used one or a new one.

        The caller may write to it until the next `acquire`; pin it (`Link.send` does) to keep it longer.

        Raises:
            TransportError: there is not enough memory. The pool is unchanged.
        """
        busy: list[Buffer] = []
        fitting: list[Buffer] = []
        for buffer in self._buffers:
            if buffer.pins:  # first: another thread that retires a buffer releases its pins after that
                if not buffer.retired:
                    busy.append(buffer)
            elif not buffer.retired and buffer.nbytes >= nbytes:
                fitting.append(buffer)
        fitting.sort(key=_NBYTES)
        chosen = fitting[0] if fitting else self._make(nbytes)
        self._in_use.append(len(busy))
        spare = min(SPARE_BUFFERS, max(SPARE_BUFFERS, *self._in_use) - len(busy))
        self._buffers = [*busy, chosen, *fitting[1 : 1 + spare]]
        if chosen.mappable:
            chosen.unseal()
        return chosen

    def reserve(self, nbytes: int) -> None:
        """Make now the buffers that a steady run alternates between, unless they are too small for segments.

        Raises:
            TransportError: there is not enough memory for all of them. The pool keeps those that were made.
        """
        if nbytes < INLINE_BELOW_NBYTES:
            return
        while len(self._buffers) < 1 + SPARE_BUFFERS:
            self._buffers.append(self._make(nbytes))

    def close(self) -> None:
        """Drop all buffers. Each is freed when it is no longer mapped."""
        self._buffers.clear()
