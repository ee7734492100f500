"""Packs the weights of one sender, version after version: on the host, or on the device that they are on."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol
from weakref import ref

from msgspec import Struct

from weightsync.clock import Stopwatch
from weightsync.engine.delta import VersionPayloads
from weightsync.engine.device_slots import DevicePools, DeviceReaders, flat_of, write_slot
from weightsync.engine.driver import Shield
from weightsync.engine.parts import OutgoingParts
from weightsync.errors import ConfigurationError, LayoutError, TransportError
from weightsync.options import Verify, WireDtype
from weightsync.protocol.codec import MAX_BODY_NBYTES
from weightsync.protocol.messages import Update, WeightsForm
from weightsync.transports.buffers import Buffer, Pool
from weightsync.transports.device import DeviceBuffer
from weightsync.weights.casting import refuse_non_finite, refuse_overflow
from weightsync.weights.device.base import Device
from weightsync.weights.device.registry import backends, device_at, device_of, devices_of
from weightsync.weights.device.transfer import pack_from
from weightsync.weights.extra_state import encode_extras
from weightsync.weights.layout import Layout
from weightsync.weights.packing import pack, pack_digested
from weightsync.weights.reading import Weights, is_module, read_weights, transient_buffers
from weightsync.weights.selection import Selection
from weightsync.weights.send_plan import SendPlan, plan_for
from weightsync.weights.strategy import WeightStrategy
from weightsync.weights.tensors import fake_mode, refusing_fake_mode
from weightsync.weights.threads import LEAST_PART
from weightsync.weights.tree_digest import digest
from weightsync.weights.unpacking import form_of

logger = logging.getLogger("weightsync")

#: The room for names and extra state in an update: a message body, less the other fields.
MAX_NAMES_AND_EXTRAS_NBYTES: Final = MAX_BODY_NBYTES - 2**20


class Readers(DeviceReaders, Protocol):
    """The workers of a sender, and which of the sender's memory they can map."""

    def all_share(self, payload: Buffer, nbytes: int) -> bool:
        """Whether all of them map a buffer with a payload of this size, so that no byte of it travels."""

    def in_parts(
        self, payload: Buffer, nbytes: int, verify: Verify, targets: tuple[int, ...] | None
    ) -> OutgoingParts | None:
        """Prepare to send a payload to the targets in parts while it is packed; None: it is sent whole."""


class _NoWorkers:
    def all_share(self, payload: Buffer, nbytes: int) -> bool:  # noqa: ARG002 - whatever it is
        return False

    def reached(self) -> Sequence[frozenset[bytes]]:
        return ()

    def in_parts(self, *_: object) -> OutgoingParts | None:
        return None


#: No worker: nothing is mapped.
nobody = _NoWorkers()


class BufferHold:
    """Keeps a buffer from being written, by a pin of its own, until this is dropped: an interrupt may lose it."""

    #: Its pin is the id of this object, which the buffer is not to keep.
    buffer: Buffer | None = None

    def release_pin(self) -> None:
        """Keep it no longer."""
        if self.buffer is not None:
            self.buffer.pins.discard(id(self))

    __del__ = release_pin


class Packed(Struct):
    """One version's weights as they are sent."""

    layout: Layout
    buffer: Buffer
    extras: bytes
    #: The digest of the payload and the extra state; empty if it was not computed yet.
    digest: bytes
    #: The type in which the weights were given.
    form: WeightsForm = WeightsForm.FLAT
    #: Which workers compare the digest.
    verify: Verify = Verify.DIGEST
    #: What wider floating tensors were cast to; None if nothing is cast.
    wire_dtype: WireDtype | None = None
    #: Started when extracting them began, and again at the dispatch; None: it is not measured.
    stopwatch: Stopwatch | None = None
    #: Seconds that extracting and packing took.
    pack_s: float = 0.0
    #: The W3C trace context that its updates carry; empty: none.
    trace_context: str = ""
    #: What each worker is sent, where deltas may be sent; None: all are sent the whole payload.
    payloads: VersionPayloads | None = None
    #: Keeps the buffer until it is handed over; None: others keep it.
    hold: BufferHold | None = None

    @property
    def nbytes(self) -> int:
        """Size of the payload in bytes, extra state included."""
        return self.layout.nbytes + len(self.extras)

    def digested(self) -> bytes:
        """The digest; computed now if it was not before."""
        if not self.digest:
            self.digest = digest(self.buffer.view[: self.layout.nbytes], self.extras)
        return self.digest

    def digest_to_send(self, shared: bool) -> bytes:
        """The digest that a worker is to compare; empty if it compares none."""
        if self.verify.compares(shared):
            return self.digest or self.digested()
        return b""


