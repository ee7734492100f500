"""Packs the weights of one sender, version after version."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import Any, Final

from weightsync.engine.devices import DevicePools, Readers, flat_of, nobody, write_slot
from weightsync.engine.signals import Shield
from weightsync.errors import LayoutError
from weightsync.options import Verify, WireDtype
from weightsync.protocol.codec import MAX_BODY_NBYTES
from weightsync.protocol.messages import WeightsForm
from weightsync.transports.buffers import Buffer, Pool
from weightsync.transports.device import DeviceBuffer
from weightsync.weights.casting import refuse_non_finite, refuse_overflow, sent_layout
from weightsync.weights.extra_state import encode_extras
from weightsync.weights.layout import Layout
from weightsync.weights.packing import pack, pack_digested
from weightsync.weights.reading import Weights, layout_of
from weightsync.weights.selection import Selection, read_to_send
from weightsync.weights.threads import LEAST
from weightsync.weights.tree_digest import digest
from weightsync.weights.unpacking import form_of

#: The room for names and extra state in an update: a message body, less the other fields.
MAX_NAMES_AND_EXTRAS_NBYTES: Final = MAX_BODY_NBYTES - 2**20


@dataclass(slots=True)
class Packed:
    """One version's weights as they are sent."""

    layout: Layout
    buffer: Buffer
    extras: bytes
    #: The digest of the payload and the extra state; empty: nobody has asked for it yet.
    digest: bytes
    #: The type in which the weights were given.
    form: WeightsForm = WeightsForm.FLAT
    #: Which workers compare the digest.
    verify: Verify = Verify.DIGEST
    #: What wider floating tensors were cast to; None: nothing is cast.
    wire_dtype: WireDtype | None = None
    #: The sender's numbers of the links whose workers were given the buffer itself.
    shared: set[int] = field(default_factory=set)

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
        """The digest that a worker is to compare; empty: it compares none.

        Args:
            shared: whether the worker maps the buffer, so that no byte of it travels.
        """
        return self.digested() if _compares(self.verify, shared) else b""


def _compares(verify: Verify, shared: bool) -> bool:
    return verify is Verify.DIGEST or (verify is Verify.AUTO and not shared)


class Packer:
    """Packs the weights of one sender. The plan is made once for each layout.

    Args:
        verify: which digests to compute.
        wire_dtype: what wider floating tensors are cast to while they are packed; None: nothing is cast.
        selection: which weights are sent; None: all.
        finite: the name of the model whose weights are refused if they are not finite; None: they are not checked.
    """

    def __init__(
        self,
        verify: Verify = Verify.AUTO,
        wire_dtype: WireDtype | None = None,
        selection: Selection | None = None,
        finite: str | None = None,
    ) -> None:
        self.wire_dtype = wire_dtype
        self._verify = verify
        self._selection = selection
        self._finite = finite
        self._pool = Pool()
        self._on_devices = DevicePools()
        self._lock = threading.Lock()
        self._layout: Layout | None = None

    def layout_of(self, weights: Any) -> Layout:
        """The layout in which weights would be sent, without packing them.

        Raises:
            ConfigurationError, LayoutError: they cannot be sent.
        """
        self._layout = layout_of(read_to_send(weights, self._selection), self._layout)
        return sent_layout(self._layout, self.wire_dtype)

    def pack(self, weights: Any, form: WeightsForm | None = None, readers: Readers = nobody) -> Packed:
        """Copy weights into a buffer that no worker reads. It stays pinned until `handed_over`.

        Args:
            weights: a module, a TensorDict or a dict.
            form: the type in which workers get them; None: that of ``weights``.
            readers: what the workers can map. Weights on a device that a worker reaches stay there. Elsewhere, if not
                all workers map the buffer, and they compare a digest, it is computed along with the copy.

        Raises:
            ConfigurationError, LayoutError: they cannot be sent, or a value is too large for `wire_dtype`.
            NonFiniteError: they are checked, and not finite.
            TransportError: there is not enough memory.
        """
        read = read_to_send(weights, self._selection)
        self._layout = layout_of(read, self._layout)
        layout = sent_layout(self._layout, self.wire_dtype)
        extras = encode_extras(read.extras())
        _require_room(layout, extras)
        with self._lock:
            buffer = self._on_devices.acquire(read, layout, readers) or self._pool.acquire(layout.nbytes)
            buffer.pin(self)
        try:
            form = form_of(weights) if form is None else form
            packed = Packed(layout, buffer, extras, b"", form, self._verify, self.wire_dtype)
            # A thread or kernel that outlived an interrupted copy would write into what holds other weights by then.
            with Shield(lambda: None) if _outlasts(packed) else contextlib.nullcontext():
                _copy(read, packed, readers)
            if self.wire_dtype is not None and layout is not self._layout:
                refuse_overflow(read, layout, flat_of(buffer), self.wire_dtype)
            if self._finite is not None:
                refuse_non_finite(self._finite, layout, flat_of(buffer))
            return packed
        except BaseException:
            buffer.unpin(self)
            raise

    def handed_over(self, packed: Packed) -> None:
        """Release our pin: the readers of the packed weights have pinned them."""
        packed.buffer.unpin(self)

    def close(self) -> None:
        """Release all buffers. Workers keep what they map."""
        with self._lock:
            self._pool.close()
            self._on_devices.close()


def _outlasts(packed: Packed) -> bool:
    """Whether the copy is also made by others than the calling thread."""
    return packed.layout.nbytes > LEAST or isinstance(packed.buffer, DeviceBuffer)


def _copy(read: Weights, packed: Packed, readers: Readers) -> None:
    layout, buffer = packed.layout, packed.buffer
    if isinstance(buffer, DeviceBuffer):
        write_slot(buffer, read, layout, readers)
    elif _compares(packed.verify, readers.all_share(buffer, layout.nbytes)):
        packed.digest = pack_digested(read, layout, buffer.view, packed.extras)
    else:
        pack(read, layout, buffer.view)


def _require_room(layout: Layout, extras: bytes) -> None:
    """Refuse what no message can carry, before anything is dispatched.

    Raises:
        LayoutError: the names of the tensors and the extra state are too large.
    """
    nbytes = len(layout.encode()) + len(extras)
    if nbytes > MAX_NAMES_AND_EXTRAS_NBYTES:
        raise LayoutError(
            f"The tensors' names and the extra state of {list(layout.extras)} take {nbytes} bytes, but one update "
            f"carries {MAX_NAMES_AND_EXTRAS_NBYTES} beside the tensors: keep what is large in tensors."
        )
