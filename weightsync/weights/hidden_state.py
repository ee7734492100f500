"""Detects, and refuses, state that a module keeps outside its parameters, persistent buffers and extra state.

An override or a hook puts such state into the module's state dict (as `torch.ao` does with packed quantised weights);
scripted modules do not show it even there. Sending only the rest would leave a worker with part of a model.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from weightsync.errors import LayoutError
from weightsync.weights.layout import listed, quoted
from weightsync.weights.tensors import PLAIN

_STATE_DICT = nn.Module.state_dict
_SAVE = nn.Module._save_to_state_dict

#: For how many models to remember that their state dict has been compared.
_REMEMBERED = 64


def has_own_state_dict(module: nn.Module) -> bool:
    """Whether a module customises its part of the state dict, by an override or by a hook."""
    # Called for each module whenever a model is read. (mypy mistakes the class for an instance, which may lack a hash.)
    if _overrides(type(module)):  # type: ignore[arg-type]
        return True
    if module._state_dict_hooks or module._state_dict_pre_hooks:
        return True
    own = module.__dict__
    return "state_dict" in own or "_save_to_state_dict" in own


@lru_cache(maxsize=1024)
def _overrides(kind: type[Any]) -> bool:
    replaced = kind._save_to_state_dict is not _SAVE or kind.state_dict is not _STATE_DICT
    return replaced or issubclass(kind, torch.jit.ScriptModule)


def refuse_hidden_state(
    root: nn.Module, peculiar: Mapping[str, nn.Module], tensors: Mapping[str, Tensor], extras: Collection[str]
) -> None:
    """Raise LayoutError if the state dict of `root` has an entry that was not read from the model.

    The state dict is computed once for a model, and again when the set of modules that customise it changes.

    Args:
        root: the whole model.
        peculiar: its modules for which `has_own_state_dict` is true, by name.
        tensors: the parameters and persistent buffers that were read, by name.
        extras: the names under which a state dict stores the extra state that was read.
    """
    fingerprint = _fingerprint(peculiar, tensors)
    known = _compared.get(id(root))
    if known is not None and known[0]() is root and known[1] == fingerprint:
        return
    _refuse_invisible_state(peculiar)
    before = list(map(_writes, tensors.values()))
    hidden = dict(_hidden(_state_dict_of(root), tensors, extras))
    for (name, tensor), count in zip(tensors.items(), before, strict=True):
        if _writes(tensor) != count:
            hidden[name] = "is written by state_dict(), from state that is kept elsewhere"
    if hidden:
        raise LayoutError(_message(root, peculiar, hidden), mismatched=hidden)
    if len(_compared) >= _REMEMBERED:
        _compared.clear()
    _compared[id(root)] = weakref.ref(root), fingerprint


_Fingerprint = tuple[object, ...]
_compared: dict[int, tuple[weakref.ref[nn.Module], _Fingerprint]] = {}


def _fingerprint(peculiar: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> _Fingerprint:
    """The properties of a model that must not change for an earlier comparison to remain valid."""
    modules = tuple(
        (name, id(module), type(module), len(module._state_dict_hooks), len(module._state_dict_pre_hooks))
        for name, module in peculiar.items()
    )
    return (*modules, *tensors)


def _refuse_invisible_state(peculiar: Mapping[str, nn.Module]) -> None:
    """Refuse modules whose state cannot be seen in a state dict of one process."""
    # Its state dict is gathered from all processes, so computing it here would wait for them.
    sharding = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    for name, module in peculiar.items():
        if isinstance(module, sharding):
            why = (
                "shards its parameters (FullyShardedDataParallel): send the full state dict that it gathers, or wrap "
                "the model by fully_shard() and call weightsync.send_sharded() on every rank"
            )
        elif isinstance(module, torch.jit.ScriptModule) and _PACKED.search(_code_of(module)):
            why = "is scripted and quantised: its weights are packed and are not tensors"
        else:
            continue
        raise LayoutError(f"{_where(name, module)} {why}.", mismatched={name: why})


def refuse_fsdp(peculiar: Mapping[str, nn.Module]) -> None:
    """Refuse modules that `torch.distributed.fsdp.fully_shard` has wrapped.

    Between two forward passes their parameters may be whole, but need not be those that the optimizer has changed.
    """
    wrapped: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for name, module in peculiar.items():
        if isinstance(module, wrapped):
            why = (
                "is wrapped by fully_shard(): this rank holds only its shards. To send the model, call "
                "weightsync.send_sharded() on every rank; a worker's model must hold plain tensors"
            )
            raise LayoutError(f"{_where(name, module)} {why}.", mismatched={name: why})


def _code_of(module: torch.jit.ScriptModule) -> str:
    code = module.code if module._c._has_method("forward") else ""
    return f"{module._c._type()} {code}"


#: Matches the code or the type of a scripted module with packed weights, which its state dict omits.
_PACKED = re.compile(r"\bops\.quantized\.|\.PackedParameter\b|\.LinearPackedParams\b")


def _state_dict_of(root: nn.Module) -> Mapping[str, Any]:
    try:
        found = _call_state_dict(root)
    except Exception as error:
        message = f"The state of {_name_of(type(root))} cannot be determined: its state_dict() raised {error!r}."
        raise LayoutError(f"{message} {_ADVICE}") from error
    return found


def _call_state_dict(root: nn.Module) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = root.state_dict(keep_vars=True)
    except TypeError:  # an override without arguments
        found = root.state_dict()
    return found


def _writes(tensor: Tensor) -> int:
    """How often the tensor was written; 0 for inference tensors, which do not count, and for subclasses."""
    return tensor._version if type(tensor) in PLAIN and not tensor.is_inference() else 0


def _hidden(state: Mapping[str, Any], tensors: Mapping[str, Tensor], extras: Collection[str]) -> Iterator[Any]:
    """Yield the entries of a state dict that an update would not contain: the name, and what it is."""
    unnamed = []
    for name, value in _flat(state, "", extras):
        if not isinstance(value, Tensor):
            yield name, f"is a {_name_of(type(value))}"
        elif name not in tensors:
            unnamed.append((name, value))
        elif not _is_lazy_or_alike(tensors[name], value):
            yield name, f"has the shape {tuple(value.shape)} there, but {tuple(tensors[name].shape)} in the module"
    # A hook may rename entries (e.g. drop a wrapper's prefix), so compare those by their memory.
    places = {_place(tensor) for tensor in tensors.values()} if unnamed else set()
    for name, value in unnamed:
        if _place(value) not in places:
            yield name, "is a tensor that is neither a parameter nor a persistent buffer"


def _is_lazy_or_alike(read: Tensor, saved: Tensor) -> bool:
    return read is saved or nn.parameter.is_lazy(read) or read.shape == saved.shape


def _flat(state: Mapping[Any, Any], prefix: str, extras: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a state dict and of dicts in it, except the extra state, which may itself be a dict."""
    for key, value in state.items():
        name = f"{prefix}{key}"
        if name in extras:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.", extras)
        else:
            yield name, value


def _place(tensor: Tensor) -> object:
    try:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    except Exception:  # noqa: BLE001 - it has no memory (sparse), or a subclass raises: it equals only itself
        return id(tensor)


def _message(root: nn.Module, peculiar: Mapping[str, nn.Module], hidden: Mapping[str, str]) -> str:
    entries = listed([f"{quoted(name)} {what}" for name, what in hidden.items()])
    owners = listed([_where(name, module) for name, module in peculiar.items()])
    return (
        f"{_name_of(type(root))} keeps state outside its parameters, persistent buffers and extra state, which would "
        f"not be sent. Its state dict has {len(hidden)} such entries: {entries}. Modules that customise their state "
        f"dict: {owners}. {_ADVICE}"
    )


_ADVICE = (
    "Keep such state in persistent buffers or return it from get_extra_state(), or pass a dict of the tensors to sync "
    "in place of the module, on both sides."
)


def _where(name: str, module: nn.Module) -> str:
    kind = _name_of(type(module))
    return f"{quoted(name)} ({kind})" if name else kind


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
