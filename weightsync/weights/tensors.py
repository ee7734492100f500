"""What torch says about one tensor: whether it can be sent, and its bytes; and bytes seen as tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weightsync.weights.layout import ITEMSIZES

#: Name to torch dtype, of those that this torch has.
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {name: getattr(torch, name) for name in ITEMSIZES if name in vars(torch)}
)
#: Torch dtype to name.
DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})

#: Types that need no closer look: a tensor of one of them, strided and of a known dtype, has bytes of its own.
PLAIN: frozenset[type] = frozenset({Tensor, nn.Parameter, nn.Buffer})


def why_unsupported(tensor: Tensor) -> str:
    """Why this tensor cannot be sent or received, as the end of "'name' ..."; empty if it can."""
    try:
        return _why_unsupported(tensor)
    except Exception as error:  # noqa: BLE001 - a subclass of Tensor may raise anything, whatever it is asked
        return f"is a {type(tensor).__name__}, which cannot be read as a plain tensor ({error!r})"


def _why_unsupported(tensor: Tensor) -> str:
    if is_lazy(tensor):
        return "is not initialised: run a forward pass first, so that its shape is known"
    if tensor.is_nested:
        return "is a nested tensor, which has no one shape"
    if tensor.is_quantized:
        return f"is quantised ({tensor.dtype}): dequantise it, or send its int_repr()"
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}: make it dense"
    if tensor.is_meta:
        return "is on the meta device and has no data"
    if is_traceable_wrapper_subclass(tensor):
        return f"is a {type(tensor).__name__}, which wraps other tensors: send those"
    if tensor.dtype not in DTYPE_NAMES:
        return f"has the dtype {tensor.dtype}, which cannot be sent"
    return _why_unbacked(tensor)


def why_uncopied(tensor: Tensor) -> str:
    """Why copying this tensor failed, as the end of "'name' ..."; empty if it can be copied."""
    why = why_unsupported(tensor)
    if why or type(tensor) in PLAIN:
        return why
    try:
        bits_of(tensor)
    except Exception as error:  # noqa: BLE001 - a subclass of Tensor may raise anything
        return f"is a {type(tensor).__name__}, which cannot be copied ({error!r})"
    return ""


def _why_unbacked(tensor: Tensor) -> str:
    needed = _bytes_needed(tensor)
    if not needed or tensor.device.type not in _WITH_STORAGE:
        return ""
    storage = tensor.untyped_storage()
    if storage.device.type == "meta":
        return f"is a {type(tensor).__name__}, which has no data"
    if storage.nbytes() < needed:
        freed = "was freed or shrunk: its storage"
        return f"{freed} has {storage.nbytes()} bytes, but its shape and strides need {needed}"
    if not tensor.data_ptr():
        return f"is a {type(tensor).__name__}, which has no memory of its own: send what it wraps"
    return ""


#: Kinds of device whose tensors lie in a storage that can be asked for its size; others may be opaque.
_WITH_STORAGE = frozenset({"cpu", "cuda"})


def _bytes_needed(tensor: Tensor) -> int:
    """Where in its storage the tensor ends."""
    count = tensor.numel()
    if not count:
        return 0
    if not tensor.is_contiguous():
        count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + count) * tensor.itemsize


def are_backed(tensors: Sequence[Tensor], sizes: list[int]) -> bool:
    """Whether plain tensors of these sizes all lie within their storages; quick where they fill them.

    On the meta device they do, too; copying from there raises.
    """
    try:
        held = list(map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, tensors)))
    except RuntimeError:  # sparse ones, for one, have no storage
        return False
    filled = held == sizes and not any(map(Tensor.storage_offset, tensors))
    if filled and all(map(Tensor.is_contiguous, tensors)):
        return True
    return all(_bytes_needed(tensor) <= nbytes for tensor, nbytes in zip(tensors, held, strict=True))


def bits_of(tensor: Tensor) -> Tensor:
    """A copy of the tensor's elements on the CPU, in row-major order, bit by bit, as uint8 of shape (nbytes,)."""
    # Allocated as bytes: torch warns of some dtypes when it allocates them.
    bits = torch.empty(tensor.numel() * tensor.itemsize, dtype=torch.uint8)
    bits.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    return bits


def owning(view: memoryview) -> Tensor:
    """The bytes of `view` as a tensor that keeps their memory alive; writable memory only."""
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(view, dtype=torch.uint8)


def borrowed(address: int, nbytes: int) -> Tensor:
    """The memory at `address` as a tensor, to be used only while the caller holds that memory.

    It exports no buffer, so that a mapping can be closed although such a tensor was kept for its next use, and it
    sees read-only memory (which must then not be written) without torch's warning.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


def address_of(view: memoryview) -> int:
    """Where the bytes of a contiguous `view` lie, read-only or not; 0 if there are none."""
    return int(numpy.frombuffer(view, dtype=numpy.uint8).ctypes.data) if view.nbytes else 0
