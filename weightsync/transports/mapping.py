"""A worker's mapping of a segment in which its trainer packs payloads, one after another.

It is private: reads see what the trainer writes, and a worker that writes over its parameters changes only its own copy
of a page. Before the segment's next payload is read such pages must be dropped.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from typing import Final
from weakref import ref as weakref

import numpy

from weightsync.errors import TransportError
from weightsync.protocol.messages import SEAL_NBYTES
from weightsync.transports.buffers import SIZE_SEALS, NoRoom

#: Maps the pages of a mapping for reading, without a fault for each (Linux 5.14).
_MADV_POPULATE_READ: Final = 22
#: The size of a segment whose pages are mapped again, whether or not this process has written some.
FEW_PAGES_NBYTES: Final = 256 * 1024
_PAGEMAP: Final = "/proc/self/pagemap"
#: Bits of an entry in it.
_PRESENT_OR_SWAPPED: Final = numpy.uint64(3 << 62)
_OF_FILE: Final = numpy.uint64(1 << 61)
#: The errors with which the kernel reports that a process or the machine has no resources left.
_NO_ROOM: Final = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN})


class Mapping:
    """A peer's segment, mapped private: reads see the peer's writes, writes stay in this process.

    Args:
        fd: the segment's descriptor, which the caller closes.
        pinnable: whether to map it once more, for reading and shared, so that it can be pinned: to pin pages that are
            mapped private, the kernel would copy them.

    Raises:
        NoRoom: there is not enough memory, or no file descriptor is left.
        TransportError: it cannot be mapped, or is not a sealed segment.
    """

    def __init__(self, fd: int, pinnable: bool = False) -> None:
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SIZE_SEALS != SIZE_SEALS:
                raise TransportError("The peer's shared memory is not sealed, so it could shrink while it is read.")
            nbytes = os.fstat(fd).st_size
            if nbytes < SEAL_NBYTES:
                raise TransportError(f"The peer's shared memory has {nbytes} bytes: there is no room for a seal.")
            self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE)
            shared = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) if pinnable else None
        except (OSError, ValueError) as error:
            if isinstance(error, TransportError):
                raise
            kind = NoRoom if isinstance(error, OSError) and error.errno in _NO_ROOM else TransportError
            raise kind(f"The peer's shared memory cannot be mapped: {error}.") from error
        with contextlib.suppress(OSError):  # the kernel is older than this advice, or has no memory for the tables
            self._map.madvise(_MADV_POPULATE_READ)
        self.view = memoryview(self._map)[:-SEAL_NBYTES]
        #: The size of the largest payload.
        self.nbytes = nbytes - SEAL_NBYTES
        self._address = int(numpy.frombuffer(self._map, dtype=numpy.uint8).__array_interface__["data"][0])
        self._shared = None if shared is None else memoryview(shared)
        self._pinned: object | None = None
        #: The views that `lend` has returned, each until it is no longer referenced.
        self._lent: list[weakref[memoryview]] = []
        #: Whether this process has written nothing here, and no tensor is left to write to.
        self._untouched = False
        #: The id of the payload that is read while the peer still fills the segment; empty: none is.
        self._read_ahead = b""

    def lend(self, nbytes: int) -> memoryview:
        """The first bytes, for an update that has arrived. A tensor over them keeps the very object that is returned.

        It must not be written before `remap`.
        """
        lent = self.view[:nbytes]
        self._lent = [each for each in self._lent if each() is not None]
        self._lent.append(weakref(lent))
        return lent

    def read_ahead(self, payload_id: bytes, nbytes: int) -> memoryview:
        """The first bytes, while the peer still fills the segment with a payload: they are read as the peer wrote them.

        Only ranges that the peer has named may be read. What is read is the payload only if the segment is sealed with
        ``payload_id`` in the end.
        """
        if payload_id != self._read_ahead:
            self._read_ahead = payload_id
            if not self._untouched:
                self._drop_own_pages()
        return self.view[:nbytes]

    @property
    def pinnable(self) -> bool:
        """Whether it is mapped so that it can be pinned, and that has not failed."""
        return self._shared is not None

    def pinned(self, nbytes: int, register: Callable[[memoryview], object | None]) -> memoryview | None:
        """The first bytes as the peer wrote them, in memory that is pinned for copies to a device. Read-only.

        None: they cannot be pinned, or the mapping is not `pinnable`.

        Args:
            register: called once: see `weightsync.weights.device.base.Device.register`.
        """
        if self._shared is not None and self._pinned is None:
            self._pinned = register(self._shared)
            if self._pinned is None:
                self._shared = None
        return None if self._shared is None else self._shared[:nbytes]

    def tidy(self, unwritten: Callable[[memoryview], bool]) -> None:
        """Do the work of the next `remap` now, if nothing writes to the views that are still lent (``unwritten``)."""
        lent = [found for each in self._lent if (found := each()) is not None]
        if not self._untouched and all(map(unwritten, lent)):
            self._drop_own_pages()
            self._untouched = True

    @property
    def seal(self) -> bytes:
        """The seal that is read in this mapping now."""
        return self._map[-SEAL_NBYTES:]

    def remap(self) -> bool:
        """Drop the pages that this process has written, so that everything reads as the peer wrote it.

        If it has written none in a large segment, all stay mapped: mapping them again costs a page fault for each.

        Returns: whether there may have been such pages. If so, bytes that were read ahead may be from them.
        """
        dropped = not self._untouched and self._drop_own_pages()
        self._untouched = False
        return dropped

    def _drop_own_pages(self) -> bool:
        # Finding out whether there are any takes longer than mapping a few pages again.
        if self.nbytes > FEW_PAGES_NBYTES and not _has_own_pages(self._address, len(self._map)):
            return False
        self._map.madvise(mmap.MADV_DONTNEED)
        return True


def _has_own_pages(address: int, nbytes: int) -> bool:
    """Whether a private mapping of a file has pages that this process has written; True if the kernel does not say."""
    first, last = address // mmap.PAGESIZE, -(-(address + nbytes) // mmap.PAGESIZE)
    try:
        pagemap = os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
        try:
            entries = numpy.frombuffer(os.pread(pagemap, (last - first) * 8, first * 8), dtype=numpy.uint64)
        finally:
            os.close(pagemap)
    except OSError:
        return True
    # A page that is present or swapped out, and is not the file's.
    own = (entries & _PRESENT_OR_SWAPPED != 0) & (entries & _OF_FILE == 0)
    return len(entries) < last - first or b"\x01" in own.tobytes()
