"""Packing weights into the flat buffer of a layout, and unpacking them. No models, only bytes.

On the CPU, `Pieces` copies in large pieces, on as many threads as torch may use. The views that torch copies small
tensors into are cached by the buffer's address. They borrow the memory (see `weightsync.weights.tensors.borrowed`), so
the cache keeps no buffer alive. Tensors on a device are gathered there into large chunks, and each chunk is
transferred once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from itertools import compress, repeat
from operator import getitem, setitem
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from weightsync.errors import ConfigurationError, LayoutError
from weightsync.weights.division import LARGE, Divided, Move, Step, divided, steps_of
from weightsync.weights.extra_state import encode_extras
from weightsync.weights.layout import Entry, Group, Layout
from weightsync.weights.moving import mover
from weightsync.weights.reading import Weights, layout_of, ordered, read_weights
from weightsync.weights.tensors import (
    DTYPE_NAMES,
    DTYPES,
    PLAIN,
    address_of,
    borrowed,
    copy_groups,
    count_writes,
    groups_of,
    lies_in_order,
    memories_at,
    memory_at,
    on_cpu,
    shaped,
    why_uncopied,
)
from weightsync.weights.threads import Work, in_threads
from weightsync.weights.tree_digest import CHUNK as DIGEST_CHUNK
from weightsync.weights.tree_digest import ChunkHashes, StreamedDigest, digest

#: How many bytes are gathered on a device, or packed for `digest_of`, at a time; a single tensor may be larger.
CHUNK = 64 << 20
#: Smaller tensors are copied and hashed by one thread: two would wait for the GIL, and be no faster.
LARGE_HASHED: Final = 192 << 10

#: ``into[place] = source`` and ``source[place]`` of memoryviews. Calling `memmove` by ctypes takes three times as long.
_put: Final[Any] = setitem
_get: Final[Any] = getitem
#: Called with the bytes of a buffer that have just been written.
OnWritten = Callable[[int, int], None]
_Copy = Callable[[list[Tensor], list[Tensor]], object]
_Call = TypeVar("_Call", bound=Callable[..., Any])
#: Decorates functions that torch's compiler skips, with all that they call: when compiled, parts of them fail half way.
uncompiled: Final[Callable[[_Call], _Call]] = torch.compiler.disable(  # type: ignore[no-untyped-call]
    reason="weights are not written or hashed by compiled code"
)


def pack(
    weights: Weights,
    layout: Layout,
    view: memoryview,
    pieces: Pieces | None = None,
    *,
    on_written: OnWritten | None = None,
    hashes: ChunkHashes | None = None,
) -> None:
    """Write the tensors into ``view[: layout.nbytes]``, bit for bit; bools as 0 or 1, gaps between groups as 0.

    The weights must have the names and shapes of this layout (see `weightsync.weights.reading.layout_of`). What has
    another dtype is cast. When this returns, everything is written, including tensors from devices.

    Args:
        pieces: how these tensors are copied, if that is planned already.
        on_written: called with ranges that were written, perhaps in several threads, and not necessarily with all.
        hashes: what hashes chunks of the buffer, as they are copied.

    Raises:
        ConfigurationError: the view is too small, read-only or not contiguous; nothing was written.
        LayoutError: a tensor, which the error names, cannot be copied (sparse, meta, a subclass that raises). The
            contents of the buffer are then undefined.
    """
    if view.readonly or not view.c_contiguous or view.nbytes < layout.nbytes:
        raise ConfigurationError(f"Packing {layout!r} needs {layout.nbytes} contiguous, writable bytes.")
    tensors, base = ordered(weights, layout), address_of(view)
    if layout.gaps:
        zero_gaps(layout, base)
    if pieces is None and _on_one_device(tensors):
        for first, last in _chunks(layout):
            _fill(layout, first, last, tensors, base)
    else:
        pieces = pieces or Pieces(layout, movable(layout, tensors))
        pieces.fill(tensors, base, hashes, on_written)


def pack_digested(
    weights: Weights,
    layout: Layout,
    view: memoryview,
    extras: bytes,
    pieces: Pieces | None = None,
    *,
    on_written: OnWritten | None = None,
) -> bytes:
    """`pack`, and return the digest of the buffer and `extras`, hashed chunk by chunk right behind the copy.

    Tensors that are copied as bytes are hashed in place, in the model: those bytes are in the cache.
    """
    if layout.nbytes <= DIGEST_CHUNK:  # all of it is in the cache
        pack(weights, layout, view, pieces)
        return digest(view[: layout.nbytes], extras)
    hashes = ChunkHashes(view[: layout.nbytes])
    pack(weights, layout, view, pieces, on_written=on_written, hashes=hashes)
    return hashes.combined(extras)


def scatter(
    layout: Layout, tensors: list[Tensor], chosen: Sequence[int], base: int, pieces: Pieces | None = None
) -> None:
    """Copy from a packed buffer at address `base` into the `chosen` tensors of a destination.

    The tensors must be in the layout's order and have its shapes, and the caller must hold the buffer.

    Args:
        pieces: how these tensors are copied, if that is planned already.
    """
    if not chosen:
        return
    if _on_one_device(tensors):
        with torch.inference_mode():
            for first, last in _chunks(layout):
                flat = _span(layout, first, last, base).to(tensors[0].device)
                _copy_on_device(tensors[first:last], views(layout, flat, first, last))
        count_writes(tensors)
        return
    pieces = pieces or Pieces(layout, movable(layout, tensors))
    pieces.empty_into(tensors, base, chosen)


def movable(layout: Layout, tensors: Sequence[Tensor], least: int = LARGE) -> dict[int, int]:
    """The addresses of the tensors of at least this size whose bytes can be moved, by index."""
    return {
        index: tensor.data_ptr()
        for index, (entry, tensor) in enumerate(zip(layout.entries, tensors, strict=True))
        if entry.nbytes >= least and _is_movable(tensor, entry)
    }


class _Joined(NamedTuple):
    """Of a run of small tensors whose bytes are moved: those that are not empty."""

    indices: Sequence[int]
    #: Where in the run each lies, and its size in bytes.
    slices: Sequence[slice]
    sizes: Sequence[int]


class _Outline(NamedTuple):
    """How tensors are copied, wherever they are."""

    #: The large tensors that only torch can copy: it uses its own threads.
    alone: Sequence[Step]
    #: All others.
    steps: Sequence[Step]
    #: The tensors whose bytes are moved.
    moved: Sequence[int]
    #: The runs of small tensors among them, by their first index.
    joined: Mapping[int, _Joined]


@lru_cache(maxsize=8)
def _outline(layout: Layout, chosen: frozenset[int]) -> _Outline:
    """How tensors of this layout are copied; `chosen`: those whose bytes are moved."""
    steps = steps_of(layout, chosen)
    alone = [step for step in steps if _is_alone(layout, step)]
    others = [step for step in steps if not _is_alone(layout, step)]
    joined = {step.first: _joined(layout, step) for step in steps if step.move is Move.JOINED}
    return _Outline(alone, others, sorted(chosen), joined)


def _is_alone(layout: Layout, step: Step) -> bool:
    entry = layout.entries[step.first]
    return step.move is Move.BY_TORCH and entry.nbytes >= LARGE and entry.dtype != "bool"


def _joined(layout: Layout, step: Step) -> _Joined:
    indices = [index for index in range(step.first, step.last) if layout.entries[index].nbytes]
    entries = [layout.entries[index] for index in indices]
    slices = [slice(each.offset - step.start, each.offset - step.start + each.nbytes) for each in entries]
    return _Joined(indices, slices, [each.nbytes for each in entries])


class Pieces:
    """Copies between tensors and flat buffers in the memory of this process.

    It keeps addresses and no tensors: it is good for as long as the tensors are where they are.

    Args:
        layout: the layout of the tensors.
        places: the addresses of those whose bytes are moved: see `movable`.
    """

    def __init__(self, layout: Layout, places: Mapping[int, int]) -> None:
        self._layout = layout
        self._move = mover(layout.nbytes)
        self._places = places
        self._alone, self._steps, self._moved, self._joined = _outline(layout, frozenset(places))
        #: The memory of the tensors of each run of small ones, kept once it is copied for the second time.
        self._memories: dict[int, Sequence[memoryview]] = {}
        #: The first tensors of the runs that have been copied.
        self._copied: set[int] = set()

    @cached_property
    def _whole(self) -> Divided:
        """How the buffer is divided if it is only filled, or emptied."""
        return divided(self._layout, self._steps, self._places, unit=self._layout.nbytes, least=0)

    @cached_property
    def _chunked(self) -> Divided:
        """How the buffer is divided if it is hashed, or named, while it is filled."""
        return divided(self._layout, self._steps, self._places, unit=DIGEST_CHUNK, least=LARGE_HASHED)

    def fill(
        self, tensors: list[Tensor], base: int, hashes: ChunkHashes | None = None, on_written: OnWritten | None = None
    ) -> None:
        """Copy all tensors into the buffer at `base`.

        Args:
            hashes: hashes what is copied; None: nothing does.
            on_written: called with ranges of bytes once they are written.
        """
        for step in self._alone:
            self._fill_run(tensors, base, step)
        if hashes is None and on_written is None:
            _for_each_part(self._whole, partial(self._fill_part, tensors, base, None))
        else:
            begin = partial(_WriteFollower, base, hashes, on_written)
            _for_each_part(self._chunked, partial(self._fill_part, tensors, base, begin))

    def empty_into(self, tensors: list[Tensor], base: int, chosen: Sequence[int]) -> None:
        """Copy the `chosen` tensors out of the buffer at `base`."""
        wanted = frozenset(chosen)
        for step in self._alone:
            self._empty_run(tensors, base, wanted, step)
        _for_each_part(self._whole, partial(self._empty_part, tensors, base, wanted))
        count_writes([tensors[index] for index in self._moved if index in wanted])

    def _fill_part(
        self, tensors: list[Tensor], base: int, begin: Callable[[int], _WriteFollower] | None, start: int, end: int
    ) -> None:
        divided, following = (self._whole, None) if begin is None else (self._chunked, begin(start))
        for cut in divided.parts[start, end]:
            if cut.source:
                self._move(base + cut.start, cut.source, cut.end - cut.start)
            else:
                self._fill_run(tensors, base, cut.step)
            if following is not None:
                following.written(cut.start, cut.end, cut.source or base + cut.start)
        if following is not None:
            following.written(end, end, base + end)

    def _empty_part(self, tensors: list[Tensor], base: int, wanted: frozenset[int], start: int, end: int) -> None:
        for cut in self._whole.parts[start, end]:
            if not cut.source:
                self._empty_run(tensors, base, wanted, cut.step)
            elif cut.step.first in wanted:
                self._move(cut.source, base + cut.start, cut.end - cut.start)

    def _memories_of(self, first: int) -> Iterable[memoryview]:
        """The memory of the small tensors of a run: views that are made during its first copy, and kept in the second.

        Keeping those of weights that are elsewhere at each send would take as long as copying the weights.
        """
        indices, _, sizes = self._joined[first]
        memories: Iterable[memoryview] = memories_at([self._places[index] for index in indices], sizes)
        if first in self._copied:
            memories = self._memories[first] = list(memories)
        self._copied.add(first)
        return memories

    def _fill_run(self, tensors: list[Tensor], base: int, step: Step) -> None:
        if step.move is Move.JOINED:
            run = memory_at(base + step.start, step.end - step.start)
            memories = self._memories.get(step.first) or self._memories_of(step.first)
            deque(map(_put, repeat(run), self._joined[step.first].slices, memories), maxlen=0)
            return
        into = kept_views(self._layout, base)[step.first : step.last]
        _copy(self._layout, step.first, into, tensors[step.first : step.last])

    def _empty_run(self, tensors: list[Tensor], base: int, wanted: frozenset[int], step: Step) -> None:
        if step.move is Move.JOINED:
            run = memory_at(base + step.start, step.end - step.start)
            indices, slices, _ = self._joined[step.first]
            memories = self._memories.get(step.first) or self._memories_of(step.first)
            chosen = list(map(wanted.__contains__, indices))
            sources = map(_get, repeat(run), compress(slices, chosen))
            deque(map(_put, compress(memories, chosen), repeat(slice(None)), sources), maxlen=0)
            return
        entry_views = kept_views(self._layout, base)
        indices = [index for index in range(step.first, step.last) if index in wanted]
        if not indices:
            return
        with torch.inference_mode():
            torch._foreach_copy_([tensors[index] for index in indices], [entry_views[index] for index in indices])


def _for_each_part(divided: Divided, work: Work) -> None:
    """Work on each part of a buffer."""
    if divided.threads == 1:
        (whole,) = divided.parts
        work(*whole)
    else:
        in_threads(work, divided.parts, divided.threads)


class _WriteFollower:
    """Hashes and names the bytes of a buffer that one thread writes, in order.

    Args:
        base: the address of the buffer.
        start: where the thread begins.
    """

    def __init__(self, base: int, hashes: ChunkHashes | None, on_written: OnWritten | None, start: int) -> None:
        self._base, self._reached, self._on_written = base, start, on_written
        self._hashing = None if hashes is None else hashes.in_order(start)

    def written(self, start: int, end: int, source: int) -> None:
        """The bytes ``start:end`` were copied from an address, where the cache has them. What was left out is a gap."""
        if self._hashing is not None:
            if self._reached < start:
                self._hashing.take(memory_at(self._base + self._reached, start - self._reached))
            self._hashing.take(memory_at(source, end - start))
        if self._on_written is not None and self._reached < end:
            self._on_written(self._reached, end)
        self._reached = end


def _is_movable(tensor: Tensor, entry: Entry) -> bool:
    """Whether the tensor's bytes are its elements as the buffer has them, in the same order."""
    plain = type(tensor) in PLAIN and tensor.is_cpu and tensor.layout is torch.strided and entry.dtype != "bool"
    own = plain and lies_in_order(tensor, entry) and not tensor.is_neg() and not tensor.is_conj()
    return own and DTYPE_NAMES.get(tensor.dtype) == entry.dtype


