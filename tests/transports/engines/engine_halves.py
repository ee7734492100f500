"""Stand-ins for the packages `vllm` and `sglang`: the functions that carriers call, and the engine's half of transfers.

Names, arguments and the fields of messages are those of vLLM 0.33 and SGLang 0.5. Tensors travel over sockets, or are
read from the trainer's memory.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
import socket
import sys
import threading
import weakref
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from engine_server import PATIENCE
from torch import Tensor, nn

from weightsync import EngineWeightSyncScheme
from weightsync.clock import Deadline
from weightsync.schemes.engines.client import Bucket, Engine
from weightsync.schemes.engines.ipc import VLLMIPCCarrier

#: The UUID of the only GPU in these tests.
GPU = "GPU-4711"
MIB = 1 << 20


class Wire:
    """A stand-in for NCCL: rank 0 has a connection to each other rank, and sends tensors as pickles."""

    #: While this is set, a broadcast hangs until its group is ended, as if the peer were gone.
    hangs = threading.Event()
    #: Set once a broadcast hangs.
    hanging = threading.Event()

    def __init__(self, address: str, port: int, rank: int, world_size: int) -> None:
        self._rank = rank
        self._ended = threading.Event()
        if rank == 0:
            with socket.create_server((address, port)) as listener:
                listener.settimeout(PATIENCE)
                self._peers = [listener.accept()[0] for _ in range(world_size - 1)]
        else:
            self._peers = [self._reached(address, port)]
        self._files = [peer.makefile("rwb") for peer in self._peers]

    @staticmethod
    def _reached(address: str, port: int) -> socket.socket:
        deadline = Deadline(PATIENCE)
        while True:
            try:
                return socket.create_connection((address, port), PATIENCE)
            except ConnectionRefusedError:
                assert not deadline.passed, "rank 0 never listened"

    def carry(self, tensor: Tensor) -> None:
        if self.hangs.is_set():
            self.hanging.set()
            assert self._ended.wait(PATIENCE)
            raise RuntimeError("NCCL error: communicator was aborted")
        for file in self._files:
            if self._rank == 0:
                pickle.dump(tensor, file)
                file.flush()
            else:
                tensor.copy_(pickle.load(file))

    def end(self) -> None:
        self._ended.set()
        for peer, file in zip(self._peers, self._files, strict=True):
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                file.close()
            peer.close()


# ------------------------------------------------------------------------------------------------------- vLLM


@dataclass(kw_only=True)
class NCCLWeightTransferInitInfo:
    master_address: str | None = None
    master_port: int | None = None
    rank_offset: int
    world_size: int
    nccl_unique_id_b64: str | None = None
    packed: bool = False
    packed_buffer_size_bytes: int = 1024 * MIB
    packed_num_buffers: int = 2


@dataclass
class NCCLWeightTransferUpdateInfo:
    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)


class Communicator:
    """A stand-in for vLLM's ``PyNcclCommunicator``."""

    def __init__(self, address: str, port: int, rank: int, world_size: int) -> None:
        self.disabled = False
        self._wire = Wire(address, port, rank, world_size)

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        assert src == 0
        self._wire.carry(tensor)

    def destroy(self) -> None:
        self._wire.end()


def trainer_init(init_info: Any, rank: int = 0) -> Communicator:
    return Communicator(init_info["master_address"], init_info["master_port"], rank, init_info["world_size"])


class NCCLHalf:
    """A stand-in for vLLM's ``NCCLWeightTransferEngine`` in one of its workers."""

    def __init__(self) -> None:
        self.group: Communicator | None = None
        self.ports: list[int] = []

    def init(self, info: dict[str, Any]) -> None:
        given = NCCLWeightTransferInitInfo(**info)
        assert given.master_address is not None
        assert given.master_port is not None
        self.ports.append(given.master_port)
        self.end()
        self.group = Communicator(given.master_address, given.master_port, given.rank_offset, given.world_size)

    def receive(self, info: dict[str, Any]) -> Bucket:
        given = NCCLWeightTransferUpdateInfo(**info)
        assert self.group is not None, "init_transfer_engine() comes first"
        found = empty(given.names, given.dtype_names, given.shapes)
        for _, tensor in found:
            self.group.broadcast(tensor, 0)
        return found

    def start(self) -> None:
        """Do nothing."""

    def finish(self) -> Bucket:
        return []

    def end(self) -> None:
        if self.group is not None:
            self.group.destroy()


def empty(names: list[str], dtypes: list[str], shapes: list[list[int]]) -> Bucket:
    """Named empty tensors to receive into."""
    return [
        (name, torch.empty(shape, dtype=getattr(torch, dtype)))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]


@dataclass
class IPCWeightTransferUpdateInfo:
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    ipc_handles: list[dict[str, tuple[Any, ...]]] | None = None
    ipc_handles_pickled: str | None = None
    tensor_sizes: list[int] | None = None

    def __post_init__(self) -> None:
        if self.ipc_handles_pickled is not None:
            assert self.ipc_handles is None
            self.ipc_handles = pickle.loads(base64.b64decode(self.ipc_handles_pickled))
        assert self.ipc_handles is not None
        assert len(self.ipc_handles) == len(self.names)


