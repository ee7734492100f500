"""Checks of a destination: which of its tensors cannot be written, or not without changing something else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from weightsync.errors import ConfigurationError, LayoutError
from weightsync.weights.aliasing import Sharing, agrees, same_bits, shared_with
from weightsync.weights.device.base import DeviceMemory
from weightsync.weights.extra_state import ExtraState, encode_extras
from weightsync.weights.layout import Layout, extra_state_name
from weightsync.weights.packing import kept_views
from weightsync.weights.reading import Weights, ordered
from weightsync.weights.tensors import PLAIN, address_of, why_unsupported

#: Reads the tensors of a destination.
Read = Callable[[object], Weights]


class FunctionalCallError(LayoutError):
    """Other tensors stand in for a module's parameters at the moment, as in `torch.func.functional_call`."""


def refuse_functional_call(last_read: Weights, weights: Weights, destination: object) -> None:
    """Raise FunctionalCallError if parameters of a module that were read before are plain tensors now.

    A module does not accept a plain tensor as a parameter, so the parameters will come back. Weights written to the
    plain tensors would then be lost. A parameter that has become a buffer of the module will not come back.
    """
    if not isinstance(destination, nn.Module):
        return
    for name, tensor in last_read.tensors.items():
        current = weights.tensors.get(name)
        replaced = isinstance(tensor, nn.Parameter) and current is not None and not isinstance(current, nn.Parameter)
        if replaced and not _is_buffer(destination, name):
            raise FunctionalCallError(
                f"'{name}' of the destination is not its parameter now, but another tensor "
                "(torch.func.functional_call): nothing was written there.",
                mismatched={name: "is another tensor now"},
            )


def _is_buffer(root: nn.Module, name: str) -> bool:
    owner, _, own = name.rpartition(".")
    modules = root.named_modules(remove_duplicate=False)
    return any(found == owner and own in module._buffers for found, module in modules)


def outside_functional_call(read: Read, last_read: Weights) -> Read:
    """`read`, which also raises FunctionalCallError if parameters that were read before are plain tensors now."""

    def reading(destination: object) -> Weights:
        weights = read(destination)
        refuse_functional_call(last_read, weights, destination)
        return weights

    return reading


def expanded(layout: Layout, index: int) -> LayoutError:
    """The error for a tensor in which several elements share one place in memory."""
    name = layout.entries[index].name
    return LayoutError(
        f"'{name}' of the destination is expanded: several of its elements share one place in memory, so it cannot "
        "be written. Replace it by its .clone().",
        mismatched={name: "expanded"},
    )


def refuse_disagreement(
    layout: Layout, sharing: Sharing, tensors: Sequence[Tensor], payload: memoryview | DeviceMemory
) -> None:
    """Raise LayoutError if tensors that share memory would get different values."""
    with torch.inference_mode():
        if isinstance(payload, DeviceMemory):
            _refuse_different(layout, sharing, tensors, payload.views(layout))
        else:
            _refuse_different(layout, sharing, tensors, kept_views(layout, address_of(payload)))


def _refuse_different(layout: Layout, sharing: Sharing, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tie in sharing.ties:
        for twin in tie[1:]:
            if not same_bits(values[tie[0]], values[twin]):
                raise _disagreement_error(layout, (tie[0], twin), "are tied")
    for overlap in sharing.overlaps:
        if not agrees([tensors[index] for index in overlap], [values[index] for index in overlap]):
            raise _disagreement_error(layout, overlap, "share memory")


def _disagreement_error(layout: Layout, indices: Iterable[int], how: str) -> LayoutError:
    names = [layout.entries[index].name for index in indices]
    listed = ", ".join(f"'{name}'" for name in names)
    return LayoutError(
        f"{listed} {how} in the destination, but their values differ in the weights: have both models share that "
        "memory, or neither.",
        mismatched=dict.fromkeys(names, f"{how} in the destination, with different values"),
    )


def refuse_different_extras(weights: Weights, extras: Mapping[str, ExtraState]) -> None:
    """Raise LayoutError if a module of the destination that has several names would get different extra state."""
    owners: dict[object, str] = {}
    for name, value in extras.items():
        first = owners.setdefault(weights.slots[name].get, name)  # bound methods of one module are equal
        if first != name and encode_extras({"": value}) != encode_extras({"": extras[first]}):
            pair = [extra_state_name(first), extra_state_name(name)]
            raise LayoutError(
                f"'{pair[0]}' and '{pair[1]}' belong to one module in the destination, but differ in the weights: have "
                "both models use one module there, or two.",
                mismatched=dict.fromkeys(pair, "belongs to one module in the destination, with different values"),
            )


def refuse_temporary(destination: object, layout: Layout, tensors: Sequence[Tensor], read: Read) -> None:
    """Raise ConfigurationError if the destination creates new tensors on each read, so that writes would be lost."""
    for entry, tensor, before in zip(layout.entries, ordered(read(destination), layout), tensors, strict=True):
        if tensor.data_ptr() != before.data_ptr():
            raise ConfigurationError(
                f"The {type(destination).__name__} creates a new tensor for '{entry.name}' on each read, so weights "
                "written into it would be lost: use a dict of tensors."
            )


def refuse_raising(layout: Layout, tensors: list[Tensor], sharing: Sharing) -> None:
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


def refuse_shared_with_others(weights: Weights, layout: Layout, tensors: list[Tensor]) -> None:
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
