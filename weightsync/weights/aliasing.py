"""How the tensors of a destination share memory: tied parameters, and views of each other."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from weightsync.weights.layout import ALIGNMENT, Entry, Layout
from weightsync.weights.tensors import bits_of, is_lazily_changed, lies_in_order, on_cpu, order_of

#: C's `memcmp`, without the GIL. Torch compares bytes one by one, which takes eight times as long.
_compare: Final[Any] = ctypes.CDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
#: How many bytes are compared at once on a device, where torch takes as much memory again for what it finds.
_PIECE: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Sharing:
    """Indices of tensors that share memory.

    Attributes:
        ties: groups with the same memory, shape and strides.
        overlaps: groups that share memory partly or in different shapes, or one tensor that overlaps itself.
        expanded: tensors in which several elements share one place in memory, so that they cannot be written.
    """

    ties: tuple[tuple[int, ...], ...] = ()
    overlaps: tuple[tuple[int, ...], ...] = ()
    expanded: tuple[int, ...] = ()


def sharing_of(tensors: Sequence[Tensor]) -> Sharing:
    """Find the tensors that share memory."""
    expanded = tuple(i for i, tensor in enumerate(tensors) if _is_expanded(tensor))
    ties, overlaps = [], []
    for cluster in _clusters(tensors):
        if len({_geometry(tensors[i]) for i in cluster}) > 1 or any(_may_self_overlap(tensors[i]) for i in cluster):
            overlaps.append(cluster)
        elif len(cluster) > 1:
            ties.append(cluster)
    return Sharing(tuple(ties), tuple(overlaps), expanded)


def shared_with(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[int, int] | None:
    """The index of a tensor, and that of one of the others with which it shares memory, or None."""
    for cluster in _clusters([*tensors, *others]):
        if cluster[0] < len(tensors) <= cluster[-1]:
            return cluster[0], cluster[-1] - len(tensors)
    return None


def mappable(layout: Layout, tensors: Sequence[Tensor], sharing: Sharing) -> dict[int, int]:
    """The parameters that may become views of a payload, each with the index of the first that it is tied to."""
    shared = {index for overlap in sharing.overlaps for index in overlap}
    places = {tensor.device for tensor in tensors}
    place = places.pop() if len(places) == 1 else torch.device("cpu")
    able = {
        index
        for index, (entry, tensor) in enumerate(zip(layout.entries, tensors, strict=True))
        if index not in shared and _may_share_memory(tensor, entry, place)
    }
    sources = {index: index for index in able}
    for tie in sharing.ties:
        for index in tie:
            # All tensors of a tie are mapped or none is: otherwise the copied ones would no longer share their memory.
            sources.pop(index, None)
            if able.issuperset(tie):
                sources[index] = tie[0]
    return sources


def _may_share_memory(tensor: Tensor, entry: Entry, place: torch.device) -> bool:
    # A parameter created in inference mode cannot be given normal data.
    plain = type(tensor) is nn.Parameter and tensor.device == place and not tensor.is_inference()
    return plain and lies_in_order(tensor, entry) and not tensor.is_conj() and not tensor.is_neg()


def agrees(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> bool:
    """Whether overlapping tensors can hold all of these values at once. This is tried out on a scratch copy."""
    base = min(tensor.data_ptr() for tensor in tensors) // 64 * 64
    scratch = on_cpu(max(map(_end, tensors)) - base).zero_()
    places = []
    for tensor, value in zip(tensors, values, strict=True):
        typed = scratch[tensor.data_ptr() - base : _end(tensor) - base].view(tensor.dtype)
        place = torch.as_strided(typed, tensor.shape, tensor.stride(), typed.storage_offset())
        place.copy_(value)
        places.append(place)
    return all(same_bits(place, value) for place, value in zip(places, values, strict=True))


def copy_preserving_aliases(tensors: Sequence[Tensor], memory: Tensor) -> list[Tensor]:
    """Copies of tensors that lie in this memory, given as bytes. They share memory with each other as these do."""
    start = min(tensor.data_ptr() for tensor in tensors) - memory.data_ptr()
    start -= start % ALIGNMENT
    copy = _copy_of(memory[start : max(map(_end, tensors)) - memory.data_ptr()]).untyped_storage()
    copies = []
    for tensor in tensors:
        offset = (tensor.data_ptr() - memory.data_ptr() - start) // tensor.itemsize
        with torch.inference_mode(tensor.is_inference()):
            made = torch.empty(0, dtype=tensor.dtype, device=memory.device)
            made.set_(copy, offset, tensor.shape, tensor.stride())
            made = made.conj() if tensor.is_conj() else made
            copies.append(torch._neg_view(made) if tensor.is_neg() else made)
    return copies


def _copy_of(memory: Tensor) -> Tensor:
    """A copy of bytes, made in this thread alone: torch may copy in several, and a child forked after that hangs."""
    if not memory.is_cpu:
        return memory.clone()
    copy = on_cpu(memory.nbytes)
    ctypes.memmove(copy.data_ptr(), memory.data_ptr(), memory.nbytes)
    return copy


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype and shape are equal bit for bit: NaN equals itself, 0.0 differs from -0.0."""
    order = order_of(one)
    if order and order == order_of(other):
        one, other = one.permute(order), other.permute(order)
    plain = one.is_contiguous() and other.is_contiguous()
    if plain and one.is_cpu and other.is_cpu and not (is_lazily_changed(one) or is_lazily_changed(other)):
        return not _compare(one.data_ptr(), other.data_ptr(), one.nbytes)
    if plain and one.device == other.device and not one.is_cpu:
        with torch.inference_mode():
            pieces = (torch.split(each.reshape(-1).view(torch.uint8), _PIECE) for each in (one, other))
            return all(map(torch.equal, *pieces))
    return torch.equal(bits_of(one), bits_of(other))


def _clusters(tensors: Sequence[Tensor]) -> Iterator[tuple[int, ...]]:
    """Yield groups of indices whose ranges of memory overlap."""
    extents = sorted(
        (str(tensor.device), tensor.data_ptr(), _end(tensor), index)
        for index, tensor in enumerate(tensors)
        if tensor.numel()
    )
    cluster: list[int] = []
    cluster_device, cluster_end = "", 0
    for device, start, end, index in extents:
        if cluster and (device != cluster_device or start >= cluster_end):
            yield tuple(sorted(cluster))
            cluster = []
        cluster_device, cluster_end = device, max(cluster_end, end) if cluster else end
        cluster.append(index)
    if cluster:
        yield tuple(sorted(cluster))


def _end(tensor: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.itemsize


def _geometry(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(_sizes_and_strides(tensor)), tuple(tensor.shape)


def _sizes_and_strides(tensor: Tensor) -> Iterable[tuple[int, int]]:
    """Size and stride of each dimension larger than 1."""
    return ((size, step) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def _is_expanded(tensor: Tensor) -> bool:
    return tensor.numel() > 1 and any(step == 0 for _, step in _sizes_and_strides(tensor))


def _may_self_overlap(tensor: Tensor) -> bool:
    """Whether two elements may share one place in memory, as in sliding windows."""
    reach = 0
    for size, step in sorted(_sizes_and_strides(tensor), key=lambda dimension: dimension[1]):
        if step <= reach:
            return True
        reach += (size - 1) * step
    return False
