"""Payloads in the memory of a device: the trainer's slots, and what a link knows about the worker that will open them.

The bytes stay on the device. The memory travels as a file descriptor with the first frame that names its slot, as a
segment of shared memory does, and is freed with its last mapping. Nothing here knows what kind of device it is.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from weightsync.protocol._tables import RefusalKind
from weightsync.protocol.messages import IDENTITY_NBYTES, SEAL_NBYTES, Hello, Message, Refusal, SlotRef, Update
from weightsync.transports.buffers import NUMBERS, Buffer, Storage
from weightsync.transports.process import forget_after_fork

logger = logging.getLogger("weightsync")


class Slot(Protocol):
    """The memory that a payload was received in, where the trainer's own memory is mapped."""

    @property
    def seal(self) -> bytes:
        """The seal that lies in the memory now."""

    def remap(self) -> bool:
        """Undo this process's own writes to the memory. From now on it may write there again.

        Returns: whether it may have written something. If so, bytes read before this call may be its own.
        """

    def tidy(self, unwritten: Callable[[memoryview], bool], /) -> None:
        """Do the work of the next `remap` now, while there is time, if nobody can write to the memory before that.

        Args:
            unwritten: whether a payload that was received there, and is still referenced, is written by nobody.
        """


class OnDevice(Slot, Protocol):
    """Memory on a device, as the adapters see it, with a seal behind the payload."""

    @property
    def identity(self) -> bytes:
        """The device's identity, the same in all processes of the host: 16 bytes."""

    @property
    def nbytes(self) -> int:
        """The size of the largest payload."""

    @property
    def fd(self) -> int:
        """The descriptor by which another process opens it."""

    def forget(self) -> None:
        """Close the descriptor."""

    def read(self, view: memoryview) -> None:
        """Copy the memory's first bytes to the host, as many as ``view`` has."""

    def register(self, view: memoryview) -> object | None:
        """Pin memory of the host for `read`, until the result is dropped; None: it cannot be pinned."""

    def seal_with(self, seal: bytes) -> None:
        """Write the seal."""

    def unseal(self) -> None:
        """Remove the seal, before anything is written."""


#: Opens the memory that a slot names, by its descriptor, which the caller closes.
Opener = Callable[[SlotRef, int], OnDevice]


class DeviceSlot:
    """Memory of a device with a number, by which links name it."""

    def __init__(self, memory: OnDevice) -> None:
        self.memory = memory
        self.number = next(NUMBERS)
        forget_after_fork(self)
        #: The seal of what it holds; zeros: it may be written.
        self.seal = bytes(SEAL_NBYTES)

    @property
    def fd(self) -> int:
        """See `OnDevice.fd`."""
        return self.memory.fd

    @property
    def ref(self) -> SlotRef:
        """The slot as an update names it."""
        return SlotRef(segment=self.number, seal=self.seal, device=self.memory.identity, nbytes=self.memory.nbytes)

    def forget(self) -> None:
        """In a forked child: the memory is the parent's, which a descriptor left open here would keep."""
        self.memory.forget()

    def put(self, seal: bytes) -> None:
        """Write a seal behind the payload."""
        self.seal = seal
        self.memory.seal_with(seal)

    def unseal(self) -> None:
        """Remove the seal: the memory may be written from now on."""
        self.seal = bytes(SEAL_NBYTES)
        self.memory.unseal()


class DeviceBuffer(Buffer):
    """A buffer on a device. Its host copy is made when a link asks for it, once per version, and has the same seal."""

    def __init__(self, memory: OnDevice) -> None:
        super().__init__(0)
        self.nbytes, self.mappable = memory.nbytes, True
        self.slot = DeviceSlot(memory)
        self._host: Buffer | None = None
        self._staged = False
        self._filled = 0

    @property
    def view(self) -> memoryview:
        """The whole buffer on the host: see `stage`."""
        return self.stage()

    def stage(self) -> memoryview:
        """Copy it to the host, once per version: into shared memory, which `segment` is from then on."""
        if self._host is None:
            self._host = Buffer(self.nbytes, Storage.SEGMENTS)
            self.segment = self._host.segment
        if not self._staged:
            if self.segment is not None:
                self.segment.pin(self.slot.memory.register)
            self.slot.memory.read(self._host.view[: self._filled])
            if self.segment is not None:
                self.segment.seal_with(self.slot.seal)
            self._staged = True
        return self._host.view

    def seal(self, nbytes: int) -> None:
        """Note that it is filled with a payload of this size: draw its seal."""
        self._filled = nbytes
        self.slot.put(os.urandom(SEAL_NBYTES))

    def sealed(self) -> bytes:
        """The seal of what it holds, on the device and in its host copy."""
        return self.slot.seal

    def unseal(self) -> None:
        """It may be written from now on: remove the seal, and forget what was on the host."""
        self._staged, self._filled = False, 0
        self.slot.unseal()
        super().unseal()


class CarriesDevices(ABC):
    """A link that can carry a slot of a device to a worker that can open it."""

    @property
    @abstractmethod
    def opens(self) -> bool:
        """Whether this end can open such slots."""

    @property
    @abstractmethod
    def reached(self) -> frozenset[bytes]:
        """The identities of the devices whose slots the other end can open."""

    @abstractmethod
    def copied_to_device(self) -> None:
        """What arrives in shared memory of the host is copied to a device: map it so that it can be pinned."""


class ReachableDevices:
    """The devices whose slots the worker at the other end can open, as its Hello said.

    A worker that refuses a version in a slot gets the next ones through host memory, until its next Hello; unless it
    has acked the version that was in the slot before, and so has the slot open.
    """

    def __init__(self, peer: str) -> None:
        self._peer = peer
        #: The version that was named in a slot last, and the slot's number.
        self._used: tuple[int, int] | None = None
        self._slot = 0
        #: The slots whose last version was acked.
        self._opened: set[int] = set()
        #: The devices' identities.
        self.devices: frozenset[bytes] = frozenset()

    def used(self, update: Update, slot: DeviceSlot, acked: tuple[int, int]) -> None:
        """Record that an update names a slot of a device.

        Args:
            acked: the newest version that the worker has acked, see `Pins`.
        """
        if self._used == acked:
            self._opened.add(self._slot)
        self._used, self._slot = (update.incarnation, update.version), slot.number

    def answered(self, message: Message) -> None:
        """Process an answer."""
        if isinstance(message, Hello):
            devices = message.devices
            self._opened.clear()
            self.devices = frozenset(
                devices[start : start + IDENTITY_NBYTES] for start in range(0, len(devices), IDENTITY_NBYTES)
            )
        elif isinstance(message, Refusal) and message.kind is RefusalKind.REFUSED and self._is_of_slot(message):
            if self._slot in self._opened:
                self._opened.discard(self._slot)  # the next refusal may say that it could not be opened again
                return
            text = "%s refused version %d, which is on a device: the next one goes through host memory"
            logger.warning(text, self._peer, message.version)
            self.devices = frozenset()

    def _is_of_slot(self, message: Refusal) -> bool:
        return (message.incarnation, message.version) == self._used
