"""Slots on devices: the sender's pools of them, and how a worker opens one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from weightsync.protocol.messages import SlotRef
from weightsync.transports.buffers import Buffer, NoRoom, Pool
from weightsync.transports.device import DeviceBuffer
from weightsync.weights.device.base import DeviceError, DeviceMemory
from weightsync.weights.device.registry import device_of, open_memory
from weightsync.weights.layout import Layout
from weightsync.weights.packing import pack
from weightsync.weights.reading import Weights
from weightsync.weights.tensors import address_of, borrowed

logger = logging.getLogger("weightsync")


class Readers(Protocol):
    """The workers of a sender, and what of its memory they can map."""

    def all_share(self, payload: Buffer, nbytes: int) -> bool:
        """Whether all of them map a buffer with so many bytes of payload, so that no byte of it travels."""

    def reached(self) -> Sequence[frozenset[bytes]]:
        """For each link, the devices whose slots its worker can open."""


class _Nobody:
    def all_share(self, payload: Buffer, nbytes: int) -> bool:  # noqa: ARG002 - whatever it is
        return False

    def reached(self) -> Sequence[frozenset[bytes]]:
        return ()


#: No worker: nothing is mapped.
nobody = _Nobody()


def open_slot(slot: SlotRef, fd: int) -> DeviceMemory:
    """The memory of a slot that a sender has named.

    Raises:
        NoRoom: this process cannot open it, now or at all.
        ProtocolError: it lies on a device that this process does not have.
    """
    try:
        return open_memory(slot.device, fd, slot.nbytes)
    except DeviceError as error:
        raise NoRoom(str(error)) from error


class DevicePools:
    """The slots of one sender, on each device that its weights have been on. Called under the packer's lock."""

    def __init__(self) -> None:
        self._pools: dict[bytes, Pool] = {}
        #: Devices without memory for a slot.
        self._full: set[bytes] = set()

    def acquire(self, weights: Weights, layout: Layout, readers: Readers) -> DeviceBuffer | None:
        """A slot on the device of these weights that nobody reads.

        None if they are to go by way of the host: they are there, or on several devices, or no worker can open a slot
        on theirs, or it has no memory left.
        """
        device = device_of(weights.tensors.values())
        if device is None or device.identity in self._full or not _some(device.identity, readers.reached()):
            return None
        pool = self._pools.get(device.identity)
        if pool is None:
            pool = self._pools[device.identity] = Pool(make=lambda nbytes: DeviceBuffer(device.allocate(nbytes)))
        try:
            buffer = pool.acquire(layout.nbytes)
        except DeviceError as error:
            self._full.add(device.identity)
            logger.warning("weights on a device are sent by way of the host from now on: %s", error)
            return None
        assert isinstance(buffer, DeviceBuffer)
        return buffer

    def close(self) -> None:
        """Drop all slots. Each is freed when no worker has it open any more."""
        for pool in self._pools.values():
            pool.close()


def write_slot(buffer: DeviceBuffer, weights: Weights, layout: Layout, readers: Readers) -> None:
    """Copy weights into a slot and seal it, in order with the current stream; and to the host if a link needs that.

    What the layout has in another dtype is cast on the device. When this returns, the kernels that wrote the slot have
    ended.

    Raises:
        LayoutError: a tensor, which the error names, cannot be copied.
        TransportError: there is not enough memory on the host.
    """
    memory = buffer.slot.memory
    assert isinstance(memory, DeviceMemory)
    try:
        memory.write(weights, layout)
    except Exception:
        pack(weights, layout, buffer.stage())  # its error names the tensor
        raise
    buffer.seal()
    if not all(memory.identity in link for link in readers.reached()):
        buffer.stage()


def flat_of(buffer: Buffer) -> Tensor:
    """The bytes of a buffer, where they are. The caller holds the buffer."""
    if isinstance(buffer, DeviceBuffer):
        assert isinstance(buffer.slot.memory, DeviceMemory)
        return buffer.slot.memory.flat
    return borrowed(address_of(buffer.view), buffer.nbytes)


def _some(identity: bytes, links: Sequence[frozenset[bytes]]) -> bool:
    return any(identity in link for link in links)
