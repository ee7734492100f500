"""How much memory there is: what the machine has left, and what the limit of a container leaves.

Other cgroups have such limits too: a batch job, a systemd unit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_CGROUPS: Final = Path("/sys/fs/cgroup")
_PROC: Final = Path("/proc")
_V2: Final = ("memory.max", "anon", "shmem")
_V1: Final = ("memory.limit_in_bytes", "total_rss", "total_shmem")


def require_memory(nbytes: int, cgroups: Path = _CGROUPS, proc: Path = _PROC) -> None:
    """Refuse memory for which the kernel would kill a process, of this machine or of this cgroup.

    File caches count as free, and so does swap within a cgroup's limit.

    Args:
        nbytes: how much more is needed.
        cgroups: where the kernel's cgroups are mounted.
        proc: where ``/proc`` is mounted.

    Raises:
        OSError: the machine has less, or a limit leaves less.
    """
    available = available_memory(proc)
    if available is not None and available < nbytes:
        raise OSError(0, f"only {available // 1024} kB are available")
    left = memory_left(cgroups, proc)
    if left is not None and left < nbytes and left + _free_swap(proc) < nbytes:
        raise OSError(0, f"the memory limit of its container (cgroup) leaves {max(left, 0) // 1024} kB")


def available_memory(proc: Path = _PROC) -> int | None:
    """The bytes that the machine has left, without regard to a container's limit; None: the kernel does not say.

    Args:
        proc: where ``/proc`` is mounted.
    """
    return _read_meminfo(proc, "MemAvailable")


def memory_left(cgroups: Path = _CGROUPS, proc: Path = _PROC) -> int | None:
    """The bytes that the tightest limit leaves; None: there is none, or the kernel does not say.

    Args:
        cgroups: where the kernel's cgroups are mounted.
        proc: where ``/proc`` is mounted.
    """
    return min(_left_by_cgroup(cgroups, proc), default=None)


def _left_by_cgroup(cgroups: Path, proc: Path) -> Iterator[int]:
    """What the limit of each cgroup around this process leaves. Nothing where the kernel does not say."""
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _left_in(cgroups, path, *_V2)
        elif controllers == "memory":
            yield from _left_in(cgroups / "memory", path, *_V1)


def _left_in(root: Path, path: str, limit: str, *used: str) -> Iterator[int]:
    cgroup = root / path.lstrip("/")
    for folder in (cgroup, *cgroup.parents):
        most = "".join(_lines(folder / limit))  # "max" without a limit; nothing if the cgroup cannot be seen from here
        if most.isdecimal():
            counts = (line.partition(" ") for line in _lines(folder / "memory.stat"))
            yield int(most) - sum(int(count) for name, _, count in counts if name in used)
        if folder == root:
            return


def _free_swap(proc: Path) -> int:
    return _read_meminfo(proc, "SwapFree") or 0


def _read_meminfo(proc: Path, name: str) -> int | None:
    """A number of bytes that the kernel says of the machine's memory."""
    for line in _lines(proc / "meminfo"):
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _lines(path: Path) -> list[str]:
    """The lines of a file; none if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    return []
