"""Tensors: whether one can be sent, its bytes, memory viewed as one, and copies of many on a device."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import add, attrgetter
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeGuard

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weightsync.errors import ConfigurationError
from weightsync.weights.layout import ITEMSIZES, Entry
from weightsync.weights.threads import alone

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # a torch without them: `Form` reads each trait
    TensorGuards = None  # type: ignore[assignment, misc]

#: Name to torch dtype, for the dtypes that this version of torch has.
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {name: getattr(torch, name) for name in ITEMSIZES if name in vars(torch)}
)
#: Torch dtype to name.
DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})

#: Types without surprises: a tensor of one of them that is strided and of a known dtype has its own bytes.
PLAIN: frozenset[type] = frozenset({Tensor, nn.Parameter, nn.Buffer})

#: Plain tensors are read past torch's function modes, which change nothing about them. torch's default device is such a
#: mode: if the user has set it, each call would otherwise run Python code.
past_modes: Final[Any] = torch._C.DisableTorchFunction
#: The same for torch's dispatch modes, of the tensors of any type.
past_dispatch_modes: Final[Any] = getattr(torch._C, "_DisableTorchDispatch", contextlib.nullcontext)  # not public


try:
    #: The FakeTensorMode that this thread is in, or None. Like `past_modes` it is no call of Python.
    fake_mode: Callable[[], object] = partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE)
except AttributeError:  # no public interface: with another torch nothing is refused

    def fake_mode() -> object:
        """None."""


def refusing_fake_mode() -> ConfigurationError:
    """The error of a call that would read or write weights in FakeTensorMode: new tensors have no memory there."""
    return ConfigurationError(
        "this thread is in torch's FakeTensorMode, where nothing is computed and new tensors have no memory. Call "
        "send() and receive() outside of it."
    )


class Form:
    """Identifies plain tensors by dtypes, shapes, strides, devices and addresses, without a reference to any of them.

    Args:
        tensors: in any order, which counts.
        sized: whether their storages must keep their sizes: one that was freed or shrunk, and is where it was, may be
            too small.

    Raises:
        RuntimeError: one of them has no memory, or no shape.
    """

    def __init__(self, tensors: Collection[Tensor], sized: bool = False) -> None:
        #: Makes a context in which these tensors are read, or written, past torch's function modes if all are plain.
        self.reading: Callable[[], contextlib.AbstractContextManager[object]] = (
            past_modes if PLAIN.issuperset(map(type, tensors)) else contextlib.nullcontext
        )
        with self.reading():
            #: Where the tensors are, in their order.
            self.addresses: list[int] = list(map(Tensor.data_ptr, tensors))
            self._traits = _traits(tensors)
        self._held: list[int] | None = None
        if sized:
            with contextlib.suppress(RuntimeError):  # on some devices storages are opaque
                self._held = held(tensors)
        self._guard(tensors)

    def fits(self, tensors: Collection[Tensor]) -> bool:
        """Whether these tensors, in the same order, have the same form."""
        try:
            with self.reading():
                if list(map(Tensor.data_ptr, tensors)) != self.addresses or any(map(_IS_NESTED, tensors)):
                    return False  # the guards end the process at a nested tensor, which may be where another was
                if self._held is not None and held(tensors) != self._held:
                    return False
                distinct, twins = _distinct(tensors) if self._twins else (tensors, self._twins)
                if self._guards is not None and twins == self._twins and self._guards.check(*distinct):
                    return True
                fits = _traits(tensors) == self._traits
        except RuntimeError:  # one of them is sparse by now
            return False
        if fits and self._guards is not None:  # other tensors need a gradient by now, or this is another mode
            self._guard(tensors)
        return fits

    def moved(self, tensors: Collection[Tensor]) -> Form | None:
        """The same form where these tensors are, whose `fits` compares the rest; None: they cannot have it."""
        moved = copy.copy(self)
        try:
            with self.reading():
                moved.addresses = list(map(Tensor.data_ptr, tensors))
        except RuntimeError:  # one of them is sparse by now
            return None
        # One that is not empty, and has no address, has no memory.
        return moved if moved.addresses.count(0) == self.addresses.count(0) else None

    def _guard(self, tensors: Collection[Tensor]) -> None:
        distinct, self._twins = _distinct(tensors)
        self._guards = _guards_of(distinct)


def held(tensors: Collection[Tensor]) -> list[int]:
    """The sizes of the tensors' storages, in bytes."""
    with past_modes():
        return list(map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, tensors)))