def digest_of_weights(weights: object, read: Callable[[object], Weights] = read_weights) -> bytes:
    """Compute the `digest` of weights as a sender would, which takes from them what ``read`` returns.

    Raises:
        ConfigurationError, LayoutError: they cannot be sent.
    """
    weights_read = read(weights)
    return digest_of(weights_read, layout_of(weights_read), encode_extras(weights_read.extras()))


@uncompiled
def digest_of(weights: Weights, layout: Layout, extras: bytes) -> bytes:
    """Compute the `digest` that these weights would have when packed, using `CHUNK` bytes or the largest tensor's."""
    streamed, tensors, end = StreamedDigest(), ordered(weights, layout), 0
    for first, last in _chunks(layout):
        start = layout.entries[first].offset
        streamed.take(bytes(start - end))
        end = layout.entries[last - 1].offset + layout.entries[last - 1].nbytes
        scratch = on_cpu(end - start)
        _fill(layout, first, last, tensors, scratch.data_ptr() - start)
        streamed.take(scratch.numpy().data)
    return streamed.combined(extras)


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
            found += [
                shaped(piece, entry) if entry.order else piece.view(entry.shape)
                for piece, entry in zip(pieces, entries, strict=True)
            ]
    return found


def views_per_dtype(layout: Layout, memory: Callable[[Group], Tensor]) -> list[Tensor]:
    """The entries as views of this memory, which has a storage of its own for each dtype.

    `torch.save` writes whole storages, and none in which there are tensors of several dtypes.
    """
    found: list[Tensor] = []
    for group in layout.groups:
        found += views(layout, memory(group), group.first, group.last)
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
            _copy(layout, first, views(layout, gathered, first, last), chosen, _copy_on_device)
            flat.copy_(gathered)
        else:
            _copy(layout, first, views(layout, flat, first, last), chosen)


