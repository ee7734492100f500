"""Copies in the memory of this process.

Large payloads are written past the processor's caches. That is faster, since a line that is written in a cache is read
first. The C library does so only in single copies of some 100 MB. MKL, which torch brings along on x86-64, does so in
`mkl_domatcopy`, a copy of matrices with a factor, here of 1. It is used on the processors where it was measured, for
pieces that it copies faster, and only once it has copied all kinds of bit patterns unchanged.

Such writes may be overtaken by later ones, up to the next locked instruction. ctypes executes one when it takes the GIL
back, so a seal, or a message, that says that they are done comes after them.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

#: Copies this many bytes from the second address to the first, without the GIL. The two must not overlap.
MoveBytes = Callable[[int, int, int], object]

#: Payloads of at least this size are written past the caches.
LEAST_NBYTES: Final = 8 << 20
#: The smallest pieces for which that is faster, by the processor's maker.
LEAST_PIECES: Final = {"GenuineIntel": 128 << 10, "AuthenticAMD": 1 << 20}
#: Bytes in a cache line, and in an element of the matrix.
_LINE: Final = 64
_ELEMENT: Final = 8
_CPUINFO: Final = "/proc/cpuinfo"
#: Elements: zeros, numbers, the smallest ones, infinities, and NaNs that arithmetic would change.
_PATTERNS: Final = (0, 1 << 63, 1, 0x800F << 48 | 1, 0x3FF0 << 48, 0x7FF0 << 48, 0x7FF0 << 48 | 1, 0xFFF7 << 48 | 5)


def mover(nbytes: int) -> MoveBytes:
    """The function that copies the pieces of a payload of this size."""
    chosen = _chosen() if nbytes >= LEAST_NBYTES else None
    return ctypes.memmove if chosen is None else chosen


def cache_bypassing_copy(copy: MoveBytes, least: int) -> MoveBytes:
    """A copy that leaves pieces of at least this many bytes out of the caches, by a copy of so many elements."""

    def move(to: int, source: int, nbytes: int) -> None:
        if nbytes < least:
            ctypes.memmove(to, source, nbytes)
            return
        head = -to % _LINE
        elements, tail = divmod(nbytes - head, _ELEMENT)
        if head:
            ctypes.memmove(to, source, head)
        copy(to + head, source + head, elements)
        if tail:
            ctypes.memmove(to + nbytes - tail, source + nbytes - tail, tail)

    return move


@functools.cache
def _chosen() -> MoveBytes | None:
    """The copy past this processor's caches; None if none is used here."""
    try:
        described = Path(_CPUINFO).read_text(encoding="utf-8")
    except OSError:
        return None
    least = next((least for maker, least in LEAST_PIECES.items() if maker in described), None)
    if least is None:
        return None
    copy = found()
    return cache_bypassing_copy(copy, least) if copy is not None and is_exact(copy, least) else None


def found() -> MoveBytes | None:
    """MKL's copy, of so many elements; None if this torch has no MKL."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        function: Any = library.MKL_Domatcopy
    except (OSError, AttributeError):
        return None
    size, address = ctypes.c_size_t, ctypes.c_void_p
    function.restype = None
    # Order, transposition, rows, columns, factor, and each matrix with the length of its rows.
    function.argtypes = [ctypes.c_char, ctypes.c_char, size, size, ctypes.c_double, address, size, address, size]

    def copy(to: int, source: int, elements: int) -> None:
        function(b"R", b"N", 1, elements, 1.0, source, elements, to, elements)

    return copy


def is_exact(copy: MoveBytes, least: int) -> bool:
    """Whether elements arrive as they were, whatever their bits mean as numbers, from any address.

    What it copies is as large as the smallest pieces, since a library may copy smaller ones in another way.
    """
    count = least // _ELEMENT + 5
    pattern = struct.pack(f"={len(_PATTERNS)}Q", *_PATTERNS)
    data = (pattern * count)[: count * _ELEMENT]
    for shift in range(_ELEMENT):
        source = ctypes.create_string_buffer(bytes(shift) + data)
        room = ctypes.create_string_buffer(len(data) + 2 * _LINE)
        start = -ctypes.addressof(room) % _LINE
        copy(ctypes.addressof(room) + start, ctypes.addressof(source) + shift, count)
        if room.raw[start : start + len(data)] != data or any(room.raw[start + len(data) :]):
            return False
    return True
