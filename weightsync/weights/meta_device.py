"""Preparing a module that a worker was given: on the meta device without weights, or in shared memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weightsync.errors import LayoutError


def fill_in(module: nn.Module) -> bool:
    """Give a module's meta parameters and buffers memory on the CPU, filled with NaN, or 0 for integers.

    TorchRL's collectors send a policy to their workers without its weights. Ties are kept. Tensors that are not on the
    meta device are not touched.

    Returns:
        Whether anything was on the meta device.

    Raises:
        LayoutError: a non-persistent buffer is on the meta device. Updates do not contain it, so nothing would ever
            fill it. Nothing has changed.
    """
    for name, owner in module.named_modules():
        for key in sorted(owner._non_persistent_buffers_set):
            if _is_meta(owner._buffers.get(key)):
                where = f"{name}.{key}".lstrip(".")
                raise LayoutError(
                    f"'{where}' is on the meta device and not persistent, so no update will fill it: register it as "
                    "persistent, or give it data before the scheme is initialised.",
                    mismatched={where: "is on the meta device, and not persistent"},
                )
    filled: dict[int, Tensor] = {}
    for owner in module.modules():
        for held in (owner._parameters, owner._buffers):
            for key, tensor in held.items():
                if tensor is not None and _is_meta(tensor):
                    held[key] = filled.setdefault(id(tensor), _filled(tensor))  # type: ignore[assignment]
    return bool(filled)


def unshare(module: nn.Module) -> None:
    """Move a module's parameters and buffers out of shared memory into memory of their own. Ties are kept.

    Tensors that `multiprocessing` passes to a process stay shared with the trainer and all other workers. A version
    applied by one process would then be live in all of them, in the middle of their forward passes.
    """
    copies: dict[int, torch.UntypedStorage] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type == "cpu" and tensor.is_shared():  # type: ignore[no-untyped-call]
            shared = tensor.untyped_storage()
            own = copies.setdefault(shared.data_ptr(), shared.clone())  # type: ignore[no-untyped-call]
            moved = torch.empty(0, dtype=tensor.dtype)
            moved.set_(own, tensor.storage_offset(), tensor.shape, tensor.stride())
            tensor.data = moved


def is_on_meta(module: nn.Module) -> bool:
    """Whether any parameter or buffer of a module is on the meta device."""
    return any(_is_meta(tensor) for tensor in (*module.parameters(), *module.buffers()))


def _is_meta(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_meta


def _filled(tensor: Tensor) -> Tensor:
    value = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    filled = torch.full(tensor.shape, value, dtype=tensor.dtype, device="cpu")
    return nn.Parameter(filled, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else filled
