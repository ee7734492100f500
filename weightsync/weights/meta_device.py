"""Modules as they come to a worker: without weights, on the meta device, or in memory that others have too."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weightsync.errors import LayoutError


def fill_in(module: nn.Module) -> bool:
    """Give a module's meta parameters and buffers memory on the CPU: NaN where that can be said, 0 elsewhere.

    TorchRL's collectors send a policy to their workers without its weights. Ties are kept; what is not on the meta
    device is not touched.

    Returns:
        Whether anything was on the meta device.

    Raises:
        LayoutError: a buffer that does not travel (it is not persistent) is on the meta device: nothing would ever
            fill it. Nothing has changed.
    """
    for name, owner in module.named_modules():
        for key in sorted(owner._non_persistent_buffers_set):
            if _is_blank(owner._buffers.get(key)):
                where = f"{name}.{key}".lstrip(".")
                raise LayoutError(
                    f"'{where}' is on the meta device, and no weights bring it: it is not persistent.",
                    mismatched={where: "is on the meta device, and not persistent"},
                )
    filled: dict[int, Tensor] = {}
    for owner in module.modules():
        for held in (owner._parameters, owner._buffers):
            for key, tensor in held.items():
                if tensor is not None and _is_blank(tensor):
                    held[key] = filled.setdefault(id(tensor), _filled(tensor))  # type: ignore[assignment]
    return bool(filled)


def unshare(module: nn.Module) -> None:
    """Give a module's parameters and buffers that lie in shared memory memory of their own. Ties are kept.

    What `multiprocessing` hands to a process stays shared: the module would be the trainer's and every sibling's too,
    and a version that one of them applies would be live in all of them, in the middle of their forward passes.
    """
    copies: dict[int, torch.UntypedStorage] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type == "cpu" and tensor.is_shared():  # type: ignore[no-untyped-call]
            shared = tensor.untyped_storage()
            own = copies.setdefault(shared.data_ptr(), shared.clone())  # type: ignore[no-untyped-call]
            moved = torch.empty(0, dtype=tensor.dtype)
            moved.set_(own, tensor.storage_offset(), tensor.shape, tensor.stride())
            tensor.data = moved


def is_blank(module: nn.Module) -> bool:
    """Whether any of a module's parameters and buffers is on the meta device."""
    return any(_is_blank(tensor) for tensor in (*module.parameters(), *module.buffers()))


def _is_blank(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_meta


def _filled(tensor: Tensor) -> Tensor:
    nothing = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    found = torch.full(tensor.shape, nothing, dtype=tensor.dtype, device="cpu")
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found
