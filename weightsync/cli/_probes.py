"""What `weightsync doctor` looks at: one function per probe, which tries the thing itself and says what to do.

A probe never raises because something is missing, and leaves nothing behind: no process, descriptor or socket.
"""

from __future__ import annotations

import enum
import fcntl
import importlib
import importlib.metadata
import importlib.util
import mmap
import os
import platform
import resource
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from weightsync.transports.memory_limit import available_memory, memory_left

#: Fewer descriptors than this, and a trainer runs out of them at about a hundred workers.
_DESCRIPTORS: Final = 1024
#: How long a name server may take to resolve this host's own name, in seconds.
_LOOKUP_S: Final = 2.0
#: Ray keeps its objects in /dev/shm; with less than this it uses a disk, which is slow.
_SHARED_MEMORY_NBYTES: Final = 2 << 30


#: The engines that `weightsync.schemes.engines` drives.
_ENGINES: Final = ("vllm", "sglang")


class Status(enum.Enum):
    """What a probe found."""

    WORKS = "works"
    #: It works, but something about it is likely to cause trouble.
    LIMITED = "limited"
    #: It is part of every installation and does not work here.
    FAILS = "fails"
    #: An optional package or device is not there.
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one probe.

    Attributes:
        status: whether it works.
        detail: what was found.
        remedy: what to do about it; empty if there is nothing to do.
    """

    status: Status
    detail: str
    remedy: str = ""


def kernel() -> Finding:
    """The operating system, and pidfds: a worker's death is noticed by them."""
    found = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    if not sys.platform.startswith("linux"):
        return Finding(Status.FAILS, found, "weightsync needs Linux: run the trainer and its workers in a container.")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Finding(
            Status.FAILS, f"{found}; pidfd_open: {error.strerror}", "Allow pidfd_open, or use Linux 5.3 or later."
        )
    return Finding(Status.WORKS, found)


def segments() -> Finding:
    """Anonymous shared memory (memfd) with seals, passed between processes as a descriptor."""
    if not sys.platform.startswith("linux"):
        return kernel()
    try:
        nbytes = mmap.PAGESIZE
        fd = os.memfd_create("weightsync-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            mmap.mmap(fd, nbytes).close()
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            _pass_on(fd)
        finally:
            os.close(fd)
    except OSError as error:
        return Finding(
            Status.FAILS,
            f"no shared memory: {error.strerror}",
            "Raise the container's memory limit and allow memfd_create and SCM_RIGHTS in its seccomp profile.",
        )
    return Finding(Status.WORKS, f"memfd with seals, passed as a descriptor; {_available_memory()}")


def _pass_on(fd: int) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with one, other:
        socket.send_fds(one, [b"x"], [fd])
        _, fds, _, _ = socket.recv_fds(other, 1, 1)
        for each in fds:
            os.close(each)


def _available_memory() -> str:
    available = available_memory()
    return "memory unknown" if available is None else _memory_text(available, memory_left())


def _memory_text(machine: int, container: int | None) -> str:
    if container is None or machine <= container:
        return f"{machine / 2**30:.1f} GiB of memory available"
    return f"{max(container, 0) / 2**30:.1f} GiB of memory available within the limit of the container (cgroup)"


def descriptors() -> Finding:
    """The limit of open files. A trainer needs about ten for each worker."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _DESCRIPTORS:
        return Finding(
            Status.LIMITED,
            f"{soft} open files allowed (at most {hard})",
            f"Run `ulimit -n {_DESCRIPTORS * 4}` before the trainer: it opens about ten files for each worker.",
        )
    return Finding(Status.WORKS, f"{soft} open files allowed")


def loopback() -> Finding:
    """A TCP connection to this host itself."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_LOOKUP_S).close()
    except OSError as error:
        return Finding(
            Status.FAILS, f"no TCP on 127.0.0.1: {error}", "Bring the loopback interface up: `ip link set lo up`."
        )
    return Finding(Status.WORKS, "TCP on 127.0.0.1")


def own_name(lookup: Callable[[str], object] = lambda name: socket.getaddrinfo(name, None)) -> Finding:
    """This host's own name, which gloo, RPC and Ray resolve."""
    name = socket.gethostname()
    failed: list[OSError] = []

    def resolve() -> None:
        try:
            lookup(name)
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=resolve, daemon=True)
    thread.start()
    thread.join(_LOOKUP_S)
    remedy = (
        f"Add '{name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME and TP_SOCKET_IFNAME to the interface to use "
        f"({', '.join(interfaces())})."
    )
    if thread.is_alive():
        return Finding(Status.LIMITED, f"the name server takes more than {_LOOKUP_S:.0f} s for '{name}'", remedy)
    if failed:
        return Finding(Status.LIMITED, f"this host's name '{name}' does not resolve: {failed[0]}", remedy)
    return Finding(Status.WORKS, f"'{name}' resolves")


