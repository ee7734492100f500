"""Packing weights into the flat buffer of a layout, unpacking them, and the digest. No models, only bytes.

On the CPU, one `torch._foreach_copy_` moves all tensors. The views it copies into are cached by the buffer's address.
They borrow the memory (see `weightsync.weights.tensors.borrowed`), so the cache keeps no buffer alive. Tensors on a
device are gathered there into large chunks, and each chunk is transferred once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
import xxhash
from torch import Tensor

from weightsync.errors import ConfigurationError, LayoutError
from weightsync.weights.extra_state import encode_extras
from weightsync.weights.layout import Layout
from weightsync.weights.reading import Weights, layout_of, ordered, read_weights
from weightsync.weights.tensors import DTYPES, address_of, borrowed, why_uncopied

#: How many bytes to gather on a device, or to pack for `digest_of`, at a time; a single tensor may be larger.
CHUNK = 64 << 20


def pack(weights: Weights, layout: Layout, view: memoryview) -> None:
    """Write the tensors into ``view[: layout.nbytes]``, bit for bit; bools as 0 or 1, gaps between groups as 0.

    The weights must have this layout (see `weightsync.weights.reading.layout_of`). When this returns, everything is
    written, including tensors from devices.

    Raises:
        ConfigurationError: the view is too small, read-only or not contiguous; nothing was written.
        LayoutError: a tensor, which the error names, cannot be copied (sparse, meta, a subclass that raises). The
            contents of the buffer are then undefined.
    """
    if view.readonly or not view.c_contiguous or view.nbytes < layout.nbytes:
        raise ConfigurationError(f"Packing {layout!r} needs {layout.nbytes} contiguous, writable bytes.")
    tensors, base = ordered(weights, layout), address_of(view)
    for start, end in _gaps(layout):
        borrowed(base + start, end - start).zero_()
    if _on_one_device(tensors):
        for first, last in _chunks(layout):
            _fill(layout, first, last, tensors, base)
    else:
        _copy(layout, 0, kept_views(layout, base), tensors)


def scatter(layout: Layout, tensors: list[Tensor], chosen: Sequence[int], base: int) -> None:
    """Copy from a packed buffer at address `base` into the `chosen` tensors of a destination.

    The tensors must be in the layout's order and have its shapes, and the caller must hold the buffer.
    """
    if not chosen:
        return
    with torch.inference_mode():
        if _on_one_device(tensors):
            for first, last in _chunks(layout):
                flat = _span(layout, first, last, base).to(tensors[0].device)
                torch._foreach_copy_(tensors[first:last], views(layout, flat, first, last))
            return
        found = kept_views(layout, base)
        if len(chosen) == len(tensors):
            torch._foreach_copy_(tensors, found)
        else:
            torch._foreach_copy_([tensors[index] for index in chosen], [found[index] for index in chosen])


def digest(payload: memoryview, extras: bytes) -> bytes:
    """Hash the flat buffer, then the encoded extra state, with xxh3-128: 16 bytes."""
    hashed = xxhash.xxh3_128(payload)
    hashed.update(extras)
    return hashed.digest()


def digest_of_weights(weights: object) -> bytes:
    """Compute the `digest` of weights as a sender would.

    Raises:
        ConfigurationError, LayoutError: they cannot be sent.
    """
    read = read_weights(weights)
    return digest_of(read, layout_of(read), encode_extras(read.extras()))


def digest_of(weights: Weights, layout: Layout, extras: bytes) -> bytes:
    """Compute the `digest` that these weights would have when packed, using `CHUNK` bytes or the largest tensor's."""
    hashed, tensors, end = xxhash.xxh3_128(), ordered(weights, layout), 0
    for first, last in _chunks(layout):
        start = layout.entries[first].offset
        hashed.update(bytes(start - end))
        end = layout.entries[last - 1].offset + layout.entries[last - 1].nbytes
        scratch = torch.empty(end - start, dtype=torch.uint8)
        _fill(layout, first, last, tensors, scratch.data_ptr() - start)
        hashed.update(scratch.numpy().data)
    hashed.update(extras)
    return hashed.digest()