def _distinct(tensors: Collection[Tensor]) -> tuple[Collection[Tensor], list[int]]:
    """Each tensor once, and where among them each of these is; an empty list if none is given twice."""
    ids = list(map(id, tensors))
    by_id = dict(zip(ids, tensors, strict=True))
    if len(by_id) == len(ids):
        return tensors, []
    places = dict(zip(by_id, range(len(by_id)), strict=True))
    return list(by_id.values()), list(map(places.__getitem__, ids))


def _guards_of(tensors: Collection[Tensor]) -> TensorGuards | None:
    """A guard of torch's compiler: it checks in one call what `_traits` reads one by one. It refers to no tensor.

    It also checks which of them need a gradient, and torch's modes: if it fails, nothing follows. None: this torch has
    none that can be made so.

    Args:
        tensors: each once, since a guard fails for one that is given twice.
    """
    if TensorGuards is None:
        return None
    try:
        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    except TypeError:  # no public interface: another torch may take other arguments
        return None


def _traits(tensors: Collection[Tensor]) -> tuple[object, ...]:
    dtypes = list(map(_DTYPE, tensors))
    return (
        dtypes,
        list(map(_SHAPE, tensors)),
        list(map(_DEVICE, tensors)),
        list(map(Tensor.stride, tensors)),
        list(map(Tensor.is_neg, tensors)),
        _COMPLEX.isdisjoint(dtypes) or list(map(Tensor.is_conj, tensors)),
    )


_COMPLEX = frozenset(dtype for dtype in DTYPE_NAMES if dtype.is_complex)
_DTYPE, _SHAPE, _DEVICE = attrgetter("dtype"), attrgetter("shape"), attrgetter("device")
_IS_NESTED = attrgetter("is_nested")


def is_dtensor(tensor: Tensor) -> TypeGuard[Any]:
    """Whether this is a `torch.distributed.tensor.DTensor`, whose own memory is one rank's shard."""
    module = sys.modules.get("torch.distributed.tensor")  # which takes long to import, and has made every DTensor
    return module is not None and isinstance(tensor, module.DTensor)


def why_unsupported(tensor: Tensor) -> str:
    """Why this tensor cannot be sent or received, to complete "'name' ..."; empty if it can."""
    try:
        return _why_unsupported(tensor)
    except Exception as error:  # noqa: BLE001 - a subclass of Tensor may raise anything from any call
        return f"is a {type(tensor).__name__}, which cannot be read as a plain tensor ({error!r})"


def _why_unsupported(tensor: Tensor) -> str:
    if is_lazy(tensor):
        return "is not initialised: run a forward pass first to determine its shape"
    if tensor.is_nested:
        return "is a nested tensor, which has no single shape"
    if tensor.is_quantized:
        return f"is quantised ({tensor.dtype}): dequantise it, or send its int_repr()"
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}: convert it to a dense tensor"
    if tensor.is_meta:
        return (
            "is on the meta device and has no data: make its model on another device, or call to_empty(device=...) on "
            "it, load weights, and fill the buffers that are not persistent. If accelerate has offloaded the model, "
            "give one that is not offloaded"
        )
    if is_dtensor(tensor):
        return (
            "is a DTensor, of which this rank holds only a shard: to send the whole model, call "
            "weightsync.send_sharded() on every rank; a worker's model must hold plain tensors"
        )
    if is_traceable_wrapper_subclass(tensor):
        return (
            f"is a {type(tensor).__name__}, which wraps other tensors, as quantised weights do: give both sides the "
            "model as it is before it is quantised, or a dict of those tensors"
        )
    if tensor.dtype not in DTYPE_NAMES:
        return f"has the dtype {tensor.dtype}, which cannot be sent"
    torch.Size(tensor.shape)  # that of a subclass may raise too
    return _why_unbacked(tensor)


def why_uncopied(tensor: Tensor) -> str:
    """Why copying this tensor failed, to complete "'name' ..."; empty if it can be copied."""
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
    if not needed or tensor.device.type not in WITH_STORAGE:
        return ""
    storage = tensor.untyped_storage()
    if storage.device.type == "meta":
        return f"is a {type(tensor).__name__}, which has no data"
    if storage.nbytes() < needed:
        return f"was freed or shrunk: its storage has {storage.nbytes()} bytes, its shape and strides need {needed}"
    if not tensor.data_ptr():
        return f"is a {type(tensor).__name__}, which has no memory of its own: send the tensor that it wraps"
    return ""


#: Device types whose tensors have a storage of known size; on others the storage may be opaque.
WITH_STORAGE = frozenset({"cpu", "cuda"})


def _bytes_needed(tensor: Tensor) -> int:
    """The offset at which the tensor ends in its storage."""
    count = tensor.numel()
    if not count:
        return 0
    if not tensor.is_contiguous():
        count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + count) * tensor.itemsize


