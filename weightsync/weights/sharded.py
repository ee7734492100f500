"""Weights whose tensors are sharded over the ranks of a process group: DTensors, as FSDP2 and tensor parallelism make.

No message is exchanged here but by `DTensor.full_tensor`, which every rank of a tensor's mesh must call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
import xxhash
from tensordict import TensorDictBase
from torch import Tensor, nn

from weightsync.errors import LayoutError
from weightsync.weights.extra_state import is_fsdp
from weightsync.weights.layout import quoted
from weightsync.weights.reading import Weights, read_shards
from weightsync.weights.tensors import DTYPE_NAMES, is_dtensor, why_unsupported


class ShardedWeights:
    """This rank's part of a model.

    Args:
        source: a module, a TensorDict or a dict. A LoRA module is not merged.

    Raises:
        ConfigurationError: the source or a value in it is of an unsupported type.
        LayoutError: a tensor cannot be sent even when it is whole.
    """

    def __init__(self, source: object) -> None:
        self._weights: Weights = read_shards(_reshard(source))
        for name, tensor in self._weights.tensors.items():
            why = "" if is_dtensor(tensor) else why_unsupported(tensor)
            why = why or ("" if tensor.dtype in DTYPE_NAMES else f"has the dtype {tensor.dtype}, which cannot be sent")
            if why:
                raise LayoutError(f"{quoted(name)} {why}.", mismatched={name: why})

    @property
    def fingerprint(self) -> bytes:
        """16 bytes, equal on ranks whose tensors have the same order, names, whole shapes, dtypes and placements.

        Meshes count by their shapes: data-parallel replicas of a tensor-parallel model have a mesh each.
        """
        return xxhash.xxh3_128_digest(
            repr([_describe_tensor(*item) for item in self._weights.tensors.items()]).encode()
        )

    @property
    def groups(self) -> list[Any]:
        """The process groups over which `gather` communicates."""
        meshes = {id(t.device_mesh): t.device_mesh for t in self._weights.tensors.values() if is_dtensor(t)}
        return [group for mesh in meshes.values() for group in mesh.get_all_groups()]

    def gather(self, before_each: Callable[[], None]) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor whole, one at a time, in the same order on every rank; replicated ones are this rank's.

        Args:
            before_each: called before each tensor that is gathered.
        """
        with torch.no_grad():
            for name, tensor in self._weights.tensors.items():
                if is_dtensor(tensor):
                    before_each()
                    yield name, _on_mesh_device(tensor).full_tensor()
                else:
                    yield name, tensor.detach()

    def extras(self) -> dict[str, Any]:
        """This rank's extra state, by module."""
        return self._weights.extras()


def is_sharded(source: object) -> bool:
    """Whether this rank holds only its shards of a source: FSDP2 has wrapped a module of it, or it has DTensors.

    Nothing is imported: who made a DTensor has imported what makes them.
    """
    if isinstance(source, nn.Module) and any(map(is_fsdp.__getitem__, map(ref, map(type, source.modules())))):
        return True
    return any(isinstance(each, Tensor) and is_dtensor(each) for each in _values(source))


def _values(source: object) -> Iterator[object]:
    if isinstance(source, TensorDictBase):
        yield from source.values(include_nested=True, leaves_only=True)
    elif isinstance(source, nn.Module):
        yield from source.parameters()
        yield from source.buffers()
    elif isinstance(source, Mapping):
        for value in source.values():
            yield from _values(value) if isinstance(value, Mapping) else (value,)


def _reshard(source: object) -> object:
    """The source, whose parameters are shards again: those that a forward pass made whole may be older."""
    modules: Iterable[Any] = source.modules() if isinstance(source, nn.Module) else ()
    for module in modules:
        if is_fsdp[ref(type(module))]:
            module.reshard()
    return source


def _on_mesh_device(tensor: Any) -> Any:
    """A DTensor whose shard is where its mesh communicates. FSDP2's CPUOffloadPolicy keeps shards on the CPU."""
    mesh, here = tensor.device_mesh, f"{tensor.device.type}:"
    if all(here in dist.get_backend_config(group) for group in mesh.get_all_groups()):
        return tensor
    return tensor.to(mesh.device_type)


def _describe_tensor(name: str, tensor: Tensor) -> tuple[str, str, tuple[int, ...], str]:
    spread = f"{tuple(tensor.device_mesh.shape)} {tensor.placements}" if is_dtensor(tensor) else ""
    return name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), spread
