"""Applying weights to a destination, in two phases: `Target.stage` validates all, `Target.swap` changes all.

`look_at` says what a destination is now: its tensors in the layout's order, how they share memory, and what a swap does
to each of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from operator import is_

import torch
from torch import Tensor, nn

from weightsync.errors import ConfigurationError, LayoutError, ProtocolError, WeightSyncError
from weightsync.weights.aliasing import Sharing, agrees, same_bits, sharing_of
from weightsync.weights.extra_state import ExtraState, decode_extras, encode_extras
from weightsync.weights.layout import ALIGNMENT, Layout
from weightsync.weights.packing import digest_of, kept_views, pack, scatter, views
from weightsync.weights.reading import ExtraSlot, Weights, are_formed, layout_of, ordered, read_live, read_weights
from weightsync.weights.tensors import PLAIN, address_of, borrowed, owning

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


class Mode(Enum):
    """How a payload becomes live."""

    #: Into the destination's own tensors. The payload may be written again afterwards.
    COPY = "copy"
    #: A module's parameters on the CPU become views of the payload, which must never be written again; they keep
    #: its memory alive. Buffers, which forwards write, are copied; so is what has no plain memory of its own
    #: (strided, overlapping, on a device). A payload that is read-only or not aligned is copied first, whole. What
    #: shares a parameter's memory without being in the module (a view kept elsewhere) keeps the old weights.
    MAP = "map"


class SwapBroken(WeightSyncError):
    """A swap failed half way and could not be undone: the destination holds neither version."""


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A validated update, beside the live weights. It keeps its payload alive."""

    layout: Layout
    payload: memoryview
    extras: dict[str, ExtraState]
    #: The destination that it was validated against.
    live: Live


class Target:
    """A destination for updates: a module, a TensorDict or a dict of tensors, flat or nested.

    Its tensors are read anew at each step, so that one replaced by hand is neither missed nor written in vain.
    Parameters keep their identity; in-place writes and new memory both move autograd's version counters, so that a
    backward through a graph of the old weights raises. Not for use by two threads at once.

    Args:
        destination: what is to be overwritten. A LoRA module is not merged: it is served as it is.
        mode: see `Mode`.

    Raises:
        ConfigurationError: the destination, or a value in it, is of an unsupported type, or it makes its tensors anew
            whenever it is read.
        LayoutError: a tensor in it cannot be received (quantised, sparse, uninitialised, freed ...), or a module in it
            keeps state elsewhere.
    """

    #: Of how many payloads the views may be kept (mode MAP), for when they come round again; slots do.
    KEPT_PAYLOADS = 4

    def __init__(self, destination: object, mode: Mode = Mode.COPY) -> None:
        self.destination = destination
        self.mode = mode
        self._live = look_at(destination)
        if not isinstance(destination, nn.Module):
            refuse_fleeting(destination, self._live)
        self._mapped: OrderedDict[tuple[int, Layout], list[Tensor] | None] = OrderedDict()

    @property
    def layout(self) -> Layout:
        """The layout of the destination as it is now."""
        return self._look().layout

    @property
    def demanded(self) -> Layout | None:
        """The layout that updates must have."""
        return self.layout

    def stage(self, layout: Layout, payload: memoryview, extras: bytes = b"") -> Staged:
        """Validate an update in full. Nothing is changed, whatever is raised.

        Args:
            layout: of the update.
            payload: the flat buffer, of exactly ``layout.nbytes`` bytes; not to be written until the swap, nor ever
                after it in mode MAP.
            extras: the encoded extra state.

        Raises:
            LayoutError: names, shapes, dtypes or modules with extra state differ from the destination's, or the
                values of tied tensors differ from one another, or a tensor of the destination cannot be written.
            ProtocolError: payload or extras are not what the layout says.
        """
        decoded = self._decoded(layout, payload, extras)
        return Staged(layout, payload, decoded, self._validated(layout, payload))

    def swap(self, staged: Staged) -> None:
        """Make all of a staged update live: extra state first, which is put back if anything fails.

        Raises:
            LayoutError: the destination has changed since the update was staged (by hand, or in a hook of its own)
                and does not fit it any more; nothing is changed.
            SwapBroken: it failed half way and could not be undone.
            Exception: what a module's own `set_extra_state` raised; nothing is changed.
        """
        live = self._current(staged)
        undo = _Undo()
        try:
            for module, value in staged.extras.items():
                undo.set(module, live.weights.slots[module], value)
            if staged.extras:
                live = self._current(staged)
            given = self._map(live, staged, undo)
        except BaseException as error:
            undo.all(error)
            raise
        try:
            mapped = live.mappable if given else {}
            scatter(live.layout, live.tensors, live.copied(mapped), address_of(staged.payload))
        except BaseException as error:
            raise SwapBroken(f"The swap failed while tensors were copied: {error!r}.") from error
        if given:
            live = replace(live, places=places_of(live.tensors), given=given)
        self._live = live

    def apply(self, weights: object) -> None:
        """Stage and swap weights at hand, through a buffer of our own, so that they may alias the destination.

        Raises:
            ConfigurationError: the weights, or a value in them, are of an unsupported type.
            LayoutError: they do not fit, or a tensor in them cannot be sent; nothing is changed.
        """
        found = read_weights(weights)
        layout = layout_of(found, self._live.layout)
        payload = torch.empty(layout.nbytes, dtype=torch.uint8).numpy().data
        pack(found, layout, payload)
        self.swap(self.stage(layout, payload, encode_extras(found.extras())))

    def digest(self) -> bytes:
        """The digest of what is live now, as if packed: equal to that of the update, if it is served whole."""
        live = self._look()
        return digest_of(live.weights, live.layout, encode_extras(live.weights.extras()))

    def release(self) -> None:
        """Forget the views kept of payloads; those that are live stay."""
        self._mapped.clear()

    @staticmethod
    def _decoded(layout: Layout, payload: memoryview, extras: bytes) -> dict[str, ExtraState]:
        """The extra state of an update that is what its layout says."""
        if payload.nbytes != layout.nbytes or not payload.c_contiguous:
            raise ProtocolError(f"A payload of {payload.nbytes} bytes came for {layout!r}.")
        decoded = decode_extras(extras)
        if tuple(sorted(decoded)) != layout.extras:
            raise ProtocolError(f"Extra state came for {sorted(decoded)}, but the layout names {list(layout.extras)}.")
        return decoded

    def _look(self) -> Live:
        self._live = look_at(self.destination, self._live)
        return self._live

    def _validated(self, layout: Layout, payload: memoryview) -> Live:
        live = self._look()
        difference = live.layout.difference(layout)
        if difference is not None:
            raise difference
        live.refuse_unwritable()
        if live.sharing.ties or live.sharing.overlaps:
            with torch.inference_mode():
                live.refuse_disagreement(kept_views(live.layout, address_of(payload)))
        return live

    def _current(self, staged: Staged) -> Live:
        """The destination, validated again if it is no longer what it was."""
        return look_again(self.destination, staged.live) or self._validated(staged.layout, staged.payload)

    def _map(self, live: Live, staged: Staged, undo: _Undo) -> list[Tensor] | None:
        """Point parameters at the payload; gives the memory they have now, or None if none was to be mapped."""
        if self.mode is Mode.COPY or not live.mappable:
            return None
        parameters = [live.tensors[index] for index in live.mappable]
        # Out of a caller's inference mode, in which a parameter's data may not be replaced by a normal tensor.
        with torch.inference_mode(False), torch.no_grad():
            found = self._views(live.layout, staged.payload)
            given = [found[source] for source in live.mappable.values()]
            undo.remember(parameters, live.given)
            for parameter, data in zip(parameters, given, strict=True):
                parameter.data = data
            torch.autograd.graph.increment_version(parameters)
        return given

    def _views(self, layout: Layout, payload: memoryview) -> list[Tensor]:
        if not _is_mappable(payload):
            return views(layout, borrowed(address_of(payload), layout.nbytes).clone())
        # Kept only at the second sight: what comes once is let go with the parameters. Where views are kept, the key
        # cannot come to mean other memory, since they hold this one.
        key = address_of(payload), layout
        again = key in self._mapped
        found = self._mapped.pop(key, None) or views(layout, owning(payload))
        self._mapped[key] = found if again else None
        if len(self._mapped) > self.KEPT_PAYLOADS:
            self._mapped.popitem(last=False)
        return found


