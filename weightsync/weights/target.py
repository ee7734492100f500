"""Applying weights to a destination in two phases: `Target.stage` validates them, `Target.swap` makes them live.

`plan_for` describes a destination: its tensors in the layout's order, how they share memory, what a swap does to each.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Container, Iterable, Sequence
from enum import Enum
from operator import is_

import torch
from msgspec import Struct, field
from msgspec.structs import replace
from torch import Tensor, nn

from weightsync.errors import LayoutError, ProtocolError, WeightSyncError
from weightsync.weights import destination_checks as checks
from weightsync.weights.aliasing import Sharing, mappable, sharing_of
from weightsync.weights.device.base import Device, DeviceMemory, Waits
from weightsync.weights.device.captures import CAPTURED, must_not_move
from weightsync.weights.device.registry import device_of, devices_of
from weightsync.weights.device.transfer import copy_out, scatter_onto
from weightsync.weights.extra_state import ExtraState, decode_extras, decode_extras_of, encode_extras
from weightsync.weights.layout import Layout
from weightsync.weights.mapped import MappedPayload, MappedPayloads
from weightsync.weights.meta_device import unshare
from weightsync.weights.packing import Pieces, digest_of, movable, pack, scatter, uncompiled
from weightsync.weights.reading import ExtraSlot, Weights, layout_of, ordered, read_live, read_weights
from weightsync.weights.tensors import Form, address_of, count_writes, on_cpu, past_dispatch_modes, past_modes, set_data

logger = logging.getLogger("weightsync")


class DestinationPlan(Struct, frozen=True, eq=False):
    """The tensors of a destination, and how a swap changes them.

    Attributes:
        weights: the weights that were read, with the owners of the extra state.
        layout: their layout, in the orders in which updates have them.
        tensors: in the layout's order.
        form: stands for the form of the weights' tensors, in the order in which they were read.
        sharing: which tensors share memory.
        mappable: parameters that may become views of other memory, each with the index of the entry that it is to
            view: its own, or that of the first parameter it is tied to.
        parameters: the mappable ones, in their order.
        devices: the devices whose kernels read or write the tensors; empty if they are on the host.
        mapped: the memory of the mapped parameters, if a swap has mapped them.
        family: the same for all plans of tensors that have not changed but by swaps.
    """

    weights: Weights
    layout: Layout
    tensors: list[Tensor]
    form: Form
    sharing: Sharing
    mappable: dict[int, int]
    parameters: list[Tensor]
    devices: tuple[Waits, ...] = ()
    mapped: MappedPayload | None = None
    family: object = field(default_factory=object)

    def copied(self) -> Sequence[int]:
        """The tensors to copy if none is mapped; tied tensors are copied once."""
        if not self.sharing.ties:
            return range(len(self.tensors))
        twins = {index for tie in self.sharing.ties for index in tie[1:]}
        return [index for index in range(len(self.tensors)) if index not in twins]

    def moved(self, form: Form, mapped: MappedPayload | None = None) -> DestinationPlan:
        """The plan once parameters have other memory, of this form: that of ``mapped``, or their own."""
        return replace(self, form=form, mapped=mapped)


def plan_for(
    destination: object, previous: DestinationPlan | None = None, read: checks.Read = read_live
) -> DestinationPlan:
    """Read the destination and return its plan, which is `previous` if its tensors and their places are unchanged.

    Raises:
        ConfigurationError: the destination, or a value in it, is of an unsupported type.
        LayoutError: a tensor in it cannot be written (quantised, sparse, uninitialised, freed ...) or shares memory
            with one that is not read, or a module in it keeps state elsewhere.
    """
    weights = read(destination)
    if previous and (unchanged := _plan_if_unchanged(weights, previous)) is not None:
        return unchanged
    # Checked tensor by tensor, because the fast path does not notice meta tensors, where writing has no effect.
    layout = layout_of(weights)
    if previous and previous.layout.fits(layout):
        layout = previous.layout
    tensors = ordered(weights, layout)
    sharing = sharing_of(tensors)
    checks.refuse_raising(layout, tensors, sharing)
    checks.refuse_shared_with_others(weights, layout, tensors)
    return _plan_for_layout(destination, weights, layout, sharing)


def _plan_for_layout(destination: object, weights: Weights, layout: Layout, sharing: Sharing) -> DestinationPlan:
    """The plan for updates of a layout: its orders say which parameters may be mapped."""
    tensors = ordered(weights, layout)
    may_be_mapped = mappable(layout, tensors, sharing) if isinstance(destination, nn.Module) else {}
    form, parameters = Form(weights.tensors.values(), sized=True), [tensors[index] for index in may_be_mapped]
    return DestinationPlan(weights, layout, tensors, form, sharing, may_be_mapped, parameters, devices_of(tensors))


def _plan_if_unchanged(weights: Weights, previous: DestinationPlan) -> DestinationPlan | None:
    was, now = previous.weights, weights.tensors
    same = list(now) == list(was.tensors) and weights.slots.keys() == was.slots.keys() and weights.beside == was.beside
    # A storage that was freed or shrunk is noticed too, even where its address is the same.
    if same and all(map(is_, now.values(), was.tensors.values())) and previous.form.fits(now.values()):
        return replace(previous, weights=weights) if weights.slots else previous
    return None


class Mode(Enum):
    """How a payload becomes live."""

    #: It is copied into the destination's own tensors. The payload may be overwritten afterwards.
    COPY = "copy"
    #: A module's parameters on the CPU become views of the payload. They keep its memory alive, and it must never be
    #: written again. Buffers, which forward passes write, are copied, and so are parameters that lie in another order
    #: than they were sent in, with gaps, or overlap. A payload that is read-only or not aligned is copied first. A view
    #: of a parameter that is kept outside the module keeps the old weights.
    MAP = "map"
    #: As MAP, and parameters on a device become views of a slot on that device. A model that torch has compiled, or
    #: with an RNN, is copied into; so is every model once the process captures a graph, which keeps addresses.
    MAP_ON_DEVICE = "map_on_device"


class SwapBroken(WeightSyncError):
    """A swap failed half way and could not be undone: the destination holds a mix of two versions."""


class Staged(Struct, frozen=True, eq=False):
    """A validated update that is not live yet. It keeps its payload alive."""

    layout: Layout
    payload: memoryview | DeviceMemory
    extras: dict[str, ExtraState]
    #: The plan of the destination that it was validated against.
    plan: DestinationPlan
    #: Whether the payload lies in a slot, which later ones will lie in too.
    in_slot: bool = False
    #: The payload's bytes in another mapping, which is pinned for copies to a device; None: there is none.
    pinned: memoryview | None = None


class Target:
    """A destination for updates: a module, a TensorDict or a dict of tensors, flat or nested.

    Its tensors are read again for each update, so a tensor that the user has replaced is noticed. Parameters keep their
    identity. Both in-place writes and new memory bump autograd's version counters, so a backward pass through a graph
    of the old weights raises. Not thread-safe.

    Args:
        destination: the module, TensorDict or dict to overwrite. A LoRA module is not merged, but served as it is.

    Raises:
        ConfigurationError: it, or a value in it, is of an unsupported type, or it creates new tensors on each read.
        LayoutError: a tensor in it cannot be written (quantised, sparse, uninitialised, freed ...), or a module in it
            keeps state elsewhere.
    """

    def __init__(self, destination: object, mode: Mode = Mode.COPY, read: checks.Read = read_live) -> None:
        self.destination = destination
        self.mode = mode
        #: Whether a swap is refused while the module has other tensors in the places of its parameters.
        self.refuses_functional_calls = False
        self._read = read
        self._plan = plan_for(destination, None, read)
        if not isinstance(destination, nn.Module):
            checks.refuse_temporary(destination, self._plan.layout, self._plan.tensors, read)
        self._mapped = MappedPayloads()
        #: The plan for copying into the tensors, and the form and the number of threads that it holds for.
        self._planned: tuple[Form, Pieces] | None = None
        self._threads = 0
        #: The memory that parameters were mapped to last, where tensors may lie that a later swap copies into.
        self._held: MappedPayload | None = None
        #: The devices whose kernels may read a slot through parameters, which may be elsewhere by now.
        self._readers: tuple[Waits, ...] = ()
        #: Held while tensors are moved or written.
        self._moving = threading.RLock()
        #: Whether parameters may move to a slot on a device; None: not determined yet.
        self._movable: bool | None = None

    @property
    def devices(self) -> bytes:
        """The devices on which it can use slots, as a Hello names them; empty: its tensors are on the host."""
        device = device_of(self._plan.tensors)
        return b"" if device is None else b"".join(device.opens())

    @property
    def device(self) -> Device | None:
        """The one device that its tensors are on; None: they are on the host, or in several places."""
        return device_of(self._plan.tensors)

    @property
    def layout(self) -> Layout:
        """The current layout of the destination."""
        return self._refreshed_plan().layout

    @property
    def demanded(self) -> Layout | None:
        """The layout that updates must have."""
        return self.layout

    def stage(
        self, layout: Layout, payload: memoryview | DeviceMemory, extras: bytes = b"", in_slot: bool = False
    ) -> Staged:
        """Validate an update against the destination as it was read last. Nothing is changed, even if this raises.

        That is read again if the update does not fit it, and once more by `swap`.

        Args:
            payload: the flat buffer, of exactly ``layout.nbytes`` bytes, or on a device at least of that size. It must
                not be written before the swap, and in mode MAP never again.
            extras: the encoded extra state.
            in_slot: whether the payload lies in a slot, which later ones will lie in too.

        Raises:
            LayoutError: names, shapes, dtypes or modules with extra state differ from the destination's, or the
                values of tied tensors differ from each other, or a tensor of the destination cannot be written.
            ProtocolError: payload or extras do not match the layout.
        """
        decoded, plan = self._decoded(layout, payload, extras), self._plan
        if plan.layout is not layout and plan.layout != layout:
            fits = plan.layout.fits(layout) and plan.form.fits(plan.weights.tensors.values())
            plan = plan if fits else self._refreshed_plan()
        try:
            plan, read = self._validate(plan, layout, payload), None
        except LayoutError:  # its tensors may no longer be expanded, or share memory, as when they were read
            read = checks.outside_functional_call(self._read, plan.weights)
        plan = self._validate(plan_for(self.destination, plan, read), layout, payload) if read else plan
        return Staged(layout, payload, decoded, plan, in_slot)

    def swap(self, staged: Staged) -> None:
        """Make a staged update live: first the extra state, which is restored if anything fails, then the tensors.

        On a device, this waits for all kernels that read the old weights, and until the new ones are whole.

        Raises:
            LayoutError: the destination has changed since the update was staged (by the user, or in its own hook) and
                the update no longer fits it, or has other tensors for now (`FunctionalCallError`); nothing is changed.
            SwapBroken: the swap failed half way and could not be undone.
            Exception: whatever a module's own `set_extra_state` raised; nothing is changed.
        """
        with self._moving:
            self._swap(staged)
            torch.clear_autocast_cache()  # all threads share it: an open `torch.autocast` block keeps its casts there

    def _swap(self, staged: Staged) -> None:
        plan = self._revalidate(staged)
        if plan.layout is not self._plan.layout and self._plan.mappable and self.mode is not Mode.COPY:
            self._plan = plan
            self.unshare()  # parameters that were to be mapped may be copied into, since their orders differ
            plan = self._plan
        undo = _Undo()
        try:
            if staged.extras:
                checks.refuse_different_extras(plan.weights, staged.extras)
                for module, value in staged.extras.items():
                    undo.set(module, plan.weights.slots[module], value)
                plan = self._revalidate(staged)
            for device in {*plan.devices, *self._readers}:
                device.synchronize()
            mapped = self._map(plan, staged, undo)
            if self._held is not None and (mapped is None or plan.mapped is None):
                plan = self._move_out(plan, self._held, plan.mappable if mapped else ())
        except BaseException as error:
            undo.all(error)
            raise
        try:
            with plan.form.reading(), past_dispatch_modes():  # one that raises would leave a mix of two versions
                if not mapped:
                    _copy_out(plan, staged, plan.copied(), self._pieces_of(plan), plan.form)
                elif mapped.copied and mapped.copies_little and not plan.devices:
                    mapped.copy_beside(plan.tensors)
                elif mapped.copied:
                    _copy_out(plan, staged, mapped.copied)
        except BaseException as error:
            raise SwapBroken(f"The swap failed while tensors were copied: {error!r}.") from error
        plan = plan.moved(mapped.form(plan.weights), mapped) if mapped else plan
        self._readers, self._plan, self._held = mapped.devices if mapped else (), plan, mapped

    @uncompiled
    def apply(self, weights: object) -> None:
        """Stage and swap the given weights through a separate buffer, so that they may alias the destination.

        Raises:
            ConfigurationError: the weights, or a value in them, are of an unsupported type.
            LayoutError: they do not fit, or a tensor in them cannot be packed; nothing is changed.
        """
        found = read_weights(weights)
        layout = layout_of(found, self._plan.layout)
        payload = on_cpu(layout.nbytes).numpy().data
        pack(found, layout, payload)
        self.swap(self.stage(layout, payload, encode_extras(found.extras())))

    def digest(self, layout: Layout | None = None) -> bytes:
        """The digest of the live weights as if packed: in this layout, if they fit it, else in the last update's."""
        plan = self._refreshed_plan()
        packed = layout_of(plan.weights, layout or plan.layout)
        return digest_of(plan.weights, packed, encode_extras(plan.weights.extras()))

    def unshare(self) -> None:
        """Have swaps write nothing that other processes see: see `weightsync.weights.meta_device.unshare`."""
        # Where tensors are in several places, all of them are copied.
        mapped = () if self.mode is Mode.COPY or self._plan.devices else self._plan.mappable
        if unshare(tensor for index, tensor in enumerate(self._plan.tensors) if index not in mapped):
            self._refreshed_plan()

    def only_keeps(self, payload: memoryview) -> bool:
        """Whether only the cached views refer to the memory of a mapped payload."""
        return self._mapped.only_keeps(payload)

    def leave(self) -> None:
        """Give mapped parameters memory of their own: slots are written again, and this target no longer follows."""
        with self._moving:
            for device in self._readers:
                device.synchronize()
            self._leave_mapped_memory()

    def leave_device(self) -> None:
        """As `leave`, but only on a device, where other processes see what is written into a slot."""
        if self._plan.devices:
            with self._moving:
                self._leave_mapped_memory()

    @property
    def in_slot(self) -> bool:
        """Whether parameters view a slot on the host. They keep other memory, which nobody else writes to."""
        return not self._plan.devices and self._held is not None and self._held.source is not None

    @staticmethod
    def _decoded(layout: Layout, payload: memoryview | DeviceMemory, extras: bytes) -> dict[str, ExtraState]:
        """Check an update against its layout and decode its extra state."""
        if isinstance(payload, DeviceMemory):
            fits = payload.nbytes >= layout.nbytes
        else:
            fits = payload.nbytes == layout.nbytes and payload.c_contiguous
        if not fits:
            raise ProtocolError(f"A payload of {payload.nbytes} bytes arrived for {layout!r}.")
        return decode_extras_of(layout, extras) if extras or layout.extras else {}

    def _refreshed_plan(self) -> DestinationPlan:
        self._plan = plan_for(self.destination, self._plan, self._read)
        return self._plan

    def _validate(self, plan: DestinationPlan, layout: Layout, payload: memoryview | DeviceMemory) -> DestinationPlan:
        if plan.layout is not layout and plan.layout != layout:
            if (misfit := plan.layout.misfit(layout)) is not None:
                raise misfit
            plan = _plan_for_layout(self.destination, plan.weights, layout, plan.sharing)
        if plan.sharing.expanded:
            raise checks.expanded(plan.layout, plan.sharing.expanded[0])
        if plan.sharing.ties or plan.sharing.overlaps:
            checks.refuse_disagreement(plan.layout, plan.sharing, plan.tensors, payload)
        return plan

    def _revalidate(self, staged: Staged) -> DestinationPlan:
        """The staged plan, or, if the destination has changed since, a new plan after validating the update again."""
        found = self._read(self.destination)
        plan = _plan_if_unchanged(found, staged.plan)
        if plan is None and self.refuses_functional_calls:
            checks.refuse_functional_call(staged.plan.weights, found, self.destination)
        return plan or self._validate(self._refreshed_plan(), staged.layout, staged.payload)

    def _pieces_of(self, plan: DestinationPlan) -> Pieces | None:
        """The plan for copying into the host's tensors, made once and kept while they stay at their addresses."""
        if plan.devices:
            return None
        if self._threads != torch.get_num_threads():
            self._planned, self._threads = None, torch.get_num_threads()
        if self._planned is None or self._planned[0] is not plan.form:
            self._planned = plan.form, Pieces(plan.layout, movable(plan.layout, plan.tensors, least=0))
        return self._planned[1]

    def _map(self, plan: DestinationPlan, staged: Staged, undo: _Undo) -> MappedPayload | None:
        """Point parameters at the payload; return their new memory, or None if there was nothing to map."""
        if self.mode is Mode.COPY or not plan.mappable or not self._may_map(plan, staged.payload):
            return None
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # a parameter's data cannot be replaced by a normal tensor there
                return self._point_at_payload(plan, staged, undo)
        return self._point_at_payload(plan, staged, undo)

    def _point_at_payload(self, plan: DestinationPlan, staged: Staged, undo: _Undo) -> MappedPayload:
        mapped = self._mapped.of(plan.layout, staged.payload, staged.in_slot)
        if mapped.family is not plan.family:
            copied = [index for index in plan.copied() if index not in plan.mappable]
            mapped.prepare(plan.family, plan.mappable.values(), copied, plan.devices)
        undo.remember(plan.parameters, plan.mapped.memory if plan.mapped else None)
        set_data(zip(plan.parameters, mapped.memory, strict=True))
        count_writes(plan.parameters)
        return mapped

    def _leave_mapped_memory(self) -> None:
        """Move all tensors out of mapped memory: those that the destination has now, if it can be read."""
        if self._held is None:
            return
        try:
            read = checks.outside_functional_call(self._read, self._plan.weights)
            plan = plan_for(self.destination, self._plan, read)
        except Exception as error:  # noqa: BLE001 - reading runs the user's hooks
            logger.debug("a destination leaves its slot as it was read before: %r", error)
            self._move_out(self._plan, self._held)  # the next swap reads it again, and looks for what is left there
            return
        self._plan, self._held = self._move_out(plan, self._held), None

    @staticmethod
    def _move_out(plan: DestinationPlan, held: MappedPayload, staying: Container[int] = ()) -> DestinationPlan:
        """The plan, once tensors in mapped memory, except ``staying``, have copies of their own.

        That memory is not theirs to be copied into: the peer writes it again, and on a device other processes read it.
        """
        own = held.copies_of(plan.tensors, plan.sharing, staying)
        for device in plan.devices:
            device.finish()
        with torch.inference_mode(False), torch.no_grad():
            set_data(own)
        return plan.moved(Form(plan.weights.tensors.values(), sized=True))

    def keep_addresses(self) -> None:
        """Give parameters that view a slot permanent memory of their own: a graph of kernels is about to be captured.

        Kernels may still read the slot: it is free once the next version is applied.
        """
        with self._moving:
            if self._movable is not False:
                self._movable = False
                logger.warning(CAPTURED)
            self._leave_mapped_memory()

    def _may_map(self, plan: DestinationPlan, payload: memoryview | DeviceMemory) -> bool:
        """Whether the payload is in the memory in which the parameters are, and they may move there."""
        place = plan.tensors[next(iter(plan.mappable))].device
        if not isinstance(payload, DeviceMemory):
            return not plan.devices and place.type == "cpu"  # a kind of device that torch cannot wait for is in no plan
        if place != payload.flat.device or self.mode is not Mode.MAP_ON_DEVICE or must_not_move(self.destination):
            return False
        if self._movable is None:
            self._movable = not payload.device.watch_captures(self)
            if not self._movable:
                logger.warning(CAPTURED)
        return self._movable