def are_backed(tensors: Sequence[Tensor], sizes: list[int]) -> bool:
    """Whether plain tensors of these sizes all lie within their storages; fast if each fills its storage.

    This is also true of tensors on the meta device, which raise when they are copied.
    """
    try:
        nbytes_held = held(tensors)
    except RuntimeError:  # e.g. sparse tensors have no storage
        return False
    if any(map(Tensor._is_zerotensor, tensors)):  # torch's zeros without memory, whose storage has a size
        return False
    filled = nbytes_held == sizes and not any(map(Tensor.storage_offset, tensors))
    if filled and all(map(Tensor.is_contiguous, tensors)):
        return True
    return all(_bytes_needed(tensor) <= nbytes for tensor, nbytes in zip(tensors, nbytes_held, strict=True))


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """The order of its dimensions in memory, as in an `Entry`.

    It is empty too if its elements do not lie side by side, or are on a device: its kernels change the order for free.
    """
    if type(tensor) not in PLAIN or not tensor.is_cpu or tensor.is_contiguous():
        return ()
    shape, strides, expected = tensor.shape, tensor.stride(), 1
    order = sorted(range(len(shape)), key=lambda at: (shape[at] > 1, -strides[at] if shape[at] > 1 else 0))
    for at in reversed(order):
        if shape[at] > 1 and strides[at] != expected:
            return ()
        expected *= shape[at]
    return tuple(order)


def lies_in_order(tensor: Tensor, entry: Entry) -> bool:
    """Whether its elements follow each other in memory as those of the entry do."""
    if not entry.order:
        return tensor.is_contiguous()
    return tensor.permute(entry.order).is_contiguous()


def shaped(elements: Tensor, entry: Entry) -> Tensor:
    """View the elements of an entry, which follow each other in its order, in its shape."""
    if not entry.order:
        return elements.view(entry.shape)
    inner = elements.view([entry.shape[at] for at in entry.order])
    return inner.permute([entry.order.index(at) for at in range(len(entry.order))])


def on_cpu(nbytes: int) -> Tensor:
    """New memory on the CPU, as uint8. Tensors are made elsewhere where the user has set torch's default device."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def bits_of(tensor: Tensor) -> Tensor:
    """Copy the tensor's elements to the CPU, in row-major order and bit for bit, as uint8 of shape (nbytes,)."""
    # Allocated as bytes, because torch warns when it allocates some dtypes.
    bits = on_cpu(tensor.numel() * tensor.itemsize)
    bits.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    return bits


def owning(view: memoryview, start: int = 0, nbytes: int = -1) -> Tensor:
    """View bytes of `view`, which must be writable, as a tensor that keeps that very object alive."""
    if not view.nbytes or not nbytes:
        return on_cpu(0)
    return torch.frombuffer(view, dtype=torch.uint8, offset=start, count=nbytes)


def borrowed(address: int, nbytes: int) -> Tensor:
    """View the memory at `address` as a tensor, valid only while the caller holds that memory.

    The tensor exports no buffer, so a mapping can be closed while such a tensor is cached. It can view read-only
    memory without a warning from torch; the caller must not write to it then.
    """
    if not nbytes:
        return on_cpu(0)
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


_VIEW: Final = ctypes.pythonapi.PyMemoryView_FromMemory
_VIEW.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_VIEW.restype = ctypes.py_object
#: The flag of a view that can be written, `PyBUF_WRITE` in C.
_WRITABLE: Final = 0x200


def memory_at(address: int, nbytes: int) -> memoryview:
    """The bytes at `address`, valid only while the caller holds that memory, and writable if it is."""
    found: memoryview = _VIEW(address, nbytes, _WRITABLE) if nbytes else memoryview(bytearray())
    return found


def memories_at(addresses: Sequence[int], sizes: Sequence[int]) -> Iterator[memoryview]:
    """The bytes at each of these addresses, made one by one as the iterator advances: see `memory_at`.

    Args:
        sizes: how many bytes of each; none is 0.
    """
    low = min(addresses)
    around = memory_at(low, max(map(add, addresses, sizes)) - low)  # what lies between them is never read
    starts = [address - low for address in addresses]
    return map(around.__getitem__, map(slice, starts, map(add, starts, sizes)))


def address_of(view: memoryview) -> int:
    """The address of a contiguous `view`, read-only or not; 0 if it is empty."""
    if view.nbytes and not view.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    # Its `ctypes.data` is the same number, after two more Python calls.
    return int(numpy.frombuffer(view, dtype=numpy.uint8).__array_interface__["data"][0]) if view.nbytes else 0


