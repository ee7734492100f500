"""Which device tensors are on, and which device an identity names."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from weightsync.errors import ProtocolError
from weightsync.weights.device.base import Backend, Device, DeviceMemory, Waits
from weightsync.weights.device.cuda import CudaBackend, captures, is_capturing

#: By the type of a torch device. Weights on any other device are copied through host memory.
backends: dict[str, Backend] = {"cuda": CudaBackend()}


@contextlib.contextmanager
def installed(kind: str, backend: Backend) -> Iterator[None]:
    """Let ``backend`` have the devices of this type of torch in this process, as a test's fake device does."""
    previous = dict(backends)
    backends[kind] = backend
    try:
        yield
    finally:
        backends.clear()
        backends.update(previous)


def capturing() -> bool:
    """Whether any thread is capturing a graph: no thread may wait for all kernels of a device then."""
    return bool(torch.cuda.is_initialized()) and is_capturing()  # type: ignore[no-untyped-call]


def apart_from_captures() -> AbstractContextManager[None]:
    """A block for a thread that receives beside the user's: see `Captures.apart`."""
    in_use = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return captures().apart() if in_use else contextlib.nullcontext()


class Unshared:
    """A device whose memory other processes cannot open: weights there are copied through host memory."""

    def __init__(self, place: torch.device) -> None:
        self._place = place

    def finish(self) -> None:
        """See `Waits.finish`."""
        self.synchronize()

    def synchronize(self) -> None:
        """See `Waits.synchronize`."""
        torch.accelerator.synchronize(self._place)


def devices_of(tensors: Iterable[Tensor]) -> tuple[Waits, ...]:
    """The devices that hold some of these tensors, and have kernels to wait for."""
    found = (device_at(place) or _unshared_at(place) for place in {tensor.device for tensor in tensors})
    return tuple(each for each in found if each is not None)


def _unshared_at(place: torch.device) -> Unshared | None:
    kind = torch.accelerator.current_accelerator()
    return Unshared(place) if kind is not None and kind.type == place.type else None


def device_of(tensors: Collection[Tensor]) -> Device | None:
    """The one device that holds all of these tensors; None: they are on the host, or in several places."""
    first = next(iter(tensors), None)
    if first is None or first.device.type not in backends or len({tensor.device for tensor in tensors}) > 1:
        return None
    return device_at(first.device)


def device_at(place: torch.device) -> Device | None:
    """The device at a place; None: weights there are copied through host memory."""
    backend = backends.get(place.type)
    return None if backend is None else backend.device(place)


def allocate_memory(device: Device, nbytes: int) -> DeviceMemory:
    """New memory on a device: see `Device.allocate`."""
    # In inference mode, which the caller may be in, it could be written in that mode only.
    with torch.inference_mode(False):
        return device.allocate(nbytes)


def open_memory(identity: bytes, fd: int, nbytes: int) -> DeviceMemory:
    """The memory that another process has on a device.

    Args:
        nbytes: its size.

    Raises:
        ProtocolError: the device is none of this process's.
        DeviceError: the memory cannot be opened.
    """
    for backend in backends.values():
        device = backend.named(identity)
        if device is not None:
            with torch.inference_mode(False):  # as above; and its views could not become a parameter's data
                return device.open(fd, nbytes)
    raise ProtocolError(f"A slot is on the device {identity.hex()}, which this process does not have.")
