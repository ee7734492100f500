"""Copies in the memory of this process.

Large payloads are written past the processor's caches. That is faster, since a line that is written in a cache is read
first. The C library does so only in single copies of some 100 MB. MKL, which torch brings along on x86-64, does so in
`mkl_domatcopy`, a copy of matrices with a factor, here of 1. It is used on Intel's processors, where it was measured,
and only once it has copied all kinds of bit patterns unchanged.

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

#: Payloads of at least this size are written past the caches, where one tensor has at least as much as the second.
LEAST_NBYTES: Final = 8 << 20
LEAST_PIECE: Final = 128 << 10
#: Bytes in a cache line, and in an element of the matrix.
_LINE: Final = 64
_ELEMENT: Final = 8
_CPUINFO: Final = "/proc/cpuinfo"
#: Elements: zeros, numbers, the smallest ones, infinities, and NaNs that arithmetic would change.
_PATTERNS: Final = (0, 1 << 63, 1, 0x800F << 48 | 1, 0x3FF0 << 48, 0x7FF0 << 48, 0x7FF0 << 48 | 1, 0xFFF7 << 48 | 5)


def mover(nbytes: int) -> MoveBytes:
    """The function that copies the pieces of a payload of this size."""
    return past_caches if nbytes >= LEAST_NBYTES and _chosen() is not None else ctypes.memmove


def past_caches(to: int, source: int, nbytes: int) -> None:
    """Copy, and leave what was written out of the caches, if it is large."""
    copy = _chosen()
    if nbytes < LEAST_PIECE or copy is None:
        ctypes.memmove(to, source, nbytes)
        return
    head = -to % _LINE
    elements, tail = divmod(nbytes - head, _ELEMENT)
    if head:
        ctypes.memmove(to, source, head)
    copy(to + head, source + head, elements)
    if tail:
        ctypes.memmove(to + nbytes - tail, source + nbytes - tail, tail)


@functools.cache
def _chosen() -> MoveBytes | None:
    """MKL's copy, of so many elements; None if it is not used here."""
    try:
        is_intels = "GenuineIntel" in Path(_CPUINFO).read_text(encoding="utf-8")
    except OSError:
        return None
    copy = found() if is_intels else None
    return copy if copy is not None and is_exact(copy) else None


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


def is_exact(copy: MoveBytes) -> bool:
    """Whether elements arrive as they were, whatever their bits mean as numbers, from any address."""
    # As large as the smallest pieces that it is used for, since a library may copy smaller ones in another way.
    count = LEAST_PIECE // _ELEMENT + 5
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