#: Releases the GIL, which an assignment to `Tensor.data` does not. Its ``_op`` is the same without a Python call.
_SET_DATA: Final[Any] = torch.ops.aten.set_data.default._op


def set_data(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Give each tensor the memory of another of the same kind, as an assignment to its ``data`` does.

    That takes a lock of the tensor with the GIL held. If autograd meets a parameter in another thread at that moment
    (``parameter.sum()`` is enough), it may hold the lock and wait for the GIL: both threads then wait forever. This was
    seen with torch 2.15.
    """
    only_one = threading.active_count() == 1 or alone()
    with past_modes():
        for tensor, data in pairs:
            if only_one or not tensor.requires_grad:
                tensor.data = data
            else:
                _SET_DATA(tensor, data)


def count_writes(tensors: list[Tensor]) -> None:
    """Have autograd count a write into each tensor: a backward pass through a graph of its old values then raises."""
    try:
        torch.autograd.graph.increment_version(tensors)
    except RuntimeError:  # one was made in inference mode, and has no version; it is no harm to count others twice
        torch.autograd.graph.increment_version(list(filter(counts_writes, tensors)))


def counts_writes(tensor: Tensor) -> bool:
    """Whether autograd counts writes into it: not if it was made in inference mode, whatever memory it has now."""
    try:
        return tensor._version >= 0
    except RuntimeError:
        return False


#: Dtypes that torch's kernel for many tensors cannot copy, or would convert to float and back, which changes NaNs; and
#: the dtype as which they are copied instead, bit for bit.
BITS: Mapping[torch.dtype, torch.dtype] = MappingProxyType(
    {
        DTYPES[name]: bits
        for bits, names in (
            (torch.uint8, ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")),
            (torch.int16, ("float16", "bfloat16", "uint16")),
            (torch.int32, ("complex32", "uint32")),
            (torch.int64, ("uint64",)),
        )
        for name in names
        if name in DTYPES
    }
)


class SlotViews(list[Tensor]):
    """The entries of a layout as views of a slot, which are copied again and again."""

    #: The same memory, in the dtypes in which a device copies it bit for bit; None: not made yet.
    bits: list[Tensor] | None = None
    #: Those of them that were copied last, and their indices; None: all were.
    part: tuple[Sequence[int], SlotViews] | None = None


class Group(NamedTuple):
    """Copies that torch makes with few kernels: one dtype on each side, and all tensors contiguous or none.

    Copies without a cast are made bit for bit.
    """

    #: Which of the tensors; None: all.
    indices: Sequence[int] | None
    #: As what their elements are copied; None: as what they are.
    bits: torch.dtype | None

    def chosen(self, into: Sequence[Tensor], tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors to write, and those to read."""
        return self._of(into), self._of(tensors)

    def _of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        known = self.bits is not None and isinstance(tensors, SlotViews)
        given = _bits_of(tensors) if known else tensors  # type: ignore[arg-type]
        chosen = list(given) if self.indices is None else [given[index] for index in self.indices]
        return chosen if known or self.bits is None else list(map(Tensor.view, chosen, repeat(self.bits)))


def _bits_of(views: SlotViews) -> list[Tensor]:
    """Views of a slot as what they are copied bit for bit: made once, since it takes a microsecond for each."""
    if views.bits is None:
        views.bits = [each.view(BITS.get(each.dtype, each.dtype)) for each in views]
    return views.bits


def groups_of(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> Sequence[Group]:
    """How tensors on a device are copied into as many others."""
    indices_by_kind: dict[tuple[torch.dtype, torch.dtype, bool], list[int]] = {}
    for index, (target, source) in enumerate(zip(into, tensors, strict=True)):
        key = target.dtype, source.dtype, target.is_contiguous() and source.is_contiguous()
        indices_by_kind.setdefault(key, []).append(index)
    groups = []
    for (to, of, _), indices in indices_by_kind.items():
        bits = BITS.get(to) if to is of else None
        if bits is not None and any(is_lazily_changed(into[i]) or is_lazily_changed(tensors[i]) for i in indices):
            bits = None
        groups.append(Group(None if len(indices_by_kind) == 1 else indices, bits))
    return groups


def is_lazily_changed(tensor: Tensor) -> bool:
    """Whether its elements are not what its memory holds."""
    return tensor.is_neg() or tensor.is_conj()


def copy_groups(groups: Sequence[Group], into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Queue the copies on the device. Autograd counts no write where elements are copied as others: `count_writes`."""
    with torch.inference_mode():
        for group in groups:
            torch._foreach_copy_(*group.chosen(into, tensors), non_blocking=True)
