"""Payloads that serve as the memory of a model's parameters, and the cache of tensors that view them."""

from __future__ import annotations

import ctypes
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from weightsync.weights.aliasing import Sharing, copy_preserving_aliases
from weightsync.weights.device.base import DeviceMemory, Waits
from weightsync.weights.layout import ALIGNMENT, Layout
from weightsync.weights.moving import LEAST_NBYTES
from weightsync.weights.packing import views_per_dtype
from weightsync.weights.reading import Weights
from weightsync.weights.tensors import Form, address_of, on_cpu, owning

#: Smaller payloads that arrive inline are copied, and the memory of the copies is kept for later versions.
KEPT_BELOW_NBYTES: Final = 256 << 10
#: How many payloads to keep views of. Shared-memory slots are reused, so their views are too.
KEPT_PAYLOADS: Final = 4
#: The same for payloads of this size or more: fewer, so that memory that the trainer no longer uses is not kept.
LARGE_NBYTES: Final = 64 << 20
KEPT_LARGE: Final = 2
#: How many copies of payloads to keep: one is live, the next version is copied into the other.
KEPT_COPIES: Final = 2

_address: Final[Callable[[torch.UntypedStorage], int]] = torch.UntypedStorage.data_ptr
_nbytes: Final[Callable[[torch.UntypedStorage], int]] = torch.UntypedStorage.nbytes

try:
    #: How many tensors and storages of torch refer to the memory of a storage.
    _uses: Callable[[int], int] | None = torch._C._storage_Use_Count
except AttributeError:  # no public interface: with another torch no copy is used again
    _uses = None


class MappedPayload:
    """A payload as the memory of mapped parameters.

    Args:
        layout: the payload's layout.
        views: the only tensors that refer to that memory so far.
        source: what was received, if the memory is that itself and lies in a slot.
    """

    def __init__(self, layout: Layout, views: list[Tensor], source: memoryview | None = None) -> None:
        self.layout = layout
        self.views = views
        self.source = source
        #: The family of plans that the memory is chosen for: see `DestinationPlan.family`.
        self.family: object = None
        self.memory: list[Tensor] = []
        #: The tensors that are copied beside the mapped ones, and whether they are small enough to need no plan.
        self.copied: Sequence[int] = ()
        self.copies_little = True
        #: The devices whose kernels read it through parameters, which may be elsewhere by now.
        self.devices: tuple[Waits, ...] = ()
        self._form: Form | None = None
        #: Its storages, and their addresses. On the host there is one for each dtype.
        self._storages = list(dict.fromkeys(views[group.first].untyped_storage() for group in layout.groups))
        self._addresses = list(map(_address, self._storages))
        self._sizes = list(map(_nbytes, self._storages))
        self._identities = [storage._cdata for storage in self._storages]
        self._unused = [] if _uses is None else list(map(_uses, self._identities))

    @property
    def used(self) -> bool:
        """Whether any tensor but our own views refers to the memory: a parameter, or a view that is kept elsewhere."""
        return _uses is None or list(map(_uses, self._identities)) != self._unused

    @property
    def moved(self) -> bool:
        """Whether torch has moved or resized a part: it moves a tensor that is passed to a process, or shared."""
        now = list(map(_address, self._storages)), list(map(_nbytes, self._storages))
        return now != (self._addresses, self._sizes)

    def prepare(
        self, family: object, sources: Iterable[int], copied: Sequence[int], devices: tuple[Waits, ...]
    ) -> None:
        """Choose the parameters' memory: the views with these indices."""
        self.family, self.devices, self._form = family, devices, None
        self.memory = [self.views[source] for source in sources]
        self.copied = copied
        self.copies_little = sum(self.views[index].nbytes for index in copied) < LEAST_NBYTES

    def copy_beside(self, tensors: Sequence[Tensor]) -> None:
        """Copy what no parameter views into the tensors that hold it, those of `copied`: all of it is on the host."""
        with torch.inference_mode():
            into = [tensors[index] for index in self.copied]
            torch._foreach_copy_(into, [self.views[index] for index in self.copied])

    def copies_of(
        self, tensors: Sequence[Tensor], sharing: Sharing, staying: Container[int] = ()
    ) -> list[tuple[Tensor, Tensor]]:
        """The tensors that lie in this memory, except ``staying``, each with a copy; tied ones share theirs."""
        groups = {index: group for group in (*sharing.ties, *sharing.overlaps) for index in group}
        found: list[tuple[Tensor, Tensor]] = []
        with torch.inference_mode(False), torch.no_grad():
            for storage, address in zip(self._storages, self._addresses, strict=True):
                if storage.data_ptr() != address:
                    continue
                span = range(address, address + storage.nbytes())
                inside = [i for i, tensor in enumerate(tensors) if i not in staying and tensor.data_ptr() in span]
                memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                for group in dict.fromkeys(groups.get(index, (index,)) for index in inside):
                    together = [tensors[index] for index in group]
                    found += zip(together, copy_preserving_aliases(together, memory), strict=True)
        return found

    def form(self, weights: Weights) -> Form:
        """The form of the destination's tensors, once the parameters have that memory."""
        if self._form is None:
            self._form = Form(weights.tensors.values(), sized=bool(self.copied))  # a swap writes into no others
        return self._form


