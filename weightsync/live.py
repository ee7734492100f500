"""A destination as it is now: its tensors in the layout's order, how they share memory, what a swap does to each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import is_

import torch
from torch import Tensor, nn

from weightsync.errors import ConfigurationError, LayoutError
from weightsync.layout import Layout
from weightsync.sharing import Sharing, agrees, same_bits, sharing_of
from weightsync.tensors import PLAIN
from weightsync.weights import Weights, are_formed, layout_of, ordered, read_live

Places = tuple[list[int], list[tuple[int, ...]]]


@dataclass(frozen=True, slots=True, eq=False)
class Live:
    """The tensors of a destination, and a plan for changing them.

    Attributes:
        weights: what was read: holds the owners of the extra state.
        tensors: in the layout's order.
        places: addresses and strides of the tensors in memory.
        sharing: who shares memory with whom.
        mappable: parameters that may be made views of other memory, with the one whose view they take: their own,
            or that of the first of those they are tied to.
        given: the memory that mapped parameters have, in the order of `mappable`, if it was given by us.
    """

    weights: Weights
    layout: Layout
    tensors: list[Tensor]
    places: Places
    sharing: Sharing
    mappable: dict[int, int]
    given: list[Tensor] | None = None

    def copied(self, mapped: dict[int, int]) -> Sequence[int]:
        """The tensors to copy into where `mapped` are mapped: each memory once."""
        if not mapped and not self.sharing.ties:
            return range(len(self.tensors))
        twins = {index for tie in self.sharing.ties for index in tie[1:]}
        return [index for index in range(len(self.tensors)) if index not in mapped and index not in twins]

    def refuse_unwritable(self) -> None:
        """Raise LayoutError for a tensor with many elements in one place."""
        for index in self.sharing.expanded:
            name = self.layout.entries[index].name
            raise LayoutError(
                f"'{name}' of the destination is expanded, several of its elements are one place in memory, and "
                "cannot be written: .clone() it.",
                mismatched={name: "expanded"},
            )

    def refuse_disagreement(self, values: list[Tensor]) -> None:
        """Raise LayoutError if tensors that share memory are to get different values."""
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


def look_at(destination: object, before: Live | None = None) -> Live:
    """Read the destination; where it still holds the very tensors of `before`, at the very places, that is the plan.

    Raises:
        ConfigurationError: the destination, or a value in it, is of an unsupported type.
        LayoutError: a tensor in it cannot be received (quantised, sparse, uninitialised, freed ...), or a module in it
            keeps state elsewhere.
    """
    weights = read_live(destination)
    same = _again(weights, before) if before else None
    if same is not None:
        return same
    # Tensor by tensor: the quick way does not see that one is on the meta device, where writing does nothing.
    layout = layout_of(weights)
    if before and before.layout == layout:
        layout = before.layout
    tensors = ordered(weights, layout)
    sharing = sharing_of(tensors)
    _refuse_raising(layout, tensors, sharing)
    mappable = _mappable(tensors, sharing) if isinstance(destination, nn.Module) else {}
    return Live(weights, layout, tensors, places_of(tensors), sharing, mappable)


def places_of(tensors: Sequence[Tensor]) -> Places:
    """Where tensors lie in memory: each one's address, and each one's strides."""
    return list(map(Tensor.data_ptr, tensors)), list(map(Tensor.stride, tensors))


def look_again(destination: object, before: Live) -> Live | None:
    """Read the destination once more; None if it no longer holds the very tensors, at the very places."""
    return _again(read_live(destination), before)


def _again(weights: Weights, before: Live) -> Live | None:
    if weights.tensors.keys() != before.weights.tensors.keys() or weights.slots.keys() != before.weights.slots.keys():
        return None
    # The address tells of a storage that was freed or shrunk, too: its memory moves.
    tensors = ordered(weights, before.layout)
    same = all(map(is_, tensors, before.tensors)) and are_formed(tensors, before.layout)
    if same and places_of(tensors) == before.places:
        return replace(before, weights=weights)
    return None


def refuse_fleeting(destination: object, live: Live) -> None:
    """Raise ConfigurationError if the destination makes its tensors anew whenever it is read: nothing would arrive."""
    tensors = ordered(read_live(destination), live.layout)
    for entry, tensor, address in zip(live.layout.entries, tensors, live.places[0], strict=True):
        if tensor.data_ptr() != address:
            raise ConfigurationError(
                f"'{entry.name}' is made anew whenever the {type(destination).__name__} is read, so that weights "
                "written into it would be lost: make it a dict of tensors."
            )


def _refuse_raising(layout: Layout, tensors: list[Tensor], sharing: Sharing) -> None:
    """Raise LayoutError for a subclass's tensor, or a lazy conjugate, that cannot be written: its own values are."""
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


def _mappable(tensors: list[Tensor], sharing: Sharing) -> dict[int, int]:
    shared = {index for overlap in sharing.overlaps for index in overlap}
    able = {index for index, tensor in enumerate(tensors) if index not in shared and _may_share_memory(tensor)}
    sources = {index: index for index in able}
    for tie in sharing.ties:
        for index in tie:
            # All of a tie or none: one that is copied would otherwise part from one that is mapped.
            sources.pop(index, None)
            if able.issuperset(tie):
                sources[index] = tie[0]
    return sources


def _may_share_memory(tensor: Tensor) -> bool:
    # A parameter made in inference mode breaks when it is given normal data.
    plain = type(tensor) is nn.Parameter and tensor.is_cpu and not tensor.is_inference()
    return plain and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
