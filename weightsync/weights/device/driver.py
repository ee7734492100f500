"""The calls of the CUDA driver by which processes share a device's memory.

Memory is created with `cuMemCreate` and passed on as a POSIX file descriptor, as shared memory of the host is. Such
memory lives until the last mapping and the last descriptor are gone, however their processes ended. The older CUDA IPC
handles promise less: to free memory that another process still has open is undefined. PyTorch's own sharing is built on
these, and counts its readers in files: one that is killed is never subtracted.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from typing import Final

from weightsync.protocol.messages import IDENTITY_NBYTES
from weightsync.weights.device.base import DeviceError

_PINNED: Final = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_ON_DEVICE: Final = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_DESCRIPTOR: Final = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_READ_WRITE: Final = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_MINIMUM: Final = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
_PORTABLE: Final = 1  # CU_MEMHOSTREGISTER_PORTABLE
_READ_ONLY: Final = 8  # CU_MEMHOSTREGISTER_READ_ONLY
#: CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED and ..._HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED.
_NEEDED: Final = (102, 103)
_PINS_READ_ONLY: Final = 113  # CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Flags(ctypes.Structure):
    _fields_ = (("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4))


class Properties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        ("type", c_int),
        ("handles", c_int),
        ("location", _Location),
        ("win32", c_void_p),
        ("flags", _Flags),
    )


class Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location", _Location), ("flags", c_int))


class Driver:
    """The CUDA driver of this process. Raises DeviceError: there is none, or it fails."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DeviceError(f"The CUDA driver cannot be loaded: {error}.") from error
        self._call("cuInit", c_uint(0))

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = c_char_p()
            self._library.cuGetErrorName(c_int(status), byref(text))
            raise DeviceError(f"{name} of the CUDA driver failed: {(text.value or b'?').decode()} ({status}).")

    def identity(self, ordinal: int) -> bytes:
        """The UUID of a device, or of its MIG instance."""
        uuid = (c_ubyte * IDENTITY_NBYTES)()
        self._call("cuDeviceGetUuid_v2", byref(uuid), c_int(ordinal))
        return bytes(uuid)

    def shares(self, ordinal: int) -> bool:
        """Whether memory of a device can be passed on as a descriptor."""
        value, supported = c_int(), []
        for attribute in _NEEDED:
            self._call("cuDeviceGetAttribute", byref(value), c_int(attribute), c_int(ordinal))
            supported.append(value.value)
        return all(supported)

    def pins_read_only(self, ordinal: int) -> bool:
        """Whether memory of the host that this process cannot write can be pinned for a device."""
        value = c_int()
        self._call("cuDeviceGetAttribute", byref(value), c_int(_PINS_READ_ONLY), c_int(ordinal))
        return bool(value.value)

    def reaches(self, ordinal: int, peer: int) -> bool:
        """Whether kernels of a device can read memory of ``peer``."""
        value = c_int()
        self._call("cuDeviceCanAccessPeer", byref(value), c_int(ordinal), c_int(peer))
        return bool(value.value)

    def create(self, ordinal: int, nbytes: int) -> tuple[int, int]:
        """Physical memory of at least ``nbytes`` bytes: its handle, to be released, and its size."""
        properties = Properties(type=_PINNED, handles=_DESCRIPTOR, location=_Location(_ON_DEVICE, ordinal))
        grain, handle = c_size_t(), c_uint64()
        self._call("cuMemGetAllocationGranularity", byref(grain), byref(properties), c_int(_MINIMUM))
        size = -(-max(nbytes, 1) // grain.value) * grain.value
        self._call("cuMemCreate", byref(handle), c_size_t(size), byref(properties), c_uint64(0))
        return handle.value, size

    def export(self, handle: int) -> int:
        """A new descriptor of some memory."""
        fd = c_int(-1)
        self._call("cuMemExportToShareableHandle", byref(fd), c_uint64(handle), c_int(_DESCRIPTOR), c_uint64(0))
        os.set_inheritable(fd.value, False)
        return fd.value

    def take(self, fd: int) -> int:
        """The handle, to be released, of another process's memory. The descriptor stays open."""
        handle = c_uint64()
        self._call("cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), c_int(_DESCRIPTOR))
        return handle.value

    def release(self, handle: int) -> None:
        """Drop a handle; what is mapped stays."""
        self._call("cuMemRelease", c_uint64(handle))

    def map(self, handle: int, nbytes: int, ordinals: Sequence[int]) -> int:
        """Map all of some memory, for kernels of these devices. Returns its address."""
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), c_size_t(nbytes), c_size_t(0), c_uint64(0), c_uint64(0))
        try:
            self._call("cuMemMap", address, c_size_t(nbytes), c_size_t(0), c_uint64(handle), c_uint64(0))
        except DeviceError:
            self._call("cuMemAddressFree", address, c_size_t(nbytes))
            raise
        access = (Access * len(ordinals))(*(Access(_Location(_ON_DEVICE, each), _READ_WRITE) for each in ordinals))
        try:
            self._call("cuMemSetAccess", address, c_size_t(nbytes), access, c_size_t(len(ordinals)))
        except DeviceError:
            self.unmap(address.value, nbytes)
            raise
        return address.value

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo `map`. No kernel may read or write the memory any more."""
        self._call("cuMemUnmap", c_uint64(address), c_size_t(nbytes))
        self._call("cuMemAddressFree", c_uint64(address), c_size_t(nbytes))

    def pin(self, address: int, nbytes: int, read_only: bool) -> None:
        """Pin mapped pages of the host, for copies at full speed. The thread must have a context.

        `cudaHostRegister` does the same, but a failure of it stays behind as the runtime's last error, which torch
        then raises from an unrelated kernel.
        """
        flags = _PORTABLE | (_READ_ONLY if read_only else 0)
        self._call("cuMemHostRegister_v2", c_void_p(address), c_size_t(nbytes), c_uint(flags))

    def unpin(self, address: int) -> None:
        """Undo `pin`. No copy may read or write the memory any more."""
        self._call("cuMemHostUnregister", c_void_p(address))
