"""Prepares a worker's module that is on the meta device (without weights), or in shared memory."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable
from typing import Final

import torch
from tensordict import TensorDictParams
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef, shared_cache
from torch.nn.parameter import is_lazy

from weightsync.errors import LayoutError
from weightsync.weights.device.registry import devices_of


def fill_in(module: nn.Module) -> bool:
    """Give a module's meta parameters and buffers memory on the CPU, filled with NaN, or 0 for integers.

    TorchRL's collectors send a policy to their workers without its weights. Ties are kept. Tensors that are not on the
    meta device are not touched.

    Returns:
        Whether anything was on the meta device.

    Raises:
        LayoutError: a non-persistent buffer is on the meta device. Updates do not contain it, so nothing would ever
            fill it. Or accelerate has offloaded the module's weights. Nothing has changed.
    """
    _refuse_offloaded(module)
    for name, owner in module.named_modules():
        for key in sorted(owner._non_persistent_buffers_set):
            if _is_meta(owner._buffers.get(key)):
                path = f"{name}.{key}".lstrip(".")
                raise LayoutError(
                    f"'{path}' is on the meta device and not persistent, so no update will fill it: register it as "
                    "persistent, give it data before the scheme is initialised, or give a TorchRL collector "
                    "policy_factory=.",
                    mismatched={path: "is on the meta device, and not persistent"},
                )
    # First: other modules may share its tensors.
    tensordicts_filled = [_fill_in_place(owner) for owner in module.modules() if isinstance(owner, TensorDictParams)]
    filled: dict[int, Tensor] = {}
    for owner in module.modules():
        for tensors in (owner._parameters, owner._buffers):
            for key, tensor in tensors.items():
                # A lazy one has no shape yet, so it gets no memory: the target refuses it by name.
                if tensor is not None and tensor.is_meta and not is_lazy(tensor):
                    tensors[key] = filled.setdefault(id(tensor), _make_filled(tensor))  # type: ignore[assignment]
    return bool(filled) or any(tensordicts_filled)


def give_memory(model: object) -> bool:
    """Give a module on the meta device memory for a receiver. Returns whether it has no weights yet.

    A module that an earlier call has given memory has none until a version is applied to it.

    Raises:
        LayoutError: as `fill_in`.
    """
    if not isinstance(model, nn.Module):
        return False
    if fill_in(model):
        _filled_in[id(model)] = model
        return True
    return lacks_weights(model)


def _refuse_offloaded(module: nn.Module) -> None:
    """Raise LayoutError if accelerate keeps the weights elsewhere: it would replace each version by these."""
    on_meta = (name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta)
    name = next(on_meta, None)
    if name is not None and any(_ACCELERATES_HOOK in vars(owner) for owner in module.modules()):
        raise LayoutError(
            f"'{name}' is on the meta device because accelerate has offloaded it: before each forward its hook puts "
            "the offloaded weights in the place of those that were received. Give the worker a model that is not "
            "offloaded (no cpu_offload(), disk_offload(), or device_map= that offloads).",
            mismatched={name: "is offloaded by accelerate"},
        )


#: The attribute of a module in which accelerate keeps the hook that it runs around the module's forward.
_ACCELERATES_HOOK: Final = "_hf_hook"


def lacks_weights(module: nn.Module) -> bool:
    """Whether a module is on the meta device, or was given memory that nothing has been written into since."""
    if _filled_in.get(id(module)) is not module or is_on_meta(module):
        return is_on_meta(module)
    return any(map(_is_nan, (*module.parameters(), *module.buffers())))


#: The modules that were given memory, by id.
_filled_in: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


def _is_nan(tensor: Tensor) -> bool:
    """Whether all numbers are NaN, as in memory that was just given."""
    return tensor.is_floating_point() and tensor.numel() > 0 and bool(tensor.detach().float().isnan().all())


def _fill_in_place(owner: TensorDictParams) -> bool:
    """Give the tensors on the meta device memory; whether there were any. They remain the same objects.

    They are those of its TensorDict: TorchRL's collectors exchange these, and not what it has as a module.
    """
    on_meta = [tensor for tensor in owner.values(True, True) if isinstance(tensor, Tensor) and tensor.is_meta]
    for tensor in on_meta:
        torch.utils.swap_tensors(tensor, _make_filled(tensor))  # type: ignore[no-untyped-call]
    if on_meta:
        owner.auto_device_()
        owner.update({})  # so that it reads its parameters and buffers again
    return bool(on_meta)


def unshare(tensors: Iterable[Tensor]) -> bool:
    """Move tensors out of shared memory into memory of their own; whether any was there. Ties are kept.

    Tensors that `multiprocessing` passes to a process stay shared with the trainer and all other workers. A version
    applied by one process would then be live in all of them, in the middle of their forward passes; and in the trainer
    it would replace newer weights.
    """
    copies: dict[int, torch.UntypedStorage] = {}
    # Torch calls all memory of a GPU shared. Here it notes what was passed to this process, or by it.
    passed = set(list(shared_cache.values()))  # noqa: C414 - another thread may add to them while they are hashed
    for tensor in tensors:
        if _is_shared(tensor, passed):
            shared = tensor.untyped_storage()
            if shared.data_ptr() not in copies:
                copies[shared.data_ptr()] = shared.clone()  # type: ignore[no-untyped-call]
                for device in devices_of((tensor,)):
                    device.finish()  # torch unmaps a GPU's memory with its last tensor, also during a copy of it
            with torch.inference_mode(tensor.is_inference()):
                moved = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                moved.set_(copies[shared.data_ptr()], tensor.storage_offset(), tensor.shape, tensor.stride())
                tensor.data = moved
    return bool(copies)


def _is_shared(tensor: Tensor, passed: Container[StorageWeakRef]) -> bool:
    if tensor.device.type == "cpu":
        return tensor.is_shared()  # type: ignore[no-any-return, no-untyped-call]
    return StorageWeakRef(tensor.untyped_storage()) in passed  # type: ignore[no-untyped-call]


def is_on_meta(module: nn.Module) -> bool:
    """Whether any parameter or buffer of a module is on the meta device."""
    return any(_is_meta(tensor) for tensor in (*module.parameters(), *module.buffers()))


def _is_meta(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_meta


def _make_filled(tensor: Tensor) -> Tensor:
    value = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    filled = torch.full_like(tensor, value, device="cpu")
    return nn.Parameter(filled, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else filled
