"""Encoding of the modules' extra state as bytes, without pickle.

A value is a tag and a body: None, bool, int, float, complex, str, bytes, tensor, list, tuple, dict or OrderedDict.
Tensors arrive on the CPU. A dict is written in the order of its encoded keys, so that equal dicts have equal bytes and
one digest. Its own order is lost, which ``==`` ignores too; an OrderedDict keeps its order.

State that a module keeps outside its parameters, persistent buffers and extra state is refused. An override or a hook
puts such state into the module's state dict (as `torch.ao` does with packed quantised weights); scripted modules do not
show it even there. Sending only the rest would leave a worker with part of a model.
"""

from __future__ import annotations

import re
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from weightsync.errors import LayoutError, ProtocolError
from weightsync.weights.layout import Layout, extra_state_name, is_sane, listed, quoted
from weightsync.weights.tensors import (
    DTYPE_NAMES,
    DTYPES,
    PLAIN,
    bits_of,
    counts_writes,
    on_cpu,
    why_uncopied,
    why_unsupported,
)

#: What a module's extra state may be: ``None | bool | int | float | complex | str | bytes | Tensor``, and lists,
#: tuples and dicts (keys str or int) of them.
ExtraState = Any

#: How deep values may nest. Both ends refuse more, so that neither exhausts its stack.
MAX_DEPTH = 64

_COUNT = struct.Struct("<Q")
_FLOAT = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")


class PerClass(dict[ref[type[Any]], bool]):
    """The answer for each class, found once: ``answers[ref(kind)]``, which makes no Python call from then on.

    It keeps no class alive, as a `functools.lru_cache` would, with all that the class's methods refer to.

    Args:
        predicate: finds the answer for a class.
    """

    def __init__(self, predicate: Callable[[type[Any]], bool]) -> None:
        super().__init__()
        self._ask = predicate
        self._ends: dict[ref[type[Any]], ref[type[Any]]] = {}

    def __missing__(self, class_ref: ref[type[Any]]) -> bool:
        kind = class_ref()
        assert kind is not None
        answer = self._ask(kind)
        # The key is the one that all callers get from `ref(kind)`: it is found without comparing the classes.
        self._ends[class_ref] = ref(kind, lambda _: self._forget(class_ref))
        self[class_ref] = answer
        return answer

    def _forget(self, class_ref: ref[type[Any]]) -> None:
        self.pop(class_ref, None)
        self._ends.pop(class_ref, None)


class _UnsupportedError(TypeError):
    """A value in extra state has no encoding."""


def encode_extras(extras: Mapping[str, ExtraState]) -> bytes:
    """Encode the extra state of each module, by the module's name; ``b""`` if there is none.

    Raises LayoutError: a value is of a type that cannot be sent, or nested too deep; the error names the module.
    """
    if not extras:
        return b""
    parts = [_COUNT.pack(len(extras))]
    for module in sorted(extras):
        try:
            parts += (_encode_value(module, 0), _encode_value(extras[module], 0))
        except _UnsupportedError as error:
            name = extra_state_name(module)
            message = (
                f"The extra state of module '{module}' holds {error}. It may hold tensors, numbers, str, bytes, None, "
                "and lists, tuples and dicts (with str or int keys) of these."
            )
            raise LayoutError(message, mismatched={name: str(error)}) from None
    return b"".join(parts)


def decode_extras(data: bytes) -> dict[str, ExtraState]:
    """Decode what `encode_extras` returned. The values are new objects and share no memory with the bytes.

    Raises ProtocolError: the bytes are malformed. Time and memory stay in proportion to their number.
    """
    if not data:
        return {}
    reader = _Reader(data)
    try:
        extras = dict(_text_pairs(reader))
    except (struct.error, UnicodeDecodeError, ValueError, TypeError) as error:
        raise ProtocolError(f"The extra state cannot be decoded: {error}.", unread=data) from error
    if reader.at != len(data):
        raise ProtocolError("There are surplus bytes after the extra state.", unread=data[reader.at :])
    return extras


def decode_extras_of(layout: Layout, data: bytes) -> dict[str, ExtraState]:
    """Decode an update's extra state. Raises ProtocolError: it is malformed, or not what the layout lists."""
    extras = decode_extras(data)
    if tuple(sorted(extras)) != layout.extras:
        raise ProtocolError(f"Extra state arrived for {sorted(extras)}, but the layout lists {list(layout.extras)}.")
    return extras


