"""Filling the flat buffer of a layout, and its digest: bytes only, no models.

On the CPU one `torch._foreach_copy_` moves all tensors. The views it copies into are made once per buffer and found
again by its address; they borrow the memory (see `weightsync.weights.tensors.borrowed`), so that keeping them keeps
nothing alive. On a device, tensors are gathered there in large pieces, and each piece crosses once.
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

#: How many bytes are gathered on a device, or packed for `digest_of`, at a time; one tensor may be more.
CHUNK = 64 << 20


def pack(weights: Weights, layout: Layout, view: memoryview) -> None:
    """Write the tensors into ``view[: layout.nbytes]``, bit by bit; bools as 0 or 1, gaps between groups as 0.

    The weights must be of that layout (see `weightsync.weights.reading.layout_of`). Returns when all is written, from
    devices too.

    Raises:
        ConfigurationError: the view is too small, read-only or not contiguous; nothing was written.
        LayoutError: a tensor cannot be copied (sparse, meta, a subclass that raises); it is named. The buffer is then
            undefined.
    """
    if view.readonly or not view.c_contiguous or view.nbytes < layout.nbytes:
        raise ConfigurationError(f"{layout.nbytes} contiguous, writable bytes are needed to pack {layout!r}.")
    tensors, base = ordered(weights, layout), address_of(view)
    for start, end in _gaps(layout):
        borrowed(base + start, end - start).zero_()
    if _on_one_device(tensors):
        for first, last in _chunks(layout):
            _fill(layout, first, last, tensors, base)
    else:
        _copy(layout, 0, kept_views(layout, base), tensors)


def scatter(layout: Layout, tensors: list[Tensor], chosen: Sequence[int], base: int) -> None:
    """Copy a packed buffer at `base` into the `chosen` ones of a destination's tensors, in the layout's order.

    The tensors and their shapes must be those of the layout, and the caller must hold the buffer.
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
    """xxh3-128 over the flat buffer, then the encoded extra state: 16 bytes."""
    hashed = xxhash.xxh3_128(payload)
    hashed.update(extras)
    return hashed.digest()


def digest_of_weights(weights: object) -> bytes:
    """The `digest` of weights as a sender would compute it.

    Raises:
        ConfigurationError, LayoutError: they cannot be sent.
    """
    read = read_weights(weights)
    return digest_of(read, layout_of(read), encode_extras(read.extras()))


def digest_of(weights: Weights, layout: Layout, extras: bytes) -> bytes:
    """The `digest` of these weights as if packed; needs `CHUNK` bytes, or those of the largest tensor."""
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
    """Entries ``first:last`` as views of `flat`: the bytes from entry `first`'s offset on."""
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
    """All entries as views of the buffer at `base`, remembered for the buffers met last.

    Only for a caller who holds that buffer, while it does so, in inference mode.
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
    # The first decides quickly that nothing is; a mix goes tensor by tensor, and so does what has no data.
    return (
        bool(tensors)
        and not (tensors[0].is_cpu or tensors[0].is_meta)
        and len({tensor.device for tensor in tensors}) == 1
    )


def _gaps(layout: Layout) -> Iterator[tuple[int, int]]:
    """Between the groups: bytes of no tensor, which the digest covers all the same."""
    for group, following in zip(layout.groups, layout.groups[1:], strict=False):
        end = group.offset + group.nbytes
        if end < following.offset:
            yield end, following.offset


@lru_cache(maxsize=8)
def _chunks(layout: Layout) -> tuple[tuple[int, int], ...]:
    """Runs of entries of one dtype, of at most `CHUNK` bytes each, or of one entry."""
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
