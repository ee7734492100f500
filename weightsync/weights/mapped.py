"""Payloads as the memory of a model's parameters, and which of their views are kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

from torch import Tensor

from weightsync.weights.device.base import DeviceMemory
from weightsync.weights.layout import ALIGNMENT, Layout
from weightsync.weights.packing import views
from weightsync.weights.reading import Weights
from weightsync.weights.tensors import Form, address_of, borrowed, owning

#: Views of a payload are kept if its tensors are smaller than this on average. Otherwise they are made each time, which
#: costs less than to look for pages that this process has written through views that may still be referenced.
KEPT_BELOW_NBYTES: Final = 256 << 10
#: How many payloads to keep views of. Shared-memory slots are reused, so their views are too.
KEPT_PAYLOADS: Final = 4


class MappedPayload:
    """A payload as the memory of mapped parameters."""

    def __init__(self, views: list[Tensor]) -> None:
        self.views = views
        #: The family of plans that the memory is chosen for: see `DestinationPlan.family`.
        self.family: object = None
        self.memory: list[Tensor] = []
        #: The tensors that are copied beside the mapped ones.
        self.copied: Sequence[int] = ()
        self._form: Form | None = None

    def prepare(self, family: object, sources: Iterable[int], copied: Sequence[int]) -> None:
        """Choose the parameters' memory: the views with these indices."""
        self.family, self._form = family, None
        self.memory = [self.views[source] for source in sources]
        self.copied = copied

    def form(self, weights: Weights) -> Form:
        """What the destination's tensors are known by, once the parameters have that memory."""
        if self._form is None:
            self._form = Form(weights.tensors.values())
        return self._form


class MappedPayloads:
    """The payloads that parameters were mapped to, with the views of those that are likely to come again."""

    def __init__(self) -> None:
        #: By the payload's address and the digest of its layout.
        self._kept: OrderedDict[tuple[int, bytes], MappedPayload | None] = OrderedDict()

    def of(self, layout: Layout, payload: memoryview | DeviceMemory) -> MappedPayload:
        """The payload, viewed as tensors. If it is read-only or not aligned, the views are of a copy."""
        if isinstance(payload, DeviceMemory):
            views_there = payload.views(layout)
            if not isinstance(payload.kept, MappedPayload):
                payload.kept = MappedPayload(views_there)
            return payload.kept
        address = address_of(payload)
        if payload.readonly or address % ALIGNMENT:
            # torch has no read-only tensors, and its kernels are fastest on memory aligned as its own allocator does.
            return MappedPayload(views(layout, borrowed(address, layout.nbytes).clone()))
        if layout.nbytes >= KEPT_BELOW_NBYTES * len(layout.entries):
            return MappedPayload(views(layout, owning(payload)))
        # Cached only when a payload is seen a second time; the views of a payload that is used once are dropped with
        # the parameters. Cached views hold the memory, so the key cannot be reused for other memory.
        key = address, layout.digest
        again = key in self._kept
        found = self._kept.pop(key, None) or MappedPayload(views(layout, owning(payload)))
        self._kept[key] = found if again else None
        if len(self._kept) > KEPT_PAYLOADS:
            self._kept.popitem(last=False)
        return found

    def clear(self) -> None:
        """Keep no views any more."""
        self._kept.clear()
