"""CUDA devices: their memory by the driver, their kernels by torch."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from weightsync.weights.device.base import SEAL_NBYTES, DeviceError, DeviceMemory
from weightsync.weights.device.driver import Driver

logger = logging.getLogger("weightsync")


class _Mapping:
    """Memory that is mapped here until the last tensor that views it is gone.

    torch keeps this object for as long as a tensor made of it lives.
    """

    def __init__(self, driver: Driver, ordinal: int, address: int, nbytes: int) -> None:
        self._driver, self._ordinal, self._address, self._nbytes = driver, ordinal, address, nbytes
        self._pid = os.getpid()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What torch needs to view it as a tensor."""
        return {"shape": (self._nbytes,), "typestr": "|u1", "data": (self._address, False), "version": 2}

    def __del__(self) -> None:
        # At the end of the process the driver frees it; in a forked child it is the parent's, and there is no CUDA.
        if sys.is_finalizing() or self._pid != os.getpid():
            return
        try:
            torch.cuda.synchronize(self._ordinal)  # a kernel may still read it
            self._driver.unmap(self._address, self._nbytes)
        except Exception as error:  # noqa: BLE001 - a device that failed fails every call; its process can only end
            logger.debug("memory of cuda:%d could not be unmapped: %s", self._ordinal, error)


class CudaDevice:
    """A CUDA device of this process: see `Device`."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self._driver = driver
        self._ordinal = ordinal

    @cached_property
    def identity(self) -> bytes:
        """See `Device.identity`."""
        return self._driver.identity(self._ordinal)

    @cached_property
    def _peers(self) -> list[int]:
        others = [peer for peer in range(torch.cuda.device_count()) if peer != self._ordinal]
        return [peer for peer in others if self._driver.reaches(self._ordinal, peer)]

    def opens(self) -> tuple[bytes, ...]:
        """See `Device.opens`."""
        return self.identity, *(self._driver.identity(peer) for peer in self._peers)

    def allocate(self, nbytes: int) -> DeviceMemory:
        """See `Device.allocate`."""
        torch.cuda.synchronize(self._ordinal)  # also makes the device's context
        handle, size = self._driver.create(self._ordinal, nbytes + SEAL_NBYTES)
        try:
            fd = self._driver.export(handle)
            try:
                return DeviceMemory(self, self._mapped(handle, size, [self._ordinal]), fd)
            except BaseException:
                os.close(fd)
                raise
        finally:
            self._driver.release(handle)

    def open(self, fd: int, nbytes: int) -> DeviceMemory:
        """See `Device.open`."""
        torch.cuda.synchronize(self._ordinal)
        handle = self._driver.take(fd)
        try:
            readers = [peer for peer in self._peers if self._driver.reaches(peer, self._ordinal)]
            return DeviceMemory(self, self._mapped(handle, nbytes + SEAL_NBYTES, [self._ordinal, *readers]))
        finally:
            self._driver.release(handle)

    def _mapped(self, handle: int, nbytes: int, ordinals: Sequence[int]) -> Tensor:
        with torch.cuda.device(self._ordinal):
            address = self._driver.map(handle, nbytes, ordinals)
            return torch.as_tensor(
                _Mapping(self._driver, self._ordinal, address, nbytes), device=f"cuda:{self._ordinal}"
            )

    def copy(self, into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """See `Device.copy`."""
        with torch.inference_mode():
            torch._foreach_copy_(list(into), list(tensors), non_blocking=True)

    def finish(self) -> None:
        """See `Device.finish`."""
        torch.cuda.current_stream(self._ordinal).synchronize()

    def synchronize(self) -> None:
        """See `Device.synchronize`."""
        torch.cuda.synchronize(self._ordinal)


class CudaBackend:
    """The CUDA devices of this process: see `Backend`."""

    def device(self, place: torch.device) -> CudaDevice | None:
        """See `Backend.device`."""
        return _device(torch.cuda.current_device() if place.index is None else place.index)

    def named(self, identity: bytes) -> CudaDevice | None:
        """See `Backend.named`."""
        known = (_device(ordinal) for ordinal in range(torch.cuda.device_count()))
        return next((device for device in known if device is not None and device.identity == identity), None)


@lru_cache(maxsize=64)
def _device(ordinal: int) -> CudaDevice | None:
    try:
        driver = Driver()
        shares = driver.shares(ordinal)
    except DeviceError as error:
        logger.warning("weights on cuda:%d are sent by way of the host: %s", ordinal, error)
        return None
    if not shares:
        logger.warning("weights on cuda:%d are sent by way of the host: its memory cannot be shared", ordinal)
        return None
    return CudaDevice(driver, ordinal)
