"""Pickles of results: plain tensors are written as their own elements."""

from __future__ import annotations

import io
import pickle
from typing import Any, Final

import torch
from torch import Tensor

from weightsync.weights.tensors import DTYPE_NAMES, is_lazily_changed, on_cpu

_PROTOCOL: Final = pickle.HIGHEST_PROTOCOL


def pickled(value: Any) -> memoryview:
    """Pickle a value. Raises whatever pickle does, and the value's own methods."""
    into = io.BytesIO()
    _Pickler(into, _PROTOCOL).dump(value)
    return into.getbuffer()


def unpickled(data: bytes | memoryview) -> Any:
    """Unpickle a value. Raises whatever its own code does, but RuntimeError for StopIteration, which ends iterators."""
    try:
        return pickle.loads(data)
    except StopIteration as error:
        raise RuntimeError("a result raised StopIteration as it was unpickled. It is dropped.") from error


class _Pickler(pickle.Pickler):
    """Writes the elements of plain tensors. torch's own pickle of a view has the whole storage."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or not _is_plain(obj):
            return NotImplemented
        dense = _dense(obj.detach() if obj.requires_grad else obj)
        elements: Any = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(elements), obj.dtype, tuple(obj.shape), dense.stride(), obj.requires_grad)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but its elements, and they take no more than its own memory, which is the host's."""
    own = tensor.is_cpu and tensor.layout is torch.strided and tensor.dtype in DTYPE_NAMES
    if not own or is_lazily_changed(tensor) or vars(tensor):
        return False
    return tensor.is_contiguous() or tensor.nbytes <= tensor.untyped_storage().nbytes()


def _dense(tensor: Tensor) -> Tensor:
    """The tensor itself if its elements lie side by side, in any order; else a copy of it, whose elements do."""
    if tensor.is_contiguous():
        return tensor
    outermost_first = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor if tensor.permute(outermost_first).is_contiguous() else tensor.clone()


def _tensor(
    elements: bytearray, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], requires_grad: bool
) -> Tensor:
    """A tensor in the memory of what was unpickled."""
    flat = torch.frombuffer(elements, dtype=torch.uint8) if elements else on_cpu(0)
    return flat.view(dtype).as_strided(shape, strides).requires_grad_(requires_grad)
