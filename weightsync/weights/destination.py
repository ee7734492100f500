"""The plan of a destination: its tensors in the layout's order, how they share memory, and what a swap does to each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import is_

import torch
from torch import Tensor, nn

from weightsync.errors import ConfigurationError, LayoutError
from weightsync.weights.aliasing import Sharing, agrees, mappable, same_bits, shared_with, sharing_of
from weightsync.weights.device.base import Device
from weightsync.weights.device.registry import devices_of
from weightsync.weights.layout import Layout
from weightsync.weights.reading import Weights, layout_of, ordered, read_live
from weightsync.weights.tensors import PLAIN, Form, why_unsupported

Read = Callable[[object], Weights]


class Mapped:
    """A payload as the memory of mapped parameters."""

    def __init__(self, views: list[Tensor]) -> None:
        self.views = views
        self._family: object = None
        self.memory: list[Tensor] = []
        #: The tensors that are copied beside the mapped ones.
        self.copied: Sequence[int] = ()
        self._form: Form | None = None

    def prepare(self, plan: DestinationPlan) -> None:
        """Choose the parameters' memory."""
        if self._family is not plan.family:
            self._family, self._form = plan.family, None
            self.memory = [self.views[source] for source in plan.mappable.values()]
            self.copied = [index for index in plan.copied() if index not in plan.mappable]

    def form(self, plan: DestinationPlan) -> Form:
        """What the destination's tensors are known by, once the parameters have that memory."""
        if self._form is None:
            self._form = Form(plan.weights.tensors.values())
        return self._form


@dataclass(frozen=True, slots=True, eq=False)
class DestinationPlan:
    """The tensors of a destination, and how a swap changes them.

    Attributes:
        weights: the weights that were read, with the owners of the extra state.
        layout: their layout.
        tensors: in the layout's order.
        form: what the weights' tensors, in the order in which they were read, are known by.
        sharing: which tensors share memory.
        mappable: parameters that may become views of other memory, each with the index of the entry that it is to
            view: its own, or that of the first parameter it is tied to.
        devices: the devices whose kernels read or write the tensors; empty: they are on the host.
        mapped: the memory of the mapped parameters, if a swap has mapped them.
        family: the same for all plans of tensors that have not changed but by swaps.
    """

    weights: Weights
    layout: Layout
    tensors: list[Tensor]
    form: Form
    sharing: Sharing
    mappable: dict[int, int]
    devices: tuple[Device, ...] = ()
    mapped: Mapped | None = None
    family: object = field(default_factory=object)

    def copied(self) -> Sequence[int]:
        """The tensors to copy if none is mapped; tied tensors are copied once."""
        if not self.sharing.ties:
            return range(len(self.tensors))
        twins = {index for tie in self.sharing.ties for index in tie[1:]}
        return [index for index in range(len(self.tensors)) if index not in twins]

    def refuse_unwritable(self) -> None:
        """Raise LayoutError for a tensor in which several elements share one place in memory."""
        for index in self.sharing.expanded:
            name = self.layout.entries[index].name
            raise LayoutError(
                f"'{name}' of the destination is expanded: several of its elements share one place in memory, so it "
                "cannot be written. Replace it by its .clone().",
                mismatched={name: "expanded"},
            )

    def refuse_disagreement(self, values: list[Tensor]) -> None:
        """Raise LayoutError if tensors that share memory would get different values."""
        for tie in self.sharing.ties:
            for twin in tie[1:]:
                if not same_bits(values[tie[0]], values[twin]):
                    self._disagree((tie[0], twin), "are tied")
        for overlap in self.sharing.overlaps:
            if not agrees([self.tensors[index] for index in overlap], [values[index] for index in overlap]):
                self._disagree(overlap, "share memory")

    def _disagree(self, indices: Iterable[int], how: str) -> None:
        names = [self.layout.entries[index].name for index in indices]
        listed = ", ".join(f"'{name}'" for name in names)
        raise LayoutError(
            f"{listed} {how} in the destination, but their values differ in the weights.",
            mismatched=dict.fromkeys(names, f"{how} in the destination, with different values"),
        )