class CopiedPayload(MappedPayload):
    """Memory for copies of payloads that parameters cannot view where they are."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout, views_per_dtype(layout, lambda group: on_cpu(group.nbytes)))

    def fill(self, address: int) -> None:
        """Copy the payload at an address."""
        for group, place in zip(self.layout.groups, self._addresses, strict=True):
            ctypes.memmove(place, address + group.offset, group.nbytes)


def _mapped(layout: Layout, payload: memoryview, source: memoryview | None = None) -> MappedPayload:
    """The memory of a payload itself."""
    return MappedPayload(
        layout, views_per_dtype(layout, lambda group: owning(payload, group.offset, group.nbytes)), source
    )


class MappedPayloads:
    """The payloads that parameters were mapped to, with the views of those that are likely to come again."""

    def __init__(self) -> None:
        self._copies: deque[CopiedPayload] = deque(maxlen=KEPT_COPIES)
        #: By the payload's address and the digest of its layout.
        self._kept: OrderedDict[tuple[int, bytes], MappedPayload | None] = OrderedDict()

    def of(self, layout: Layout, payload: memoryview | DeviceMemory, in_slot: bool = False) -> MappedPayload:
        """The payload, viewed as tensors. If it is read-only or not aligned, the views are of a copy.

        Args:
            in_slot: whether it lies in a slot, which later payloads will lie in too. Elsewhere nothing is kept of it:
                views would keep memory from being used again.
        """
        if isinstance(payload, DeviceMemory):
            views_there = payload.views(layout)
            if not isinstance(payload.kept, MappedPayload):
                payload.kept = MappedPayload(layout, views_there)
            return payload.kept
        address = address_of(payload)
        small_inline = isinstance(payload.obj, bytearray) and layout.nbytes < KEPT_BELOW_NBYTES
        if payload.readonly or address % ALIGNMENT or small_inline:
            # torch has no read-only tensors, and its kernels are fastest on memory aligned as its own allocator does.
            # An inline payload is at another address each time: copying it costs less than making new views of it.
            return self._copy_payload(layout, address)
        if not in_slot:
            return _mapped(layout, payload)
        # Cached only when a payload is seen a second time; the views of a payload that is used once are dropped with
        # the parameters. Cached views hold the memory, so the key cannot be reused for other memory.
        key = address, layout.digest
        seen_before = key in self._kept
        mapped = self._kept.pop(key, None)
        if mapped is None or mapped.moved:
            mapped = _mapped(layout, payload, payload)
        self._kept[key] = mapped if seen_before else None
        while len(self._kept) > (KEPT_PAYLOADS if layout.nbytes < LARGE_NBYTES else KEPT_LARGE):
            self._kept.popitem(last=False)
        return mapped

    def only_keeps(self, payload: memoryview) -> bool:
        """Whether nothing refers to the memory of a payload but the views that are kept of it."""
        return any(kept is not None and kept.source is payload and not kept.used for kept in self._kept.values())

    def _copy_payload(self, layout: Layout, address: int) -> MappedPayload:
        for copy in self._copies:
            if copy.layout is layout and not copy.used and not copy.moved:
                break
        else:
            copy = CopiedPayload(layout)
            if layout.nbytes < KEPT_BELOW_NBYTES:
                self._copies.append(copy)
        copy.fill(address)
        return copy
