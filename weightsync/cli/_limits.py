"""What `weightsync doctor` finds of the limits of this process: memory, address space, processes, pipes, files.

Each names its remedy. Only the last one fails: a limit shows once a model or the number of workers is large enough.
"""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import sys
import tempfile
from pathlib import Path
from typing import Final

from weightsync.cli import TEMPORARY_FILES
from weightsync.cli._probes import Finding, Status, kernel

#: torch passes tensors between processes through /dev/shm; a container has 64 MiB unless it is given more.
_SHARED_NBYTES: Final = 128 << 20
#: RDMA locks the memory that it sends from.
_LOCKED_NBYTES: Final = 1 << 30
#: A worker is a process, with a few threads and those of torch.
_PROCESSES: Final = 1024
#: What a pipe of Linux holds. A user who has many gets smaller ones, and a message then takes many more wakeups.
_PIPE_NBYTES: Final = 64 << 10


def locked_memory(devices: Path = Path("/sys/class/infiniband")) -> Finding:
    """RLIMIT_MEMLOCK: only RDMA (NCCL over InfiniBand, NIXL) locks memory."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = f"{_size(limit)} may be locked"
    if not devices.is_dir() or not any(devices.iterdir()):
        return Finding(Status.WORKS, f"{found}; there is no RDMA device, which would need it")
    if limit != resource.RLIM_INFINITY and limit < _LOCKED_NBYTES:
        return Finding(
            Status.LIMITED,
            found,
            "RDMA (NCCL, NIXL) locks what it sends: `ulimit -l unlimited`, or docker run --ulimit memlock=-1.",
        )
    return Finding(Status.WORKS, found)


def address_space() -> Finding:
    """RLIMIT_AS: trainer and workers map each segment whole, and torch reserves much more than it uses."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        return Finding(
            Status.LIMITED,
            f"{_size(limit)} of address space",
            "Run `ulimit -v unlimited`, or have the batch system limit resident memory instead: torch reserves address "
            "space that it never uses, and shared weights are mapped in the trainer and in each worker.",
        )
    return Finding(Status.WORKS, "unlimited address space")


def shared_memory_size(mount: Path = Path("/dev/shm"), cgroup: Path = Path("/sys/fs/cgroup")) -> Finding:
    """What memfd and /dev/shm may hold. Memfds count as memory of the container, whatever the size of /dev/shm."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY:
        return Finding(
            Status.LIMITED,
            f"memfds of at most {_size(limit)}, as all files",
            "Run `ulimit -f unlimited`: a memfd holds all weights of a version.",
        )
    memory = _number(cgroup / "memory.max")
    found = "memfds as large as memory" if memory is None else f"memfds within the container's {_size(memory)}"
    if not mount.is_dir():
        return Finding(
            Status.LIMITED, f"{found}; no {mount}", f"Mount a tmpfs at {mount}: multiprocessing keeps semaphores there."
        )
    if not os.access(mount, os.W_OK):
        return Finding(
            Status.LIMITED,
            f"{found}; {mount} cannot be written to",
            f"Mount a tmpfs at {mount} that can be written to: Ray and your own queues need it.",
        )
    room = os.statvfs(mount)
    free = room.f_bavail * room.f_frsize
    found = f"{found}; {_size(free)} free in {mount}"
    if free < _SHARED_NBYTES:
        return Finding(
            Status.LIMITED,
            found,
            "weightsync's weights are in memfds, but torch passes tensors of your own queues through it: "
            "docker run --shm-size=1g, or --ipc=host.",
        )
    return Finding(Status.WORKS, found)


def processes(cgroup: Path = Path("/sys/fs/cgroup")) -> Finding:
    """How many processes and threads there may be: the user's limit, and the container's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = [None if soft == resource.RLIM_INFINITY else soft, _number(cgroup / "pids.max")]
    least = min((each for each in limits if each is not None), default=None)
    found = "any number of processes and threads" if least is None else f"{least} processes and threads allowed"
    if least is not None and least < _PROCESSES:
        most = "no limit" if hard == resource.RLIM_INFINITY else hard
        return Finding(
            Status.LIMITED,
            found,
            f"Run `ulimit -u {_PROCESSES * 4}` (at most {most}), or docker run --pids-limit={_PROCESSES * 4}: each "
            "worker is a process with a few threads and those of torch.",
        )
    return Finding(Status.WORKS, found)


def temporary_files() -> Finding:
    """A folder for temporary files: the import of tensordict fails without one, and with it every scheme."""
    try:
        return Finding(Status.WORKS, f"temporary files in {tempfile.gettempdir()}")
    except OSError as error:  # none exists, or none may be written, or all are full
        return Finding(Status.FAILS, f"{error.strerror}", TEMPORARY_FILES)


def pipes() -> Finding:
    """How much a new pipe and a new socket hold: trainer and workers communicate over them."""
    if not sys.platform.startswith("linux"):
        return kernel()
    reading, writing = os.pipe()
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        piped = fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)
        sent = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    finally:
        os.close(reading)
        os.close(writing)
        one.close()
        other.close()
    found = f"pipes hold {_size(piped)}, local sockets {_size(sent)}"
    if min(piped, sent) < _PIPE_NBYTES:
        return Finding(
            Status.LIMITED,
            found,
            "Weights over pipes take many more wakeups: raise them with `sysctl fs.pipe-user-pages-soft=65536` (or "
            "close pipes of this user) and `sysctl net.core.wmem_default=212992`.",
        )
    return Finding(Status.WORKS, found)


def _number(path: Path) -> int | None:
    """The limit in a file of the cgroup; None: there is none, or no such file."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _size(nbytes: int) -> str:
    if nbytes == resource.RLIM_INFINITY:
        return "any amount"
    if nbytes >= 1 << 30:
        return f"{nbytes / 2**30:.1f} GiB"
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 1 << 20 else f"{nbytes / 2**10:.0f} KiB"