class SentUpdate(Struct, frozen=True):
    """An update as it was sent."""

    update: Update
    #: Whether it leaves out its layout, which the worker knows.
    layout_known: bool
    #: Whether the worker maps its payload.
    shared: bool
    #: The digest that an ack of it must name: of the weights, or of the slot. Empty: neither was sent.
    named: bytes


class Packer:
    """Packs the weights of one sender. The plan is made once for each layout.

    Args:
        verify: what the workers compare.
        wire_dtype: what wider floating tensors are cast to while they are packed; None if nothing is cast.
        selection: which weights are sent; None: all.
        finite_model_id: the model whose weights are refused if they are not finite; None if they are not checked.
        sends_deltas: whether a version may travel as a delta against the one before.
    """

    def __init__(
        self,
        verify: Verify = Verify.AUTO,
        wire_dtype: WireDtype | None = None,
        selection: Selection | None = None,
        finite_model_id: str | None = None,
        sends_deltas: bool = False,
    ) -> None:
        self.sends_deltas = sends_deltas
        self.wire_dtype = wire_dtype
        self._verify = verify
        self._read = read_weights if selection is None else selection.read
        self._finite_model_id = finite_model_id
        self._pool = Pool()
        self._on_devices = DevicePools()
        # Re-entrant: a signal handler may close the sender, or send, while its own thread reserves buffers.
        self._lock = threading.RLock()
        self._plan: SendPlan | None = None

    def layout_of(self, weights: Any) -> Layout:
        """The layout in which weights would be sent, without packing them.

        Raises ConfigurationError, LayoutError: they cannot be sent.
        """
        read, plan = self._read(weights), self._plan
        if plan is None or not plan.fits(read):
            plan = self._plan = plan_for(read, plan, self.wire_dtype)
        return plan.sent

    def reserve(self, readers: Readers | None = None) -> None:
        """Make the slots for weights of the layout that `layout_of` returned last, as far as there is memory.

        There are none for weights in several places. `pack` makes missing ones.

        Args:
            readers: the workers, once they have answered; None: they have not. Until then there are no slots for
                weights on a device, since workers may be able to open them there.
        """
        plan = self._plan
        if plan is None or plan.place is None:
            return
        device, pool = device_at(plan.place), self._pool
        with self._lock, contextlib.suppress(TransportError):
            if device is not None:
                if readers is None:
                    return
                pool = self._on_devices.pool(device, plan.sent.nbytes, readers) or pool
            pool.reserve(plan.sent.nbytes)

    def pack(
        self,
        weights: Any,
        form: WeightsForm | None = None,
        readers: Readers = nobody,
        targets: tuple[int, ...] | None = None,
    ) -> Packed:
        """Copy weights into a buffer that no worker reads. It stays pinned until `release_packed`.

        Args:
            form: the type in which workers get them; None: that of ``weights``.
            readers: what the workers can map. Weights on a device that a worker reaches stay there. Elsewhere, if not
                all workers map the buffer, and they compare a digest, it is computed along with the copy. A large
                payload goes to them in parts while it is packed.
            targets: the ids of the workers that it is for; None: all.

        Raises:
            ConfigurationError, LayoutError: they cannot be sent, or a value is too large for `wire_dtype`.
            NonFiniteError: they are checked, and not finite.
            TransportError: there is not enough memory.
        """
        weights_read = self._read(weights)
        # Before the plan is compared: what makes the extra state is the user's, and may give tensors other memory.
        extras, plan = encode_extras(weights_read.extras()) if weights_read.slots else b"", self._plan
        if plan is None or not plan.fits(weights_read):
            plan = self._plan = plan_for(weights_read, plan, self.wire_dtype)
        layout = plan.sent
        if len(plan.names) + len(extras) > MAX_NAMES_AND_EXTRAS_NBYTES:
            raise _too_large_error(layout, extras)
        device = None
        if plan.place is None:
            device = _common_device(weights_read)
        elif plan.place.type in backends:
            device = device_at(plan.place)
        hold = BufferHold()
        try:  # an interrupt may come as soon as the buffer is pinned
            buffer = self._acquire_buffer(device, layout, readers, hold)
            form = form_of(weights) if form is None else form
            packed = Packed(layout, buffer, extras, b"", form, self._verify, self.wire_dtype, hold=hold)
            if device is None and layout.nbytes <= LEAST_PART:
                _copy(weights_read, packed, readers, plan, None)
            else:
                # A thread or kernel that outlived an interrupted copy could write into a buffer that has been reused.
                with Shield(lambda: None):
                    if device is not None:
                        _copy_from(device, weights_read, packed, readers, plan)
                    else:
                        _copy(weights_read, packed, readers, plan, self._prepare_parts(packed, readers, targets))
            if self.wire_dtype is not None and layout is not plan.layout:
                refuse_overflow(weights_read, layout, flat_of(buffer), self.wire_dtype)
            if self._finite_model_id is not None:
                refuse_non_finite(self._finite_model_id, layout, flat_of(buffer))
            return packed
        except BaseException:
            hold.release_pin()  # now: what is raised may keep this call, and with it the hold
            raise

    def _acquire_buffer(self, device: Device | None, layout: Layout, readers: Readers, hold: BufferHold) -> Buffer:
        """A buffer for a payload of this layout. Only the hold keeps it."""
        with self._lock:
            while True:
                slot = None if device is None else self._on_devices.acquire(device, layout, readers)
                if slot is not None:
                    self._pool.close()  # its buffers were for the first version, sent before any handshake
                hold.buffer = buffer = slot or self._pool.acquire(layout.nbytes)
                buffer.pins.add(id(hold))
                if len(buffer.pins) == 1:
                    return buffer
                hold.release_pin()  # a signal handler has sent meanwhile, and was given the same buffer

    def _prepare_parts(self, packed: Packed, readers: Readers, targets: tuple[int, ...] | None) -> OutgoingParts | None:
        """The object that sends the payload in parts; None: it is sent whole, as deltas are."""
        if self.sends_deltas:
            return None
        return readers.in_parts(packed.buffer, packed.layout.nbytes, packed.verify, targets)

    def release_packed(self, packed: Packed) -> None:
        """Release our pin: the readers of the packed weights have pinned them."""
        packed.buffer.pins.discard(id(packed.hold))

    def close(self) -> None:
        """Release all buffers. Workers keep what they map."""
        with self._lock:
            self._pool.close()
            self._on_devices.close()


