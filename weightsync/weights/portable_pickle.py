"""Pickles of weights that any process with torch can read, whatever their dtypes."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from tensordict import NonTensorData, TensorDictBase
from torch import Tensor

#: The dtypes that torch can read from its own pickles. For the others (8-bit floats, wide unsigned integers, complex32)
#: torch writes pickles that it cannot read, as of torch 2.15.
READABLE: Final = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)


def portable(weights: Any) -> Any:
    """Return the weights, wrapped if a plain pickle of them could not be read.

    Whatever is returned unpickles as the weights. The reader does not need weightsync.
    """
    return weights if READABLE.issuperset(tensor.dtype for tensor in _tensors(weights)) else _Written(weights)


def _tensors(value: Any) -> Iterator[Tensor]:
    match value:
        case Tensor():
            yield value
        case NonTensorData():
            yield from _tensors(value.data)
        case TensorDictBase() | Mapping():
            for inner in value.values():
                yield from _tensors(inner)
        case list() | tuple():
            for inner in value:
                yield from _tensors(inner)


class _Written:
    """The pickled bytes of weights. Unpickling an instance returns the weights."""

    def __init__(self, weights: Any) -> None:
        buffer = io.BytesIO()
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(weights)
        self._data = buffer.getvalue()

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._data,)


class _Pickler(pickle.Pickler):
    """Writes tensors of the dtypes that torch cannot read as bytes, with their dtype and shape."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor) or obj.dtype in READABLE:
            return NotImplemented
        if obj.dim() != 1:
            return Tensor.view, (obj.detach().reshape(-1), tuple(obj.shape))
        return Tensor.view, (obj.detach().contiguous().view(torch.uint8), obj.dtype)
