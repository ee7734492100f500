"""The calls to the CUDA driver, against a recording library: sizes, and clean-up after a failed call."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import pytest

from weightsync.weights.device import driver
from weightsync.weights.device.base import DeviceError

GRAIN = 2**21


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
            out = {"cuMemGetAllocationGranularity": GRAIN, "cuMemCreate": 7, "cuMemAddressReserve": 4096}
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


def test_the_structures_have_the_sizes_of_the_drivers() -> None:
    assert (ctypes.sizeof(driver.Properties), driver.Properties.win32.offset) == (32, 16)
    assert (ctypes.sizeof(driver.Access), driver.Access.flags.offset) == (12, 8)


@pytest.mark.parametrize(("nbytes", "size"), [(0, GRAIN), (1, GRAIN), (GRAIN, GRAIN), (GRAIN + 1, 2 * GRAIN)])
def test_memory_comes_in_whole_grains(loaded: Any, nbytes: int, size: int) -> None:
    cuda, _ = loaded()
    assert cuda.create(0, nbytes) == (7, size)


@pytest.mark.parametrize("pins", [True, False])
def test_whether_memory_mapped_read_only_can_be_pinned_is_asked_of_the_device(loaded: Any, pins: bool) -> None:
    cuda, library = loaded()
    library.attributes[113] = pins
    assert cuda.pins_read_only(3) is pins
    assert not cuda.shares(3)


def test_a_descriptor_is_not_inherited(loaded: Any) -> None:
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
def test_what_cannot_be_mapped_leaves_nothing_mapped(loaded: Any, failing: str, undone: list[str]) -> None:
    cuda, library = loaded(failing)
    with pytest.raises(DeviceError, match=f"^{failing} of the CUDA driver failed: CUDA_ERROR_OUT_OF_MEMORY "):
        cuda.map(7, GRAIN, [0, 1])
    assert [name for name in library.calls if "Unmap" in name or "Free" in name] == undone


def test_a_machine_without_the_driver_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(DeviceError, match="The CUDA driver cannot be loaded"):
        driver.Driver()
