"""Pickles of results: plain tensors are written as their own bytes."""

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


class _Pickler(pickle.Pickler):
    """Writes the elements of plain tensors. torch's own pickle of a view has the whole storage."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or not _is_plain(obj):
            return NotImplemented
        elements: Any = obj.reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(elements), obj.dtype, tuple(obj.shape))


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but its elements, which lie in order in the memory of the host."""
    own = tensor.is_cpu and tensor.layout is torch.strided and tensor.dtype in DTYPE_NAMES and tensor.is_contiguous()
    return own and not (tensor.requires_grad or is_lazily_changed(tensor) or vars(tensor))


def _tensor(elements: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor in the memory of what was unpickled."""
    flat = torch.frombuffer(elements, dtype=torch.uint8) if elements else on_cpu(0)
    return flat.view(dtype).view(shape)
