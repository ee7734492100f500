"""The interface of a device: memory that other processes can open, and kernels that outlast the call that starts them.

A slot on a device is free for writing once every kernel that reads it has ended. There are no events between
processes. The trainer waits for its copy before it sends the update; a worker waits for all of its kernels before it
swaps, and so before it acks. So the update and the ack do the work of such events, on whatever stream.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from weightsync.errors import TransportError
from weightsync.protocol.messages import SEAL_NBYTES
from weightsync.weights.device.captures import KeepsAddresses
from weightsync.weights.layout import Group, Layout
from weightsync.weights.packing import views_per_dtype
from weightsync.weights.reading import Weights, ordered
from weightsync.weights.tensors import SlotViews, address_of, borrowed, on_cpu

#: The largest chunk of tensors that is gathered on a device before it is copied; a larger tensor is copied by itself.
STAGING_NBYTES = 16 << 20


class DeviceError(TransportError):
    """A device has no memory left, or cannot share it with other processes."""


class Piece(NamedTuple):
    """Some tensors of a device, and their place in a payload on the host."""

    #: The bytes there, as uint8.
    host: Tensor
    tensors: list[Tensor]
    #: The tensors as views of as many bytes, wherever these are.
    among: Callable[[Tensor], SlotViews]
    #: The same object for as long as the tensors are of the same form: see `Device.copy`.
    form_key: object | None = None


class Waits(Protocol):
    """A device whose kernels can be waited for."""

    def finish(self) -> None:
        """Wait until everything in the current stream has ended."""

    def synchronize(self) -> None:
        """Wait until every kernel of this process on the device has ended, whatever its stream."""


class Device(Waits, Protocol):
    """One device, as this process sees it."""

    @property
    def identity(self) -> bytes:
        """Its name in 16 bytes, the same in every process of the host."""

    def opens(self) -> tuple[bytes, ...]:
        """The identities of the devices whose memory kernels of this one can read: its own, then its peers'."""

    def allocate(self, nbytes: int) -> DeviceMemory:
        """New memory that other processes can open, for a payload of at least ``nbytes`` bytes and its seal.

        Raises DeviceError: there is not enough, or it cannot be shared.
        """

    def open(self, fd: int, nbytes: int) -> DeviceMemory:
        """Memory of this device that another process allocated.

        Args:
            nbytes: the size of its largest payload.

        Raises DeviceError: it cannot be opened; nothing is left open.
        """

    def copy(self, into: Sequence[Tensor], tensors: Sequence[Tensor], form_key: object | None = None) -> None:
        """Queue a copy, tensor by tensor, in the current stream. It may continue after the call.

        Args:
            form_key: the same object as in an earlier copy, if neither needs to be looked at again: number, dtypes and
                strides are the same, and all but `SlotViews` have not moved. None: look again.
        """

    def to_host(self, pieces: Sequence[Piece]) -> None:
        """Copy tensors to the host, in order with the current stream, and wait for the copy.

        While one chunk is copied, the next is gathered. Copies to memory pinned by `register` are fastest.
        """

    def from_host(self, pieces: Sequence[Piece]) -> None:
        """Copy from the host into tensors that no kernel uses, and wait for that: see `to_host`."""

    def register(self, view: memoryview, read_only: bool) -> object | None:
        """Pin memory of the host, whole pages of it, for copies from and to the device, until the result is dropped.

        The result keeps the view. None: it cannot be pinned; copies then go through pinned memory of this process.

        Args:
            read_only: the device only reads it. Memory that this process cannot write must be given so.
        """

    def watch_captures(self, watcher: KeepsAddresses) -> bool:
        """Call the watcher before a graph of kernels is captured. Returns whether there are such graphs already.

        A graph reads the addresses that it captured whenever it is replayed.
        """