def views(layout: Layout, flat: Tensor, first: int = 0, last: int | None = None) -> list[Tensor]:
    """Return entries ``first:last`` as views of `flat`, which starts at the offset of entry `first`."""
    last = len(layout.entries) if last is None else last
    start, found = layout.entries[first].offset if first < last else 0, []
    for group in layout.groups:
        entries = layout.entries[max(first, group.first) : min(last, group.last)]
        if entries:
            begin, end = entries[0].offset - start, entries[-1].offset + entries[-1].nbytes - start
            typed = flat[begin:end].view(DTYPES[group.dtype])
            pieces = torch.split(typed, [entry.nbytes // typed.itemsize for entry in entries])
            found += [piece.view(entry.shape) for piece, entry in zip(pieces, entries, strict=True)]
    return found


def kept_views(layout: Layout, base: int) -> list[Tensor]:
    """Return all entries as views of the buffer at `base`, cached for the most recent buffers.

    The caller must hold the buffer as long as it uses the views, and must be in inference mode.
    """
    return _kept_views(layout, base)


@lru_cache(maxsize=8)
def _kept_views(layout: Layout, base: int) -> list[Tensor]:
    with torch.inference_mode():
        return views(layout, borrowed(base, layout.nbytes))


def _fill(layout: Layout, first: int, last: int, tensors: list[Tensor], base: int) -> None:
    """Write one chunk of entries into the buffer at `base`."""
    chosen = tensors[first:last]
    with torch.inference_mode():
        flat = _span(layout, first, last, base)
        if _on_one_device(chosen):
            gathered = torch.empty(flat.numel(), dtype=torch.uint8, device=chosen[0].device)
            _copy(layout, first, views(layout, gathered, first, last), chosen)
            flat.copy_(gathered)
        else:
            _copy(layout, first, views(layout, flat, first, last), chosen)


def _span(layout: Layout, first: int, last: int, base: int) -> Tensor:
    """The bytes of entries ``first:last`` of a buffer at `base`."""
    start, tail = layout.entries[first].offset, layout.entries[last - 1]
    return borrowed(base + start, tail.offset + tail.nbytes - start)


def _copy(layout: Layout, first: int, into: list[Tensor], tensors: list[Tensor]) -> None:
    if not tensors:
        return
    try:
        with torch.inference_mode():
            torch._foreach_copy_(into, tensors)
    except Exception as error:
        for entry, tensor in zip(layout.entries[first:], tensors, strict=False):
            why = why_uncopied(tensor)
            if why:
                raise LayoutError(f"'{entry.name}' {why}.", mismatched={entry.name: why}) from error
        raise


def _on_one_device(tensors: list[Tensor]) -> bool:
    # The first tensor rules out the common CPU case quickly. Mixed devices and meta tensors are copied one by one.
    return (
        bool(tensors)
        and not (tensors[0].is_cpu or tensors[0].is_meta)
        and len({tensor.device for tensor in tensors}) == 1
    )


def _gaps(layout: Layout) -> Iterator[tuple[int, int]]:
    """Yield the gaps between groups: bytes of no tensor, which the digest covers nevertheless."""
    for group, following in zip(layout.groups, layout.groups[1:], strict=False):
        end = group.offset + group.nbytes
        if end < following.offset:
            yield end, following.offset


@lru_cache(maxsize=8)
def _chunks(layout: Layout) -> tuple[tuple[int, int], ...]:
    """Split the entries into runs of one dtype, each of at most `CHUNK` bytes or of a single entry."""
    chunks = []
    for group in layout.groups:
        first = group.first
        for index in range(group.first + 1, group.last):
            entry = layout.entries[index]
            if entry.offset + entry.nbytes - layout.entries[first].offset > CHUNK:
                chunks.append((first, index))
                first = index
        chunks.append((first, group.last))
    return tuple(chunks)