def plan_for(destination: object, before: DestinationPlan | None = None, read: Read = read_live) -> DestinationPlan:
    """Read the destination and return its plan, which is `before` if its tensors and their places are unchanged.

    Raises:
        ConfigurationError: the destination, or a value in it, is of an unsupported type.
        LayoutError: a tensor in it cannot be written (quantised, sparse, uninitialised, freed ...) or shares memory
            with one that is not read, or a module in it keeps state elsewhere.
    """
    weights = read(destination)
    same = if_unchanged(weights, before) if before else None
    if same is not None:
        return same
    # Checked tensor by tensor, because the fast path does not notice meta tensors, where writing has no effect.
    layout = layout_of(weights)
    if before and before.layout == layout:
        layout = before.layout
    tensors = ordered(weights, layout)
    sharing = sharing_of(tensors)
    _refuse_raising(layout, tensors, sharing)
    _refuse_shared_with_others(weights, layout, tensors)
    may_be_mapped = mappable(tensors, sharing) if isinstance(destination, nn.Module) else {}
    form = Form(weights.tensors.values())
    return DestinationPlan(weights, layout, tensors, form, sharing, may_be_mapped, devices_of(tensors))


def if_unchanged(weights: Weights, before: DestinationPlan) -> DestinationPlan | None:
    """The plan before, of these weights; None: a tensor, or its place, is another."""
    known, found = before.weights.tensors, weights.tensors
    same = list(found) == list(known) and weights.slots.keys() == before.weights.slots.keys()
    # A storage that was freed or shrunk is noticed too, because its address changes.
    if same and all(map(is_, found.values(), known.values())) and before.form.fits(found.values()):
        return replace(before, weights=weights) if weights.slots else before
    return None


def refuse_temporary_tensors(destination: object, plan: DestinationPlan, read: Read = read_live) -> None:
    """Raise ConfigurationError if the destination creates new tensors on each read, so that writes would be lost."""
    tensors = ordered(read(destination), plan.layout)
    for entry, tensor, before in zip(plan.layout.entries, tensors, plan.tensors, strict=True):
        if tensor.data_ptr() != before.data_ptr():
            raise ConfigurationError(
                f"The {type(destination).__name__} creates a new tensor for '{entry.name}' on each read, so weights "
                "written into it would be lost: use a dict of tensors."
            )


def _refuse_raising(layout: Layout, tensors: list[Tensor], sharing: Sharing) -> None:
    """Raise LayoutError for a tensor of a subclass, or a lazy conjugate, to which its own values cannot be written."""
    for index, tensor in enumerate(tensors):
        usual = type(tensor) in PLAIN and not tensor.is_conj() and not tensor.is_neg()
        if usual or index in sharing.expanded:
            continue
        name = layout.entries[index].name
        try:
            with torch.inference_mode():
                torch._foreach_copy_([tensor], [tensor.detach().clone()])
        except Exception as error:
            kind = "lazily conjugated or negated tensor" if type(tensor) in PLAIN else type(tensor).__name__
            why = f"is a {kind}, which cannot be written ({error!r})"
            raise LayoutError(f"'{name}' of the destination {why}.", mismatched={name: why}) from error


def _refuse_shared_with_others(weights: Weights, layout: Layout, tensors: list[Tensor]) -> None:
    """Raise LayoutError for a tensor that shares memory with one that was not chosen: that would change too."""
    others = {name: tensor for name, tensor in weights.left_out.items() if not why_unsupported(tensor)}
    found = shared_with(tensors, list(others.values())) if others else None
    if found is not None:
        name, other = layout.entries[found[0]].name, list(others)[found[1]]
        raise LayoutError(
            f"'{name}' of the destination shares memory with '{other}', which names= leaves out and which would change "
            f"too: add '{other}' to names= on both sides.",
            missing=[other],
        )
