"""Pickles of weights that any process with torch can read, whatever their dtypes."""

from __future__ import annotations

import functools
import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torch import Tensor

from weightsync.weights.tensors import is_lazily_changed

#: The dtypes that torch can read from its own pickles. For the others (8-bit floats, wide unsigned integers, complex32)
#: torch writes pickles that it cannot read, as of torch 2.15.
READABLE: Final = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)
#: Makes a tensor of that dtype over a buffer. One object for each dtype, so that a pickle names it once.
_OVER_BUFFER: Final = {dtype: functools.partial(torch.frombuffer, dtype=dtype) for dtype in READABLE}
#: Trees of weights that need no more than `pickle`, if their leaves are tensors.
_PLAIN_TREES: Final = (TensorDict, dict, OrderedDict)


def portable(weights: Any) -> Any:
    """Return the weights, wrapped if a plain pickle of them could not be read or would be slow.

    Whatever is returned unpickles as the weights. The reader does not need weightsync.
    """
    readable = READABLE.issuperset(tensor.dtype for tensor in _tensors(weights))
    return weights if readable and not _is_plain(weights) else _PickledWeights(weights)


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


def _is_plain(value: Any) -> bool:
    """Whether this is a tree of tensors, and of nothing that may need more than `pickle`."""
    if type(value) in _PLAIN_TREES:
        return all(_is_plain(inner) for inner in value.values())
    return type(value) is Tensor


class _PickledWeights:
    """The pickled bytes of weights. Unpickling an instance returns the weights."""

    def __init__(self, weights: Any) -> None:
        self._data = io.BytesIO()
        _Pickler(self._data, protocol=pickle.HIGHEST_PROTOCOL).dump(weights)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A pickler of protocol 5 takes the buffer as it is, and may carry it out of band.
        whole = self._data.getvalue() if protocol < 5 else pickle.PickleBuffer(self._data.getbuffer())
        return pickle.loads, (whole,)


class _Pickler(pickle.Pickler):
    """Writes tensors as their bytes, with dtype and shape.

    torch writes each storage as a file of its own, which takes much longer, and writes a storage once for each view.
    """

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        if obj.dtype not in READABLE:
            if obj.dim() != 1:
                return Tensor.view, (obj.detach().reshape(-1), tuple(obj.shape))
            return Tensor.view, (obj.detach().resolve_conj().contiguous().view(torch.uint8), obj.dtype)
        if not _is_flat_bytes(obj):
            return NotImplemented
        if obj.dim() != 1:
            return Tensor.view, (obj.view(-1), tuple(obj.shape))
        array: Any = obj.view(torch.uint8).numpy()
        return _OVER_BUFFER[obj.dtype], (pickle.PickleBuffer(array),)


def _is_flat_bytes(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but its bytes, dtype and shape."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or is_lazily_changed(tensor) or vars(tensor))
        and tensor.is_contiguous()
        and tensor.numel() > 0
    )