class _Undo:
    """The parameters' old memory and the modules' old extra state, to undo a swap."""

    def __init__(self) -> None:
        self._data: Iterable[tuple[Tensor, Tensor]] = ()
        self._extras: list[tuple[str, ExtraSlot, bytes]] = []

    def set(self, module: str, slot: ExtraSlot, value: ExtraState) -> None:
        """Set a module's extra state, remembering a copy of the old one."""
        self._extras.append((module, slot, encode_extras({module: slot.get()})))
        slot.set(value)

    def remember(self, parameters: list[Tensor], memory: list[Tensor] | None) -> None:
        """Remember the memory of parameters before it is replaced; `memory` is that memory, if it is known."""
        memory = memory or [parameter.data for parameter in parameters]
        self._data = zip(parameters, memory, strict=True)

    def all(self, cause: BaseException) -> None:
        """Undo everything, or raise SwapBroken."""
        with past_modes(), past_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
            set_data(self._data)
        for module, slot, encoded in reversed(self._extras):
            try:
                # A hook that raised without changing anything might not accept its own old state.
                if encode_extras({module: slot.get()}) != encoded:
                    slot.set(decode_extras(encoded)[module])
            except BaseException as error:  # noqa: BLE001 - a user's hook may raise anything
                message = f"After {cause!r} the extra state of '{module}' could not be restored: {error!r}."
                raise SwapBroken(message) from cause


def _copy_out(
    plan: DestinationPlan, staged: Staged, chosen: Sequence[int], pieces: Pieces | None = None, form: Form | None = None
) -> None:
    """Copy the chosen entries of a payload into the destination, and wait for it. They are the same for one form."""
    payload = staged.payload
    if isinstance(payload, DeviceMemory):
        copy_out(payload, plan.layout, plan.tensors, chosen, form)
        for device in {payload.device, *plan.devices}:
            device.finish()
    elif plan.devices and (only := device_of(plan.tensors)) is not None and plan.devices == (only,):
        scatter_onto(only, plan.layout, plan.tensors, chosen, staged.pinned or payload, form_key=form)
    else:
        scatter(plan.layout, plan.tensors, chosen, address_of(payload), pieces)
        for device in plan.devices:
            device.synchronize()  # threads that help to copy launch kernels in streams of their own