class Backend(Protocol):
    """The devices of one kind."""

    def device(self, place: torch.device) -> Device | None:
        """The device at ``place``; None: it cannot share memory."""

    def named(self, identity: bytes) -> Device | None:
        """The device with this identity; None: it is none of this process's."""


class DeviceMemory:
    """A payload's memory on a device, and the payload's seal, which is its last bytes.

    It is freed once no process refers to it, however that process ended.

    Args:
        flat: all of its bytes, as uint8. It keeps the memory mapped.
        fd: the descriptor by which others can open it, which is closed with this object; -1: there is none.
    """

    def __init__(self, device: Device, flat: Tensor, fd: int = -1) -> None:
        self.device = device
        self.flat = flat
        self.fd = fd
        #: The device's identity.
        self.identity = device.identity
        #: The size of the largest payload, which may be more than was asked for.
        self.nbytes = flat.numel() - SEAL_NBYTES
        self._sealed = flat[self.nbytes :]
        self._views: tuple[Layout, SlotViews] | None = None
        #: What `weightsync.weights.target` keeps about parameters that view it.
        self.kept: object = None

    @property
    def seal(self) -> bytes:
        """The seal that lies in it now: a copy of 16 bytes to the host."""
        return bytes(self._sealed.tolist())

    def seal_with(self, seal: bytes) -> None:
        """Write the seal, and wait until everything in the current stream has ended."""
        source = torch.frombuffer(bytearray(seal), dtype=torch.uint8)
        self._sealed.copy_(source, non_blocking=True)
        self.device.finish()

    def unseal(self) -> None:
        """Remove the seal, in order with the current stream."""
        self._sealed.zero_()

    def remap(self) -> bool:
        """Do nothing: a device has no private pages of a process, so a worker's own writes to the slot stay."""
        return False

    def tidy(self, _unwritten: Callable[[memoryview], bool]) -> None:
        """Do nothing: see `remap`."""

    def views(self, layout: Layout) -> SlotViews:
        """The entries of a layout as views of the memory, made once while the layout stays the same."""
        if self._views is None or self._views[0] != layout:
            # In inference mode, which the caller may be in, a view could not become a parameter's data.
            with torch.inference_mode(False), torch.no_grad():
                self._views, self.kept = (layout, SlotViews(views_per_dtype(layout, self._part))), None
        return self._views[1]

    def _part(self, group: Group) -> Tensor:
        """Some of its bytes as memory of their own, which keeps the whole mapped."""
        # By a capsule: torch exports a tensor itself only where its device is the current one.
        return from_dlpack(to_dlpack(self.flat[group.offset : group.offset + group.nbytes]))

    def write(self, weights: Weights, layout: Layout, form_key: object | None = None) -> None:
        """Queue a copy of weights of a layout into it in the current stream. `seal_with` waits for it.

        Gaps between entries are 0, as in a payload on the host.

        Args:
            form_key: the same object for as long as the weights have the same form: see `Device.copy`.
        """
        before, into = self._views, self.views(layout)
        if self._views is not before:
            self.flat.zero_()
        self.device.copy(into, ordered(weights, layout), form_key)

    def read(self, view: memoryview) -> None:
        """Copy its first bytes to the host. What writes it must have ended."""
        borrowed(address_of(view), view.nbytes).copy_(self.flat[: view.nbytes])

    def register(self, view: memoryview) -> object | None:
        """Pin memory of the host, for `read` to be fast: see `Device.register`."""
        return self.device.register(view, read_only=False)

    def forget(self) -> None:
        """Close the descriptor."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1  # first: after an interrupt its number may be another file's
            os.close(fd)

    def __del__(self) -> None:
        self.forget()


def on_host(payload: memoryview | DeviceMemory, nbytes: int) -> memoryview:
    """The first ``nbytes`` bytes of a payload in the host's memory: a copy, if it lies on a device."""
    if isinstance(payload, memoryview):
        return payload
    view = on_cpu(nbytes).numpy().data
    payload.read(view)
    return view