#: The tensors that the trainer exports, as another process sees them: those it has freed are missing.
MEMORY: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


class PosedIPC(VLLMIPCCarrier):
    """A carrier that exports tensors to `MEMORY` instead of a GPU's memory."""

    def _exported(self, tensor: Tensor, device: torch.device) -> tuple[str, tuple[Any, ...]]:
        copy = tensor.clone()
        self._shared.append(copy)
        MEMORY[id(copy)] = copy
        return GPU, (id(copy),)


class IPCHalf:
    """A stand-in for vLLM's ``IPCWeightTransferEngine``. It reads the trainer's memory again in `finish`."""

    def __init__(self) -> None:
        self._views: list[tuple[str, int]] = []

    def init(self, info: dict[str, Any]) -> None:
        assert info.keys() <= {"packed"}

    def start(self) -> None:
        self._views = []

    def receive(self, info: dict[str, Any]) -> Bucket:
        given = IPCWeightTransferUpdateInfo(**info)
        handles = [handle[GPU][0] for handle in given.ipc_handles or []]
        self._views += zip(given.names, handles, strict=True)
        return [(name, MEMORY[handle].clone()) for name, handle in zip(given.names, handles, strict=True)]

    def finish(self) -> Bucket:
        return [(name, MEMORY[handle].clone()) for name, handle in self._views]

    def end(self) -> None:
        """Do nothing."""


# ----------------------------------------------------------------------------------------------------- SGLang


class Work:
    """A stand-in for torch's ``Work``, of a broadcast that is complete or never will be."""

    def __init__(self, over: bool) -> None:
        self._over = over

    def is_completed(self) -> bool:
        return self._over

    def wait(self) -> bool:
        assert self._over
        return True


class Group:
    """A stand-in for torch's ``ProcessGroup``."""

    def __init__(self, address: str, port: int, rank: int, world_size: int) -> None:
        self._wire = Wire(address, port, rank, world_size)

    def broadcast(self, tensors: list[Tensor]) -> Work:
        if Wire.hangs.is_set():
            Wire.hanging.set()
            return Work(False)
        for tensor in tensors:
            self._wire.carry(tensor)
        return Work(True)

    def abort(self) -> None:
        self._wire.end()


def init_custom_process_group(  # noqa: PLR0917 - as SGLang has it
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Any = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str | None = None,
    pg_options: Any = None,
    device_id: Any = None,
) -> Group:
    assert backend == "gloo"
    assert group_name
    address, _, port = (init_method or "").removeprefix("tcp://").partition(":")
    return Group(address, int(port), rank, world_size)


class SGLangHalf:
    """An SGLang worker's part of ``update_weights_from_distributed``."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}

    def init(self, body: dict[str, Any]) -> None:
        self.end()
        where = f"tcp://{body['master_address']}:{body['master_port']}"
        self.groups[body["group_name"]] = init_custom_process_group(
            body["backend"],
            where,
            world_size=body["world_size"],
            rank=body["rank_offset"],
            group_name=body["group_name"],
        )

    def receive(self, body: dict[str, Any]) -> Bucket:
        found = empty(body["names"], body["dtypes"], body["shapes"])
        self.groups[body["group_name"]].broadcast([tensor for _, tensor in found])
        return found

    def end(self) -> None:
        for group in self.groups.values():
            group.abort()


# ------------------------------------------------------------------------------------------------ the packages


def install(patch: pytest.MonkeyPatch, contents: dict[str, dict[str, Any]]) -> None:
    """Make modules and their parent packages importable until the end of a test."""
    for name, members in contents.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            if path not in sys.modules:
                patch.setitem(sys.modules, path, ModuleType(path))
        vars(sys.modules[name]).update(members)


def install_vllm(patch: pytest.MonkeyPatch) -> None:
    install(patch, {"vllm.distributed.weight_transfer.nccl_common": {"trainer_init": trainer_init}})


def install_older_vllm(patch: pytest.MonkeyPatch) -> None:
    """Install a vLLM as before 0.24, where ``trainer_init`` was a static method."""
    engine = type("NCCLWeightTransferEngine", (), {"trainer_init": staticmethod(trainer_init)})
    install(patch, {"vllm.distributed.weight_transfer.nccl_engine": {"NCCLWeightTransferEngine": engine}})


def install_sglang(patch: pytest.MonkeyPatch) -> None:
    install(patch, {"sglang.srt.utils": {"init_custom_process_group": init_custom_process_group}})


def scheme_with(engine: Engine, source: nn.Module, **options: Any) -> EngineWeightSyncScheme:
    """A scheme with this engine as its only worker."""
    scheme = EngineWeightSyncScheme(**options)
    scheme.init_on_sender("policy", engines=[engine], model=source)
    return scheme
