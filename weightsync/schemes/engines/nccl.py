"""Carriers that broadcast tensors in a group where the trainer is rank 0: `VLLMNCCLCarrier`, `SGLangNCCLCarrier`."""

from __future__ import annotations

import abc
import contextlib
import importlib
import secrets
import socket
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor

from weightsync.engine.context import MISSING, optional
from weightsync.errors import ConfigurationError, TransportError
from weightsync.options import whole_number
from weightsync.schemes.engines.carrier import Carrier
from weightsync.schemes.engines.client import Bucket

#: Seconds between two checks of a broadcast, so that `GroupCarrier.give_up` is noticed.
_STEP: Final = 0.0005


def cuda_device(device: torch.device | str | int | None, what: str) -> torch.device:
    """The device that a carrier's tensors are on; None: the current CUDA device.

    Raises:
        ConfigurationError: it is no device, or it is a CUDA device, and there is no CUDA.
    """
    device_or_index: Any = "cuda" if device is None else device
    index = whole_number(device_or_index)
    try:
        found_device = torch.device(device_or_index) if index is None else torch.device("cuda", index)
    except (RuntimeError, TypeError):
        raise ConfigurationError(f"{what}: {device!r} is no device: give 'cuda:0', for example.") from None
    if found_device.type != "cuda":
        return found_device
    if not torch.cuda.is_available():
        raise ConfigurationError(
            f"{what} needs a CUDA device in the trainer's process, and torch finds none. Run the trainer on a GPU, or "
            "have the tensors travel in the calls: SGLangEngine(url) without a carrier, or a loader in the engine's "
            "process (docs/engines.md)."
        )
    return torch.device("cuda", torch.cuda.current_device()) if found_device.index is None else found_device