def _span(layout: Layout, first: int, last: int, base: int) -> Tensor:
    """The bytes of entries ``first:last`` of a buffer at `base`."""
    start, tail = layout.entries[first].offset, layout.entries[last - 1]
    return borrowed(base + start, tail.offset + tail.nbytes - start)


def _copy_on_device(into: list[Tensor], tensors: list[Tensor]) -> None:
    copy_groups(groups_of(into, tensors), into, tensors)


def _copy(layout: Layout, first: int, into: list[Tensor], tensors: list[Tensor], copy: _Copy | None = None) -> None:
    if not tensors:
        return
    try:
        with torch.inference_mode():
            (copy or torch._foreach_copy_)(into, tensors)
    except Exception as error:
        for entry, tensor in zip(layout.entries[first:], tensors, strict=False):
            why = why_uncopied(tensor)
            if why:
                raise LayoutError(f"'{entry.name}' {why}.", mismatched={entry.name: why}) from error
        # A dispatch mode may fail at buffers without a version, as torch's allow_mutation_on_saved_tensors() does.
        with torch.inference_mode(), _disable_current_modes():
            (copy or torch._foreach_copy_)(into, tensors)


def _on_one_device(tensors: list[Tensor]) -> bool:
    # The first tensor rules out the common CPU case quickly. Mixed devices and meta tensors are copied one by one.
    return (
        bool(tensors)
        and not (tensors[0].is_cpu or tensors[0].is_meta)
        and len({tensor.device for tensor in tensors}) == 1
    )


def zero_gaps(layout: Layout, base: int) -> None:
    """Write zeros into the gaps of the buffer at `base`."""
    for start, end in layout.gaps:
        borrowed(base + start, end - start).zero_()


@lru_cache(maxsize=8)
def _chunks(layout: Layout) -> tuple[tuple[int, int], ...]:
    return chunks_of(layout, CHUNK)


def chunks_of(layout: Layout, limit: int) -> tuple[tuple[int, int], ...]:
    """Split the entries into runs of one dtype, each of at most `limit` bytes or of a single entry."""
    chunks = []
    for group in layout.groups:
        first = group.first
        for index in range(group.first + 1, group.last):
            entry = layout.entries[index]
            if entry.offset + entry.nbytes - layout.entries[first].offset > limit:
                chunks.append((first, index))
                first = index
        chunks.append((first, group.last))
    return tuple(chunks)
