"""Copies of payloads between a device and the host, in chunks: while one is copied, the next is gathered."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import repeat
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from weightsync.weights.device.base import STAGING_NBYTES, Device, DeviceMemory, Piece
from weightsync.weights.layout import Layout
from weightsync.weights.packing import chunks_of, pack, views, zero_gaps
from weightsync.weights.reading import Weights, ordered
from weightsync.weights.tensors import SlotViews, address_of, borrowed, count_writes


def pack_from(
    device: Device, weights: Weights, layout: Layout, view: memoryview, form_key: object | None = None
) -> None:
    """Like `weightsync.weights.packing.pack`, for weights that are all on a device, behind the current stream.

    Args:
        form_key: the same object for as long as the weights and the layout have the same form: see `Device.copy`.

    Raises LayoutError: a tensor, which the error names, cannot be copied.
    """
    base = address_of(view)
    zero_gaps(layout, base)
    try:
        device.to_host(_pieces(layout, ordered(weights, layout), range(len(layout.entries)), base, form_key))
    except Exception:
        pack(weights, layout, view)  # its error names the tensor
        raise


def scatter_onto(
    device: Device,
    layout: Layout,
    tensors: list[Tensor],
    chosen: Sequence[int],
    view: memoryview,
    *,
    form_key: object | None = None,
) -> None:
    """Like `weightsync.weights.packing.scatter`, into tensors that are all on a device, and wait for the copy.

    Args:
        form_key: see `Device.copy`; the layout and the entries are the same too.
    """
    if chosen:
        device.from_host(_pieces(layout, tensors, chosen, address_of(view), form_key))
        count_writes(list(map(tensors.__getitem__, chosen)))


def copy_out(
    memory: DeviceMemory, layout: Layout, tensors: list[Tensor], chosen: Sequence[int], form_key: object
) -> None:
    """Queue a copy of the chosen entries of a slot into tensors on its device or another, in the current stream.

    Args:
        form_key: see `Device.copy`; the entries are the same too.
    """
    sources = memory.views(layout)
    if len(chosen) < len(tensors):
        part = sources.part
        if part is None or part[0] != chosen:
            part = sources.part = chosen, SlotViews(map(sources.__getitem__, chosen))
        tensors, sources = list(map(tensors.__getitem__, chosen)), part[1]
    memory.device.copy(tensors, sources, form_key)
    count_writes(tensors)


class _RunKey:
    """Stands for the form of a run of tensors, in `Device.copy`."""


#: The keys of the runs of tensors that are copied together, by the key of the form of all of them.
_run_keys: WeakKeyDictionary[object, list[_RunKey]] = WeakKeyDictionary()


def _pieces(
    layout: Layout, tensors: Sequence[Tensor], chosen: Sequence[int], base: int, form_key: object | None
) -> list[Piece]:
    pieces, runs, chosen_set = [], _runs(layout), frozenset(chosen)
    run_keys = repeat(None) if form_key is None else _run_keys.setdefault(form_key, [_RunKey() for _ in runs])
    for (first, last), run_key in zip(runs, run_keys, strict=False):
        indices: Sequence[int] = range(first, last)
        if len(chosen_set) < len(layout.entries):
            indices = [index for index in indices if index in chosen_set]
        start, tail = layout.entries[first].offset, layout.entries[last - 1]
        host = borrowed(base + start, tail.offset + tail.nbytes - start)
        subset = tuple(index - first for index in indices) if len(indices) < last - first else None
        if indices:
            among = partial(_entry_views, layout, first, last, subset)
            pieces.append(Piece(host, [tensors[index] for index in indices], among, run_key))
    return pieces


@lru_cache(maxsize=8)
def _runs(layout: Layout) -> tuple[tuple[int, int], ...]:
    return chunks_of(layout, STAGING_NBYTES)


class _BytesByAddress:
    """Bytes, known by where they are."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self._key = flat.data_ptr(), flat.numel()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BytesByAddress) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _entry_views(layout: Layout, first: int, last: int, some: tuple[int, ...] | None, flat: Tensor) -> SlotViews:
    return _cached_entry_views(layout, first, last, some, _BytesByAddress(flat))


# Views of the host's memory are good for whatever lies at that address while the caller holds it, as `kept_views` are.
# Views of a device's memory keep it, so that no other has its address.
@lru_cache(maxsize=256)
def _cached_entry_views(
    layout: Layout, first: int, last: int, subset: tuple[int, ...] | None, place: _BytesByAddress
) -> SlotViews:
    with torch.inference_mode():
        found = views(layout, place.flat, first, last)
        return SlotViews(found if subset is None else map(found.__getitem__, subset))