class _Undo:
    """How to go back: parameters' old memory, and modules' old extra state."""

    def __init__(self) -> None:
        self._data: list[tuple[Tensor, Tensor]] = []
        self._extras: list[tuple[str, ExtraSlot, bytes]] = []

    def set(self, module: str, slot: ExtraSlot, value: ExtraState) -> None:
        """Set a module's extra state, remembering a copy of the old one."""
        self._extras.append((module, slot, encode_extras({module: slot.get()})))
        slot.set(value)

    def remember(self, parameters: list[Tensor], given: list[Tensor] | None) -> None:
        """Remember the memory of parameters that are about to get other; `given`: which it is, where that is known."""
        memory = given or [parameter.data for parameter in parameters]
        self._data = list(zip(parameters, memory, strict=True))

    def all(self, cause: BaseException) -> None:
        """Undo everything, or raise SwapBroken."""
        with torch.inference_mode(False), torch.no_grad():
            for parameter, data in self._data:
                parameter.data = data
        for module, slot, before in reversed(self._extras):
            try:
                _put_back(module, slot, before)
            except Exception as error:  # noqa: BLE001 - a user's hook may raise anything
                message = f"After {cause!r} the extra state of '{module}' could not be put back: {error!r}."
                raise SwapBroken(message) from cause


def _put_back(module: str, slot: ExtraSlot, before: bytes) -> None:
    # A hook that refused without changing anything need not accept its own old state.
    if encode_extras({module: slot.get()}) != before:
        slot.set(decode_extras(before)[module])


def _is_mappable(payload: memoryview) -> bool:
    # torch has no read-only tensors, and its kernels are fastest on memory aligned as its own.
    return not payload.readonly and address_of(payload) % ALIGNMENT == 0
