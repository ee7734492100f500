"""`VLLMIPCCarrier`: vLLM's workers read tensors from the trainer's memory, on the GPUs that both use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from weightsync.errors import ConfigurationError
from weightsync.options import items_of
from weightsync.schemes.engines.carrier import Carrier
from weightsync.schemes.engines.client import Bucket
from weightsync.schemes.engines.nccl import cuda_device


class VLLMIPCCarrier(Carrier):
    """The trainer's half of vLLM's backend "ipc", for trainer and engine on the same GPUs; needs vLLM 0.22 or later.

    Each GPU of the engine gets a copy of each tensor, and the calls say where it is. The copies stay until the version
    is finished, so each GPU needs room for the whole model. A server is started with
    ``VLLM_ALLOW_INSECURE_SERIALIZATION=1`` and ``--weight-transfer-config '{"backend": "ipc"}'``. vLLM need not be
    installed in the trainer's environment.

    Args:
        devices: the engine's GPUs, as the trainer's process numbers them; None: its current CUDA device.

    Raises:
        ConfigurationError: there is no CUDA here, or a device is not a GPU.
    """

    def __init__(self, devices: Sequence[torch.device | str | int] | None = None) -> None:
        wanted: list[Any] = [None] if devices is None else items_of(devices) or []
        self._devices = [cuda_device(each, type(self).__name__) for each in wanted]
        others = [str(each) for each in self._devices if each.type != "cuda"]
        if others or not self._devices:
            raise ConfigurationError(f"devices= is {devices!r}: give a list of the GPUs that the engine runs on.")
        self._shared: list[Tensor] = []

    def update_info(self, bucket: Bucket) -> Mapping[str, Any]:
        """Handles of copies on each GPU, one mapping for each tensor."""
        handles = [dict(self._exported(tensor, device) for device in self._devices) for _, tensor in bucket]
        for device in self._devices:
            torch.cuda.synchronize(device)  # the engine reads them from another process, not in a stream of ours
        return {"ipc_handles": handles}

    def done(self) -> None:
        """Free the copies: the version's calls are over."""
        self._shared.clear()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    def _exported(self, tensor: Tensor, device: torch.device) -> tuple[str, tuple[Any, ...]]:
        """The GPU's id, and the handle that opens the copy in another process."""
        copy = tensor.to(device).contiguous()
        self._shared.append(copy)
        _, handle = reduce_tensor(copy)  # type: ignore[no-untyped-call]
        return str(torch.cuda.get_device_properties(device).uuid), handle