def interfaces() -> list[str]:
    """The names of this host's network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def torch_distributed() -> Finding:
    """torch.distributed, with gloo or NCCL."""
    import torch.distributed as dist  # noqa: PLC0415 - a second for torch, only where it is asked for

    if not dist.is_available():
        return Finding(Status.FAILS, "this torch has no torch.distributed", "Install a torch that was built with it.")
    backends = [
        name for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if there
    ]
    if not backends:
        return Finding(
            Status.FAILS, "torch.distributed has neither gloo nor NCCL", "Install a torch that was built with gloo."
        )
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen and not set(chosen.split(",")) <= set(interfaces()):
        return Finding(
            Status.FAILS,
            f"GLOO_SOCKET_IFNAME is '{chosen}', which this host does not have",
            f"Set it to one of {', '.join(interfaces())}, or unset it.",
        )
    return Finding(Status.WORKS, f"torch.distributed with {' and '.join(backends)}")


def torch_rpc() -> Finding:
    """torch.distributed.rpc."""
    from torch.distributed import rpc  # noqa: PLC0415

    if not rpc.is_available():
        return Finding(
            Status.FAILS, "this torch has no torch.distributed.rpc", "Install a torch that was built with it."
        )
    return Finding(Status.WORKS, "torch.distributed.rpc")


def ray() -> Finding:
    """Ray, and the room of its object store."""
    version = _version("ray")
    if version is None:
        return Finding(Status.ABSENT, "Ray is not installed", "pip install 'weightsync[ray]'")
    if Path("/dev/shm").is_dir() and not os.access("/dev/shm", os.W_OK):
        remedy = "Ray does not start: mount a tmpfs there that can be written to (docker run --shm-size=8g)."
        return Finding(Status.FAILS, f"Ray {version}; /dev/shm cannot be written to", remedy)
    room = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    free = room.f_bavail * room.f_frsize if room else 0
    if free < _SHARED_MEMORY_NBYTES:
        return Finding(
            Status.LIMITED,
            f"Ray {version}; {free >> 20} MiB free in /dev/shm",
            "Ray keeps objects there and otherwise on a disk: give the container more (docker run --shm-size=8g).",
        )
    return Finding(Status.WORKS, f"Ray {version}; {free / 2**30:.1f} GiB free in /dev/shm")


def torchrl() -> Finding:
    """TorchRL, for its collectors and updaters."""
    version = _version("torchrl")
    if version is None:
        return Finding(Status.ABSENT, "TorchRL is not installed", "pip install 'weightsync[torchrl]'")
    return Finding(Status.WORKS, f"TorchRL {version}")


def engines() -> Finding:
    """vLLM and SGLang, which are not imported: that takes long, and allocates on a GPU."""
    there = [f"{package} {importlib.metadata.version(package)}" for package in _ENGINES if _is_installed(package)]
    if there:
        return Finding(Status.WORKS, f"{', '.join(there)}; servers are reached by URL")
    return Finding(
        Status.ABSENT,
        "neither vLLM nor SGLang is installed here; servers are reached by URL",
        "EngineWeightSyncScheme needs neither for a server that it reaches by URL. To run an engine here: pip install "
        "vllm, or pip install sglang.",
    )


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def cuda() -> Finding:
    """CUDA devices, and which of them reach each other's memory."""
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch is built for CUDA {built}, and no device was found" if built else "torch is built without CUDA"
        remedy = "Weights travel through host memory. GPUs need a driver, and a torch that is built for CUDA."
        return Finding(Status.ABSENT, why, remedy)
    count = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    apart = [
        f"{one}-{other}"
        for one in range(count)
        for other in range(one + 1, count)
        if not torch.cuda.can_device_access_peer(one, other)
    ]
    if apart:
        remedy = (
            "Between these, copies go through host memory: place a worker on its trainer's device where it matters."
        )
        return Finding(Status.LIMITED, f"{names}; no peer access between {', '.join(apart)}", remedy)
    return Finding(Status.WORKS, names)


def java() -> Finding:
    """Java, which TLC needs."""
    from weightsync.model import ToolMissingError  # noqa: PLC0415
    from weightsync.model.toolchain import find_java, java_version  # noqa: PLC0415

    try:
        return Finding(Status.WORKS, f"Java {java_version(find_java())}, for `weightsync check`")
    except ToolMissingError as error:
        return Finding(Status.ABSENT, "no Java for the model checker", str(error))


def _version(package: str) -> str | None:
    try:
        importlib.import_module(package)
        return importlib.metadata.version(package)
    except ImportError:
        return None


def packages() -> str:
    """The versions of the packages that every installation has."""
    own: dict[str, Any] = {name: importlib.metadata.version(name) for name in ("weightsync", "torch", "tensordict")}
    return ", ".join(f"{name} {version}" for name, version in own.items())
