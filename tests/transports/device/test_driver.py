"""The calls to the CUDA driver, against a recording library: sizes, and clean-up after a failed call."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import pytest

from weightsync.weights.device import driver
from weightsync.weights.device.base import DeviceError

GRANULARITY = 2**21


class Library:
    """A fake ``libcuda`` in which every call succeeds except ``failing``."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.calls: list[str] = []
        #: The values of a device's attributes, by number. All others are 0.
        self.attributes: dict[int, int] = {}

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            out = {"cuMemGetAllocationGranularity": GRANULARITY, "cuMemCreate": 7, "cuMemAddressReserve": 4096}
            if name in out:
                arguments[0]._obj.value = out[name]
            if name == "cuDeviceGetAttribute":
                arguments[0]._obj.value = self.attributes.get(arguments[1].value, 0)
            if name == "cuMemExportToShareableHandle":
                arguments[0]._obj.value = os.dup(2)
            if name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_OUT_OF_MEMORY"
            return 2 if name == self.failing else 0

        return call


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[driver.Driver, Library]]:
    def load(failing: str = "") -> tuple[driver.Driver, Library]:
        library = Library(failing)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
        return driver.Driver(), library

    return load


def test_the_structures_have_the_sizes_of_the_cuda_drivers() -> None:
    assert (ctypes.sizeof(driver.Properties), driver.Properties.win32.offset) == (32, 16)
    assert (ctypes.sizeof(driver.Access), driver.Access.flags.offset) == (12, 8)


@pytest.mark.parametrize(
    ("nbytes", "size"),
    [(0, GRANULARITY), (1, GRANULARITY), (GRANULARITY, GRANULARITY), (GRANULARITY + 1, 2 * GRANULARITY)],
)
def test_memory_is_allocated_in_multiples_of_the_granularity(loaded: Any, nbytes: int, size: int) -> None:
    cuda, _ = loaded()
    assert cuda.create(0, nbytes) == (7, size)


@pytest.mark.parametrize("pins", [True, False])
def test_the_device_is_asked_whether_read_only_memory_can_be_pinned(loaded: Any, pins: bool) -> None:
    cuda, library = loaded()
    library.attributes[113] = pins
    assert cuda.pins_read_only(3) is pins
    assert not cuda.shares(3)


def test_an_exported_descriptor_is_not_inheritable(loaded: Any) -> None:
    cuda, _ = loaded()
    fd = cuda.export(7)
    assert not os.get_inheritable(fd)
    os.close(fd)


@pytest.mark.parametrize(
    ("failing", "undone"),
    [
        ("cuMemAddressReserve", []),
        ("cuMemMap", ["cuMemAddressFree"]),
        ("cuMemSetAccess", ["cuMemUnmap", "cuMemAddressFree"]),
    ],
)
def test_a_failed_map_leaves_nothing_mapped_or_reserved(loaded: Any, failing: str, undone: list[str]) -> None:
    cuda, library = loaded(failing)
    with pytest.raises(DeviceError, match=f"^{failing} of the CUDA driver failed: CUDA_ERROR_OUT_OF_MEMORY "):
        cuda.map(7, GRANULARITY, [0, 1])
    assert [name for name in library.calls if "Unmap" in name or "Free" in name] == undone


def test_a_missing_cuda_driver_raises_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(DeviceError, match="The CUDA driver cannot be loaded"):
        driver.Driver()
