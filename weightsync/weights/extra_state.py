"""Encoding of the modules' extra state as bytes, without pickle.

A value is a tag and a body: None, bool, int, float, complex, str, bytes, tensor, list, tuple, dict or OrderedDict.
Tensors arrive on the CPU. A dict is written in the order of its encoded keys, so that equal dicts have equal bytes and
one digest. Its own order is lost, which ``==`` ignores too; an OrderedDict keeps its order.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from weightsync.errors import LayoutError, ProtocolError
from weightsync.weights.layout import extra_state_name, is_sane
from weightsync.weights.tensors import DTYPE_NAMES, DTYPES, PLAIN, bits_of, why_uncopied, why_unsupported

#: What a module's extra state may be: ``None | bool | int | float | complex | str | bytes | Tensor``, and lists,
#: tuples and dicts (keys str or int) of them.
ExtraState = Any

#: How deep values may nest. Both ends refuse more, so that neither exhausts its stack.
MAX_DEPTH = 64

_COUNT = struct.Struct("<Q")
_FLOAT = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")


class _UnsupportedError(TypeError):
    """A value in extra state has no encoding."""


def encode_extras(extras: Mapping[str, ExtraState]) -> bytes:
    """Encode the extra state of each module, by the module's name; ``b""`` if there is none.

    Raises:
        LayoutError: a value is of a type that cannot be sent, or nested too deep; the error names the module.
    """
    if not extras:
        return b""
    parts = [_COUNT.pack(len(extras))]
    for module in sorted(extras):
        try:
            parts += (_encoded(module, 0), _encoded(extras[module], 0))
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

    Raises:
        ProtocolError: the bytes are malformed. Time and memory stay in proportion to their number.
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


def _text_pairs(reader: _Reader) -> Iterable[tuple[str, ExtraState]]:
    for _ in range(reader.count()):
        module = reader.value(0)
        if type(module) is not str:
            raise ValueError("a module's name is not a string")
        yield module, reader.value(0)


def _encoded(value: ExtraState, depth: int) -> bytes:
    if isinstance(value, Tensor):
        return _encoded_tensor(value)
    # Exact types only: a numpy scalar or an IntEnum would arrive as another type.
    encoder = _ENCODERS.get(type(value))
    if encoder is None:
        raise _UnsupportedError(f"a {type(value).__module__}.{type(value).__qualname__}")
    if depth > MAX_DEPTH:
        raise _UnsupportedError(f"values nested more than {MAX_DEPTH} deep")
    return encoder(value, depth + 1)


def _encoded_tensor(tensor: Tensor) -> bytes:
    # A subclass of Tensor may raise anything when it is copied.
    why = why_unsupported(tensor) if type(tensor) in PLAIN else why_uncopied(tensor)
    if why:
        raise _UnsupportedError(f"a tensor that {why}")
    dtype = DTYPE_NAMES[tensor.dtype].encode()
    shape = struct.pack(f"<{tensor.dim()}Q", *tensor.shape)
    return b"T" + b"".join(map(_sized, (dtype, shape, bits_of(tensor).numpy().tobytes())))


def _sized(data: bytes) -> bytes:
    return _COUNT.pack(len(data)) + data


def _encoded_int(value: int, _depth: int) -> bytes:
    return b"i" + _sized(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _sequence(tag: bytes) -> Callable[[Any, int], bytes]:
    def encode(values: list[Any] | tuple[Any, ...], depth: int) -> bytes:
        return tag + _COUNT.pack(len(values)) + b"".join(_encoded(value, depth) for value in values)

    return encode


def _encoded_items(value: Mapping[Any, Any], depth: int) -> list[bytes]:
    for key in value:
        if type(key) not in (str, int):
            raise _UnsupportedError(f"a dict with a key of type {type(key).__qualname__}")
    return [_encoded(key, depth) + _encoded(item, depth) for key, item in value.items()]


_ENCODERS: Mapping[type, Callable[[Any, int], bytes]] = {
    type(None): lambda _value, _depth: b"N",
    bool: lambda value, _depth: b"1" if value else b"0",
    int: _encoded_int,
    float: lambda value, _depth: b"f" + _FLOAT.pack(value),
    complex: lambda value, _depth: b"c" + _COMPLEX.pack(value.real, value.imag),
    str: lambda value, _depth: b"s" + _sized(value.encode("utf-8", "surrogatepass")),
    bytes: lambda value, _depth: b"b" + _sized(value),
    list: _sequence(b"l"),
    tuple: _sequence(b"t"),
    dict: lambda value, depth: b"d" + _COUNT.pack(len(value)) + b"".join(sorted(_encoded_items(value, depth))),
    OrderedDict: lambda value, depth: b"o" + _COUNT.pack(len(value)) + b"".join(_encoded_items(value, depth)),
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


def _decoded_tensor(reader: _Reader, _depth: int) -> Tensor:
    name, dims, data = reader.sized(), reader.sized(), reader.sized()
    dtype = DTYPES.get(name.decode("ascii"))
    shape = struct.unpack(f"<{len(dims) // 8}Q", dims)
    if dtype is None or not is_sane(shape):
        raise ValueError("a tensor has an unknown dtype or an impossible shape")
    if len(data) != torch.Size(shape).numel() * dtype.itemsize:
        raise ValueError("a tensor's bytes do not fill its shape")
    # The module owns its state, so it must not alias the message: bytearray makes a copy.
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
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
    b"T": _decoded_tensor,
    b"l": lambda reader, depth: reader.values(depth),
    b"t": lambda reader, depth: tuple(reader.values(depth)),
    b"d": lambda reader, depth: dict(reader.items(depth)),
    b"o": lambda reader, depth: OrderedDict(reader.items(depth)),
}