def _text_pairs(reader: _Reader) -> Iterable[tuple[str, ExtraState]]:
    for _ in range(reader.count()):
        module = reader.value(0)
        if type(module) is not str:
            raise ValueError("a module's name is not a string")
        yield module, reader.value(0)


def _encode_value(value: ExtraState, depth: int) -> bytes:
    if isinstance(value, Tensor):
        return _encode_tensor(value)
    # Exact types only: a numpy scalar or an IntEnum would arrive as another type.
    encoder = _ENCODERS.get(type(value))
    if encoder is None:
        raise _UnsupportedError(f"a {type(value).__module__}.{type(value).__qualname__}")
    if depth > MAX_DEPTH:
        raise _UnsupportedError(f"values nested more than {MAX_DEPTH} deep")
    return encoder(value, depth + 1)


def _encode_tensor(tensor: Tensor) -> bytes:
    # A subclass of Tensor may raise anything when it is copied.
    why = why_unsupported(tensor) if type(tensor) in PLAIN else why_uncopied(tensor)
    if why:
        raise _UnsupportedError(f"a tensor that {why}")
    dtype = DTYPE_NAMES[tensor.dtype].encode()
    shape = struct.pack(f"<{tensor.dim()}Q", *tensor.shape)
    return b"T" + b"".join(map(_with_length, (dtype, shape, bits_of(tensor).numpy().tobytes())))


def _with_length(data: bytes) -> bytes:
    return _COUNT.pack(len(data)) + data