def _common_device(weights: Weights) -> Device | None:
    """The one device of weights that are in several places, or not plain tensors; None: the host copies them.

    In that case, wait for the kernels of the current streams first: threads that help to copy use streams of their own.
    """
    tensors = weights.tensors.values()
    device = device_of(tensors)
    for used_device in devices_of(tensors) if device is None else ():
        used_device.finish()
    return device


def _copy(weights: Weights, packed: Packed, readers: Readers, plan: SendPlan, parts: OutgoingParts | None) -> None:
    """Copy weights into their buffer in the host's memory, and send it in parts meanwhile."""
    layout, view = packed.layout, packed.buffer.view
    on_written = None if parts is None else parts.reach
    if _compared(packed, readers):
        packed.digest = pack_digested(weights, layout, view, packed.extras, plan.pieces(weights), on_written=on_written)
    else:
        pack(weights, layout, view, plan.pieces(weights), on_written=on_written)
    if parts is not None:
        parts.finish()


def _copy_from(device: Device, weights: Weights, packed: Packed, readers: Readers, plan: SendPlan) -> None:
    """Copy weights on a device into their buffer, which may be there too."""
    layout, buffer = packed.layout, packed.buffer
    if isinstance(buffer, DeviceBuffer):
        write_slot(buffer, weights, layout, readers, plan)
        return
    if buffer.segment is not None:
        buffer.segment.pin(partial(device.register, read_only=False))
    pack_from(device, weights, layout, buffer.view, plan)
    if _compared(packed, readers):
        packed.digested()


def _compared(packed: Packed, readers: Readers) -> bool:
    """Whether some worker compares the digest of what is packed."""
    buffer, verify = packed.buffer, packed.verify
    shared = buffer.mappable and verify is Verify.AUTO and readers.all_share(buffer, packed.layout.nbytes)
    return verify.compares(shared)


def _too_large_error(layout: Layout, extras: bytes) -> LayoutError:
    """The error for names and extra state that are too large for a message."""
    nbytes = len(layout.encode()) + len(extras)
    return LayoutError(
        f"The tensors' names and the extra state of {list(layout.extras)} take {nbytes} bytes, but one update carries "
        f"at most {MAX_NAMES_AND_EXTRAS_NBYTES} in addition to the tensors: keep large state in tensors."
    )