class GroupCarrier(Carrier):
    """Broadcasts each tensor of a bucket to an engine's workers, in a group in which the trainer is rank 0.

    A group that was given up is never used again: the next `join` makes another.

    Args:
        world_size: the engine's GPUs, and one for the trainer.
        master_address: this machine's address, as the engine's workers reach it.
        master_port: where the group meets; None: a free port, another for each group.
        device: where the tensors are broadcast from; None: the current CUDA device.

    Raises:
        ConfigurationError: the engine's package or CUDA is missing, ``world_size`` is not an int of 2 or more, or
            ``master_port`` is not the number of a port.
    """

    def __init__(
        self,
        world_size: int,
        *,
        master_address: str = "localhost",
        master_port: int | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        self._join = self._find_join()
        size, port = whole_number(world_size), None if master_port is None else whole_number(master_port)
        if size is None or size < 2:
            raise ConfigurationError(
                f"world_size= is {world_size!r}: it counts the trainer and each GPU of the engine, so it is 2 or "
                "more, as an int."
            )
        if master_port is not None and port is None:
            raise ConfigurationError(f"master_port= is {master_port!r}: give the number of a port, or None for any.")
        self._device = cuda_device(device, type(self).__name__)
        self._world_size, self._address, self._fixed_port = size, master_address, port
        self._port = port or 0
        self._lock = threading.Lock()
        self._group: Any = None
        self._given_up = threading.Event()
        self._stream: Any = None

    def init_info(self) -> Mapping[str, Any]:
        """The address and the size of the group."""
        with self._lock:
            self._given_up = threading.Event()
        self._port = self._fixed_port or _free_port()
        return {
            "master_address": self._address,
            "master_port": self._port,
            "rank_offset": 1,
            "world_size": self._world_size,
        }

    def join(self) -> None:
        """Join the group as rank 0. Blocks until all workers of the engine have joined.

        Raises:
            TransportError: `give_up` was called meanwhile. The group is ended.
        """
        given_up = self._given_up
        with self._on_device():
            group = self._open(self._port)
        with self._lock:
            if not given_up.is_set():
                self._group = group
                return
        self._end(group)
        raise TransportError("The engine gave up, or the link was closed, before all had joined the group.")

    def update_info(self, bucket: Bucket) -> Mapping[str, Any]:
        """Empty: names, dtypes and shapes are enough."""
        return {}

    def send(self, bucket: Bucket) -> None:
        """Broadcast the tensors in their order, and wait until the last has left.

        Args:
            bucket: names and tensors; each is copied to the carrier's device first.

        Raises:
            TransportError: the group was given up before, or during the broadcast. The engine may have some of them.
        """
        given_up, group = self._given_up, self._group
        if group is None:
            raise TransportError("The process group with the engine was aborted: call add_worker() for it again.")
        with self._on_device():
            staged = [tensor.to(self._device).contiguous() for _, tensor in bucket]
            works = [self._broadcast(group, tensor) for tensor in staged]
            self._wait_until_sent([work for work in works if work is not None], given_up)

    def give_up(self) -> None:
        """End the group, and a broadcast in progress."""
        with self._lock:
            self._given_up.set()
            group, self._group = self._group, None
        if group is not None:
            self._end(group)

    @abc.abstractmethod
    def _find_join(self) -> Any:
        """The engine's function that joins a group. Raises ConfigurationError: its package is missing."""

    @abc.abstractmethod
    def _open(self, port: int) -> Any:
        """The group, of which this process is rank 0. Blocks until all have joined."""

    @abc.abstractmethod
    def _broadcast(self, group: Any, tensor: Tensor) -> Any:
        """Begin a broadcast of a tensor from rank 0. Returns torch's ``Work``; None: the stream shows its end."""

    @abc.abstractmethod
    def _end(self, group: Any) -> None:
        """Abort the group."""

    def _on_device(self) -> AbstractContextManager[Any]:
        """Tensors are copied and broadcast in a stream of the carrier's own, so that no kernel of the trainer waits."""
        if self._device.type != "cuda":
            return contextlib.nullcontext()
        self._stream = self._stream or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        found: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return found

    def _wait_until_sent(self, works: list[Any], given_up: threading.Event) -> None:
        """Wait until everything is sent, unless the group is given up: with a lost peer the wait would never end."""
        checks = [work.is_completed for work in works]
        if self._stream is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
            checks.append(event.query)
        for is_completed in checks:
            while not is_completed() and not given_up.is_set():
                given_up.wait(_STEP)
        if given_up.is_set():
            raise TransportError("The engine gave up, or the link was closed, during a broadcast.")
        for work in works:
            work.wait()  # raises if it failed


class VLLMNCCLCarrier(GroupCarrier):
    """The trainer's half of vLLM's backend "nccl", with vLLM's own communicator: vLLM must be installed here too.

    The server is started with ``--weight-transfer-config '{"backend": "nccl"}'``. Tensors are broadcast one by one;
    vLLM's packed form is not used.

    Args:
        world_size: the engine's GPUs, and one for the trainer.
        master_address: this machine's address, as the engine's workers reach it.
        master_port: where the group meets; None: a free port, another for each group.
        device: where the tensors are broadcast from; None: the current CUDA device.

    Raises:
        ConfigurationError: vLLM cannot be imported, there is no CUDA, or ``world_size`` is less than 2.
    """

    def _find_join(self) -> Any:
        return _vllm_join()

    def _open(self, port: int) -> Any:
        where = {"master_address": self._address, "master_port": port, "world_size": self._world_size}
        group = self._join(where)
        if optional(group, "disabled") is True:
            raise ConfigurationError("vLLM's communicator is disabled here: it found no NCCL library. Install one.")
        return group

    def _broadcast(self, group: Any, tensor: Tensor) -> Any:
        group.broadcast(tensor, src=0, stream=self._stream)

    def _end(self, group: Any) -> None:
        destroy = optional(group, "destroy")
        if destroy is not MISSING:  # releases before 0.20 end a communicator when it is garbage-collected
            destroy()


class SGLangNCCLCarrier(GroupCarrier):
    """The trainer's half of SGLang's ``update_weights_from_distributed``: SGLang must be installed here too.

    It joins with SGLang's own ``init_custom_process_group``, with a new name for each group. For the other arguments
    see `GroupCarrier`.

    Args:
        world_size: the engine's GPUs, and one for the trainer.
        master_address: this machine's address, as the engine's workers reach it.
        master_port: where the group meets; None: a free port, another for each group.
        device: where the tensors are broadcast from; None: the current CUDA device.
        backend: torch.distributed's: "nccl" (default); "gloo" with ``device="cpu"``.
    """

    def __init__(
        self,
        world_size: int,
        *,
        master_address: str = "localhost",
        master_port: int | None = None,
        device: torch.device | str | int | None = None,
        backend: str = "nccl",
    ) -> None:
        super().__init__(world_size, master_address=master_address, master_port=master_port, device=device)
        self._backend = backend
        self._name = ""

    def _find_join(self) -> Any:
        return _import_function("sglang.srt.utils", "init_custom_process_group", "SGLangNCCLCarrier", "sglang")

    def init_info(self) -> Mapping[str, Any]:
        """The address, the size, the name and the backend of the group."""
        self._name = f"weightsync_{secrets.token_hex(4)}"
        return {**super().init_info(), "group_name": self._name, "backend": self._backend}

    def update_info(self, bucket: Bucket) -> Mapping[str, Any]:
        """The group's name."""
        return {"group_name": self._name}

    def _open(self, port: int) -> Any:
        return self._join(
            backend=self._backend,
            init_method=f"tcp://{self._address}:{port}",
            world_size=self._world_size,
            rank=0,
            group_name=self._name,
        )

    def _broadcast(self, group: Any, tensor: Tensor) -> Any:
        return group.broadcast([tensor])  # from rank 0

    def _end(self, group: Any) -> None:
        group.abort()


def _vllm_join() -> Any:
    """vLLM's ``trainer_init``: a function of its own since 0.24, before that a method of the engine's half."""
    with contextlib.suppress(ConfigurationError):
        return _import_function(
            "vllm.distributed.weight_transfer.nccl_common", "trainer_init", "VLLMNCCLCarrier", "vllm"
        )
    engine = _import_function(
        "vllm.distributed.weight_transfer.nccl_engine", "NCCLWeightTransferEngine", "VLLMNCCLCarrier", "vllm"
    )
    return engine.trainer_init


def _import_function(module: str, name: str, what: str, package: str) -> Any:
    """An engine's own function. Raises ConfigurationError: its package is missing, or has no such function."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"{what} joins the engine's group by {module}.{name}, which cannot be imported here ({error}). Install the "
            f"engine's release of {package} in the trainer's environment, or write a Carrier of your own "
            "(docs/engines.md)."
        ) from error


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])
