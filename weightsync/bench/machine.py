"""Describes the machine and the libraries of a run, without host names and paths."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path

#: Distributions whose versions matter to the times.
_LIBRARIES = ("weightsync", "torch", "tensordict", "torchrl", "ray")


def describe(device: str) -> Mapping[str, str]:
    """What the machine is: processor, cores, memory, GPU, and the versions of what is measured."""
    facts = {
        "processor": _first("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": _gibibytes(_first("/proc/meminfo", "MemTotal")),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
    }
    if "cuda" in device:
        import torch  # noqa: PLC0415 - takes seconds, and describing a CPU needs none of it

        facts["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {**facts, **{name: version for name in _LIBRARIES if (version := _version(name))}}


def available_memory() -> int:
    """The bytes of memory that processes can still have."""
    said = _first("/proc/meminfo", "MemAvailable")
    return int(said.partition(" ")[0]) * 1024 if said else 0


def installed(name: str) -> bool:
    """Whether a distribution is installed."""
    return _version(name) is not None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first(path: str, field: str) -> str:
    """The value of the first line of a file of ``field: value`` lines that is about the field; or nothing."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def _gibibytes(kilobytes: str) -> str:
    return f"{int(kilobytes.partition(' ')[0]) / 2**20:.0f} GiB" if kilobytes else "unknown"