class SendingServices(Protocol):
    """A scheme, as far as it says what is sent."""

    @property
    def strategy(self) -> WeightStrategy:
        """How weights are read from a model, and applied by hand."""

    def weights_to_send(self, weights: Any, model_id: str, context: Any = None) -> Any:
        """What is packed and sent for these arguments: a module, a TensorDict or a dict."""

    def published(self, model_id: str, weights: Any) -> None:
        """Called with each version's weights before it is dispatched."""


class SendingDriver(Readers, Protocol):
    """The sender's driver, as far as its weights depend on it."""

    model_id: str
    layout: Layout | None


class OutgoingWeights:
    """Reads, checks and packs the weights of one sender."""

    def __init__(
        self, services: SendingServices, driver: SendingDriver, packer: Packer, context: Callable[[], Any]
    ) -> None:
        self._services = services
        self._strategy = services.strategy
        self._driver = driver
        self._packer = packer
        self._context = context

    def registered_layout(self) -> Layout | None:
        """The layout of the registered model; None if there is no such model yet, or it cannot be sent."""
        try:
            model = self._services.weights_to_send(None, self._driver.model_id, self._context())
            return self._packer.layout_of(model)
        except (ConfigurationError, LayoutError):
            return None  # the first send says why

    def pack(self, weights: Any, targets: tuple[int, ...] | None = None) -> Packed:
        """Pack weights, which are the caller's until `Packer.release_packed`.

        Args:
            targets: the ids of the workers that they are for; None: all.

        Raises:
            ConfigurationError, LayoutError: they cannot be sent, or are not those of the registered model.
            TransportError: there is not enough memory.
        """
        if fake_mode() is not None:
            raise refusing_fake_mode()
        # Only weights that are found on the context need it: otherwise it may have been garbage-collected.
        context = self._context() if weights is None or isinstance(weights, str) else None
        prepared = self._services.weights_to_send(weights, self._driver.model_id, context)
        form = None
        if is_module[ref(type(prepared))]:  # workers get what the strategy would extract
            form = WeightsForm.TENSORDICT if self._strategy.extract_as == "tensordict" else WeightsForm.FLAT
        packed = self._packer.pack(prepared, form, self._driver, targets)
        try:
            if weights is not None:
                self._refuse_other_model(packed.layout)
            self._services.published(self._driver.model_id, prepared)
        except BaseException:
            self._packer.release_packed(packed)
            raise
        return packed

    def _refuse_other_model(self, layout: Layout) -> None:
        """Refuse weights of another model than the registered one: every worker would refuse them.

        Raises LayoutError: their names, shapes or dtypes differ.
        """
        if self._driver.layout is not None and self._driver.layout.fits(layout):
            return
        registered = self.registered_layout()
        if registered is None:  # a model that cannot be sent does not show which weights can
            self._refuse_other_dtypes(layout)
            return
        text = f"The weights are not those of the model that is registered for {self._driver.model_id!r}"
        error = registered.difference(layout, text)
        if error is not None:
            message = (
                f"{error} The model has {registered.summary()}. The weights have {layout.summary()}. "
                f"No version was sent. {self._advice(error)}"
            )
            raise LayoutError(message, error.missing, error.unexpected, error.mismatched)

    def _advice(self, error: LayoutError) -> str:
        model = self._services.weights_to_send(None, self._driver.model_id, self._context())
        if error.unexpected and transient_buffers(model).issuperset(error.unexpected):
            return (
                "Buffers that are not persistent are not sent, and TensorDict.from_module() has them: send the model "
                "itself, or its state_dict()."
            )
        return (
            "If the workers have another model now, register it in the trainer first (scheme.model = ...). To send the "
            "model's weights in another dtype, give the scheme a wire_dtype."
        )

    def _refuse_other_dtypes(self, layout: Layout) -> None:
        """Refuse weights that `wire_dtype` does not bring to the dtypes that were agreed on.

        Raises LayoutError: dtypes differ, and nothing else does.
        """
        agreed, wire_dtype = self._driver.layout, self._packer.wire_dtype
        if wire_dtype is None or agreed is None or not agreed.other_dtypes(layout):
            return
        error = agreed.difference(layout, f"The workers of {self._driver.model_id!r} have other dtypes")
        assert error is not None
        message = f"{error} wire_dtype='{wire_dtype.value}' casts wider floating tensors only. No version was sent."
        raise LayoutError(message, error.missing, error.unexpected, error.mismatched)
