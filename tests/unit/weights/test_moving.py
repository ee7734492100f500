"""Large copies are exact, whatever their contents and alignment, with MKL or without."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skipping import not_tested
from torch import nn

from weightsync.weights import moving, packing
from weightsync.weights.packing import Pieces, movable
from weightsync.weights.reading import layout_of, ordered, read_weights

NBYTES = 1 << 20
LEAST_PIECE = min(moving.LEAST_PIECES.values())


@pytest.fixture
def mkl(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Use MKL's copy on any processor. Returns a list that gets the number of elements of each call."""
    copy, counts = moving.found(), []
    if copy is None:
        not_tested("COPIES PAST THE CACHES", "this torch has no MKL")

    def counted(to: int, source: int, elements: int) -> None:
        counts.append(elements)
        copy(to, source, elements)

    monkeypatch.setattr(moving, "_chosen", lambda: moving.cache_bypassing_copy(counted, LEAST_PIECE))
    return counts


@settings(max_examples=60)
@given(st.integers(0, 130), st.integers(0, 130), st.integers(0, NBYTES // 2), st.randoms(use_true_random=False))
def test_a_copy_past_the_caches_writes_exactly_the_given_bytes(
    to: int, source: int, nbytes: int, random: object
) -> None:
    copy = moving.found() or not_tested("COPIES PAST THE CACHES", "this torch has no MKL")
    data = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8)
    data[:NBYTES:3] = 0xFF  # many NaNs
    room = torch.zeros(NBYTES, dtype=torch.uint8)
    moving.cache_bypassing_copy(copy, 1000)(room.data_ptr() + to, data.data_ptr() + source, nbytes)

    assert torch.equal(room[to : to + nbytes], data[source : source + nbytes])
    assert not room[:to].any()
    assert not room[to + nbytes :].any()


def test_large_payloads_are_packed_and_unpacked_with_mkls_copy(mkl: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "LEAST_NBYTES", NBYTES)
    source = nn.Sequential(nn.Linear(300, 700), nn.Linear(700, 300)).to(torch.bfloat16)
    weights = read_weights(source)
    layout = layout_of(weights)
    tensors, buffer = ordered(weights, layout), torch.zeros(layout.nbytes, dtype=torch.uint8)
    assert layout.nbytes < NBYTES
    small = Pieces(layout, movable(layout, tensors, least=0))
    monkeypatch.setattr(moving, "LEAST_NBYTES", layout.nbytes)
    large = Pieces(layout, movable(layout, tensors, least=0))

    small.fill(tensors, buffer.data_ptr())
    assert mkl == []
    buffer.zero_()
    large.fill(tensors, buffer.data_ptr())
    assert len(mkl) == 2
    copied = [torch.zeros_like(tensor) for tensor in tensors]
    Pieces(layout, movable(layout, copied, least=0)).empty_into(copied, buffer.data_ptr(), range(len(copied)))
    assert len(mkl) == 4
    assert all(map(torch.equal, copied, tensors))
    assert packing.LARGE < LEAST_PIECE


@pytest.mark.parametrize("least", sorted(moving.LEAST_PIECES.values()))
def test_copy_functions_that_change_or_overrun_bytes_are_not_exact(least: int) -> None:
    def quiets_nans(to: int, source: int, elements: int) -> None:
        """Copy as a multiplication does that makes NaNs quiet."""
        for offset in range(0, 8 * elements, 8):
            value = ctypes.c_uint64.from_address(source + offset).value
            quiet = value & 0x7FF0 << 48 == 0x7FF0 << 48 and value & (1 << 52) - 1
            ctypes.c_uint64.from_address(to + offset).value = value | (1 << 51 if quiet else 0)

    def overshoots(to: int, source: int, elements: int) -> None:
        ctypes.memmove(to, source, 8 * elements)
        ctypes.memset(to + 8 * elements, 1, 1)

    def overshoots_if_large(to: int, source: int, elements: int) -> None:
        (copies_exactly if 8 * elements < least else overshoots)(to, source, elements)

    def copies_exactly(to: int, source: int, elements: int) -> None:
        ctypes.memmove(to, source, 8 * elements)

    assert [
        moving.is_exact(copy, least) for copy in (quiets_nans, overshoots, overshoots_if_large, copies_exactly)
    ] == [
        *(False, False, False),
        True,
    ]


@pytest.mark.parametrize(
    ("vendor", "exact", "used"),
    [
        *[(vendor, exact, exact) for vendor in moving.LEAST_PIECES for exact in (True, False)],
        *[("HygonGenuine", True, False), (None, True, False)],
    ],
)
def test_mkls_copy_is_used_only_on_measured_processors_where_it_is_exact(
    vendor: str | None, exact: bool, used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    if vendor is not None:
        cpuinfo.write_text(f"vendor_id : {vendor}\n", encoding="utf-8")
    monkeypatch.setattr(moving, "_CPUINFO", str(cpuinfo))
    copied: list[int] = []
    monkeypatch.setattr(moving, "found", lambda: lambda to, source, elements: copied.append(8 * elements))
    monkeypatch.setattr(moving, "is_exact", lambda *_: exact)
    moving._chosen.cache_clear()
    try:
        move = moving.mover(moving.LEAST_NBYTES)
        assert (move is not ctypes.memmove) == used
        assert moving.mover(moving.LEAST_NBYTES - 1) is ctypes.memmove
        least = moving.LEAST_PIECES.get(vendor or "", 1 << 20)
        room = torch.zeros(2 * least + 64, dtype=torch.uint8)
        start = room.data_ptr() + -room.data_ptr() % 64
        for nbytes in (least - 1, least):
            move(start + least, start, nbytes)
        assert copied == [least] * used
    finally:
        moving._chosen.cache_clear()


def test_mkls_copy_is_found_where_torch_has_mkl() -> None:
    assert (moving.found() is not None) == torch.backends.mkl.is_available()


def test_mkls_copy_is_not_found_in_a_library_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class LibraryWithoutFunction:
        def __init__(self, _: str) -> None:
            """Load a library without the function, in place of `ctypes.CDLL`."""

    monkeypatch.setattr(moving.ctypes, "CDLL", LibraryWithoutFunction)
    assert moving.found() is None
