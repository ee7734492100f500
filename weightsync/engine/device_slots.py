"""A sender's slots on the devices that its weights are on, and how a worker opens one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from weightsync.protocol.messages import SlotRef
from weightsync.transports.buffers import Buffer, NoRoom, Pool
from weightsync.transports.device import DeviceBuffer
from weightsync.weights.device.base import Device, DeviceError, DeviceMemory
from weightsync.weights.device.registry import allocate_memory, open_memory
from weightsync.weights.layout import Layout
from weightsync.weights.packing import pack
from weightsync.weights.reading import Weights
from weightsync.weights.tensors import address_of, borrowed

logger = logging.getLogger("weightsync")


class DeviceReaders(Protocol):
    """The workers of a sender, and the devices that they reach."""

    def reached(self) -> Sequence[frozenset[bytes]]:
        """For each link, the devices whose slots its worker can open."""


class DevicePools:
    """The slots of one sender, on each device that its weights have been on. Called under the packer's lock."""

    def __init__(self) -> None:
        self._pools: dict[bytes, Pool] = {}
        #: Devices without memory for a slot.
        self._full: set[bytes] = set()

    def acquire(self, device: Device, layout: Layout, readers: DeviceReaders) -> DeviceBuffer | None:
        """A slot on a device that nobody reads.

        None if the weights are copied through host memory: no worker can open a slot there, or no memory is left.
        """
        try:
            pool = self.pool(device, layout.nbytes, readers)
            if pool is None:
                return None
            buffer = pool.acquire(layout.nbytes)
        except DeviceError as error:
            self._full.add(device.identity)
            self._pools.pop(device.identity, None)
            logger.warning("weights on a device are copied through host memory from now on: %s", str(error))
            return None
        assert isinstance(buffer, DeviceBuffer)
        return buffer

    def pool(self, device: Device, nbytes: int, readers: DeviceReaders) -> Pool | None:
        """The slots on a device; None: see `acquire`.

        Args:
            nbytes: the size of a payload. All slots are made at once: a worker would keep a single one mapped.

        Raises:
            DeviceError: there is no memory for all of them, so there are none.
        """
        if device.identity in self._full or not any(device.identity in link for link in readers.reached()):
            return None
        pool = self._pools.get(device.identity)
        if pool is None:
            pool = Pool(lambda nbytes: DeviceBuffer(allocate_memory(device, nbytes)))
            pool.reserve(nbytes)
            self._pools[device.identity] = pool
        return pool

    def close(self) -> None:
        """Drop all slots. Each is freed when no worker has it open any more."""
        for pool in self._pools.values():
            pool.close()


def write_slot(
    buffer: DeviceBuffer, weights: Weights, layout: Layout, readers: DeviceReaders, form_key: object | None = None
) -> None:
    """Copy weights into a slot and seal it, in order with the current stream; and to the host if a link needs that.

    Tensors of another dtype than the layout's are cast on the device. When this returns, the kernels that wrote the
    slot have ended.

    Args:
        form_key: the same object for as long as the weights have the same form: see `Device.copy`.

    Raises:
        LayoutError: a tensor, which the error names, cannot be copied.
        TransportError: there is not enough memory on the host.
    """
    memory = buffer.slot.memory
    assert isinstance(memory, DeviceMemory)
    try:
        memory.write(weights, layout, form_key)
    except Exception:
        pack(weights, layout, buffer.stage())  # its error names the tensor
        raise
    buffer.seal(layout.nbytes)
    if not all(memory.identity in link for link in readers.reached()):
        buffer.stage()


def flat_of(buffer: Buffer) -> Tensor:
    """The bytes of a buffer, where they are. The caller holds the buffer."""
    if isinstance(buffer, DeviceBuffer):
        assert isinstance(buffer.slot.memory, DeviceMemory)
        return buffer.slot.memory.flat
    return borrowed(address_of(buffer.view), buffer.nbytes)


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