def _encode_int(value: int, _depth: int) -> bytes:
    return b"i" + _with_length(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _sequence(tag: bytes) -> Callable[[Any, int], bytes]:
    def encode(values: list[Any] | tuple[Any, ...], depth: int) -> bytes:
        return tag + _COUNT.pack(len(values)) + b"".join(_encode_value(value, depth) for value in values)

    return encode


def _encode_items(value: Mapping[Any, Any], depth: int) -> list[bytes]:
    for key in value:
        if type(key) not in (str, int):
            raise _UnsupportedError(f"a dict with a key of type {type(key).__qualname__}")
    return [_encode_value(key, depth) + _encode_value(item, depth) for key, item in value.items()]


_ENCODERS: Mapping[type, Callable[[Any, int], bytes]] = {
    type(None): lambda _value, _depth: b"N",
    bool: lambda value, _depth: b"1" if value else b"0",
    int: _encode_int,
    float: lambda value, _depth: b"f" + _FLOAT.pack(value),
    complex: lambda value, _depth: b"c" + _COMPLEX.pack(value.real, value.imag),
    str: lambda value, _depth: b"s" + _with_length(value.encode("utf-8", "surrogatepass")),
    bytes: lambda value, _depth: b"b" + _with_length(value),
    list: _sequence(b"l"),
    tuple: _sequence(b"t"),
    dict: lambda value, depth: b"d" + _COUNT.pack(len(value)) + b"".join(sorted(_encode_items(value, depth))),
    OrderedDict: lambda value, depth: b"o" + _COUNT.pack(len(value)) + b"".join(_encode_items(value, depth)),
}


class _Reader:
    """A position in encoded bytes. Malformed bytes raise ValueError, struct.error, UnicodeDecodeError or TypeError."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        start, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise ValueError("it is cut off")
        return self.data[start : self.at]

    def sized(self) -> bytes:
        return self.take(_COUNT.unpack(self.take(_COUNT.size))[0])

    def count(self) -> int:
        count = int(_COUNT.unpack(self.take(_COUNT.size))[0])
        # Each item takes at least one byte, so a claimed count cannot cause more work than the bytes justify.
        if count > len(self.data) - self.at:
            raise ValueError("it claims more items than it has bytes")
        return count

    def value(self, depth: int) -> ExtraState:
        tag = self.take(1)
        decoder = _DECODERS.get(tag)
        if decoder is None:
            raise ValueError(f"unknown tag {tag!r}")
        if depth > MAX_DEPTH + 1:
            raise ValueError("it is nested too deep")
        return decoder(self, depth + 1)

    def values(self, depth: int) -> list[ExtraState]:
        return [self.value(depth) for _ in range(self.count())]

    def items(self, depth: int) -> Iterable[tuple[Any, ExtraState]]:
        for _ in range(self.count()):
            key = self.value(depth)
            if type(key) not in (str, int):
                raise ValueError("a dict's key is neither a string nor an integer")
            yield key, self.value(depth)


def _decode_tensor(reader: _Reader, _depth: int) -> Tensor:
    name, dims, data = reader.sized(), reader.sized(), reader.sized()
    dtype = DTYPES.get(name.decode("ascii"))
    shape = struct.unpack(f"<{len(dims) // 8}Q", dims)
    if dtype is None or not is_sane(shape):
        raise ValueError("a tensor has an unknown dtype or an impossible shape")
    if len(data) != torch.Size(shape).numel() * dtype.itemsize:
        raise ValueError("a tensor's bytes do not fill its shape")
    # The module owns its state, so it must not alias the message: bytearray makes a copy.
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else on_cpu(0)
    return flat.view(dtype).view(shape)


_DECODERS: Mapping[bytes, Callable[[_Reader, int], ExtraState]] = {
    b"N": lambda _reader, _depth: None,
    b"1": lambda _reader, _depth: True,
    b"0": lambda _reader, _depth: False,
    b"i": lambda reader, _depth: int.from_bytes(reader.sized(), "little", signed=True),
    b"f": lambda reader, _depth: _FLOAT.unpack(reader.take(_FLOAT.size))[0],
    b"c": lambda reader, _depth: complex(*_COMPLEX.unpack(reader.take(_COMPLEX.size))),
    b"s": lambda reader, _depth: reader.sized().decode("utf-8", "surrogatepass"),
    b"b": lambda reader, _depth: reader.sized(),
    b"T": _decode_tensor,
    b"l": lambda reader, depth: reader.values(depth),
    b"t": lambda reader, depth: tuple(reader.values(depth)),
    b"d": lambda reader, depth: dict(reader.items(depth)),
    b"o": lambda reader, depth: OrderedDict(reader.items(depth)),
}


_STATE_DICT = nn.Module.state_dict
_SAVE = nn.Module._save_to_state_dict


#: The attributes of a module with the hooks that may customise its state dict.
STATE_DICT_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")


@PerClass
def overrides_state_dict(kind: type[Any]) -> bool:
    """Whether modules of a kind customise their part of the state dict."""
    replaced = kind._save_to_state_dict is not _SAVE or kind.state_dict is not _STATE_DICT
    return replaced or issubclass(kind, torch.jit.ScriptModule)


def refuse_hidden_state(
    root: nn.Module,
    customising: Mapping[str, nn.Module],
    tensors: Mapping[str, Tensor],
    extras: Collection[str],
    prefix: str = "",
) -> None:
    """Raise LayoutError if the state dict of `root` has an entry that was not read from the model.

    The state dict is made at each call: a hook, or an override, may add state that was not there the last time.

    Args:
        customising: the modules in it that customise their state dict, by name.
        prefix: what all names begin with, if `root` is a part of the model.
    """
    _refuse_invisible_state(customising)
    marks = [_mark(tensor) for tensor in tensors.values()]
    hidden = dict(_hidden_entries(_flatten(_state_dict_of(root), prefix, extras), tensors))
    changed = [name for (name, tensor), mark in zip(tensors.items(), marks, strict=True) if _mark(tensor) != mark]
    for name in (*changed, *_replaced_names(customising, tensors)):
        hidden[name] = "is written by state_dict(), from state that is kept elsewhere"
    if hidden:
        raise LayoutError(_message(root, customising, hidden), mismatched=hidden)


def _replaced_names(customising: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the names below which modules that customise their state dict have other tensors by now."""
    for prefix, module in customising.items():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            name = f"{prefix}.{key}" if prefix else key
            if tensor is not None and name in tensors and _memory_of(tensor) != _memory_of(tensors[name]):
                yield name


def _refuse_invisible_state(customising: Mapping[str, nn.Module]) -> None:
    """Refuse modules whose state cannot be seen in a state dict of one process."""
    # Its state dict is gathered from all processes, so computing it here would wait for them.
    sharding = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    for name, module in customising.items():
        if isinstance(module, sharding):
            why = (
                "shards its parameters (FullyShardedDataParallel): send the full state dict that it gathers, or wrap "
                "the model by fully_shard() and call weightsync.send_sharded() on every rank"
            )
        elif isinstance(module, torch.jit.ScriptModule) and _PACKED.search(_code_of(module)):
            why = "is scripted and quantised: its weights are packed and are not tensors"
        elif isinstance(module, torch.jit.ScriptModule) and _is_frozen(module):
            why = "is scripted and frozen: its weights are constants of its code. Send it as it was before freeze()"
        else:
            continue
        raise LayoutError(f"{_describe_module(name, module)} {why}.", mismatched={name: why})


@PerClass
def is_fsdp(kind: type) -> bool:
    """Whether `torch.distributed.fsdp.fully_shard` has made this type of module."""
    made: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return issubclass(kind, made)


def refuse_fsdp(customising: Mapping[str, nn.Module]) -> None:
    """Refuse modules that `torch.distributed.fsdp.fully_shard` has wrapped.

    Between two forward passes their parameters may be whole, but need not be those that the optimizer has changed.
    """
    for name, module in customising.items():
        if is_fsdp[ref(type(module))]:
            why = (
                "is wrapped by fully_shard(): this rank holds only its shards. To send the model, call "
                "weightsync.send_sharded() on every rank; a worker's model must hold plain tensors"
            )
            raise LayoutError(f"{_describe_module(name, module)} {why}.", mismatched={name: why})


def _code_of(module: torch.jit.ScriptModule) -> str:
    code = module.code if module._c._has_method("forward") else ""
    return f"{module._c._type()} {code}"


def _is_frozen(module: torch.jit.ScriptModule) -> bool:
    """Whether `torch.jit.freeze` has made constants of its tensors. It removes all attributes, even ``training``."""
    return not module._c.hasattr("training") and "CONSTANTS." in _code_of(module)


#: Matches the code or the type of a scripted module with packed weights, which its state dict omits.
_PACKED = re.compile(r"\bops\.quantized\.|\.PackedParameter\b|\.LinearPackedParams\b")


def _state_dict_of(root: nn.Module) -> Mapping[str, Any]:
    try:
        state = _call_state_dict(root)
    except Exception as error:
        message = f"The state of {_name_of(type(root))} cannot be determined: its state_dict() raised {error!r}."
        raise LayoutError(f"{message} {_ADVICE}") from error
    return state


def _call_state_dict(root: nn.Module) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = root.state_dict(keep_vars=True)
    except TypeError:  # an override without arguments
        found = root.state_dict()
    return found


def _mark(tensor: Tensor) -> tuple[int, object]:
    """How often a tensor was written, and where it is. Inference tensors and subclasses do not count writes."""
    return tensor._version if type(tensor) in PLAIN and counts_writes(tensor) else 0, _memory_of(tensor)


def _hidden_entries(entries: Iterable[tuple[str, Any]], tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the entries of a state dict that an update would not contain: the name, and what it is."""
    unnamed = []
    for name, value in entries:
        if not isinstance(value, Tensor):
            yield name, f"is a {_name_of(type(value))}"
        elif name not in tensors:
            unnamed.append((name, value))
        elif not _is_lazy_or_alike(tensors[name], value):
            yield name, f"has the shape {tuple(value.shape)} there, but {tuple(tensors[name].shape)} in the module"
    # A hook may rename entries (e.g. drop a wrapper's prefix), so compare those by their memory.
    places = {_memory_of(tensor) for tensor in tensors.values()} if unnamed else set()
    for name, value in unnamed:
        if _memory_of(value) not in places:
            yield name, "is a tensor that is neither a parameter nor a persistent buffer"


def _is_lazy_or_alike(read: Tensor, saved: Tensor) -> bool:
    return read is saved or nn.parameter.is_lazy(read) or read.shape == saved.shape


def _flatten(state: Mapping[Any, Any], prefix: str, extras: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a state dict and of dicts in it, except the extra state, which may itself be a dict."""
    for key, value in state.items():
        name = f"{prefix}{key}"
        if name in extras:
            continue
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{name}.", extras)
        else:
            yield name, value


def _memory_of(tensor: Tensor) -> object:
    try:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    except Exception:  # noqa: BLE001 - it has no memory (sparse), or a subclass raises: it equals only itself
        return id(tensor)


def _message(root: nn.Module, customising: Mapping[str, nn.Module], hidden: Mapping[str, str]) -> str:
    entries = listed([f"{quoted(name)} {what}" for name, what in hidden.items()])
    owners = listed([_describe_module(name, module) for name, module in customising.items()])
    return (
        f"{_name_of(type(root))} keeps state outside its parameters, persistent buffers and extra state, which would "
        f"not be sent. Its state dict has {len(hidden)} such entries: {entries}. Modules that customise their state "
        f"dict: {owners}. {_ADVICE}"
    )


_ADVICE = (
    "Keep such state in persistent buffers or return it from get_extra_state(), or pass a dict of the tensors to sync "
    "in place of the module, on both sides."
)


def _describe_module(name: str, module: nn.Module) -> str:
    kind = _name_of(type(module))
    return f"{quoted(name)} ({kind})" if name else kind


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
