"""The layout of a model's tensors in one flat buffer: names, shapes, dtypes, offsets and orders, and their digest.

Dtypes are names here, and there are no tensors: `weightsync.weights.packing` fills the buffer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from operator import attrgetter
from types import MappingProxyType

import xxhash

from weightsync.errors import LayoutError, ProtocolError
from weightsync.options import WireDtype

#: Bytes per element. The order is part of the wire format: append, never insert.
ITEMSIZES: Mapping[str, int] = MappingProxyType(
    {
        "float64": 8,
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "float8_e4m3fn": 1,
        "float8_e4m3fnuz": 1,
        "float8_e5m2": 1,
        "float8_e5m2fnuz": 1,
        "float8_e8m0fnu": 1,
        "complex128": 16,
        "complex64": 8,
        "complex32": 4,
        "int64": 8,
        "int32": 4,
        "int16": 2,
        "int8": 1,
        "uint64": 8,
        "uint32": 4,
        "uint16": 2,
        "uint8": 1,
        "bool": 1,
    }
)
_DTYPES = tuple(ITEMSIZES)
_CODES = {name: code for code, name in enumerate(_DTYPES)}

#: Each dtype's group starts at a multiple of this many bytes; within a group there are no gaps.
ALIGNMENT = 64
#: The largest tensor that a peer may claim; torch's own limits are close to these.
MAX_NDIM = 64
MAX_NUMEL = 1 << 62

_WIRE_DTYPES = frozenset(member.value for member in WireDtype)

_MAGIC = b"WSL\x01"
_COUNT = struct.Struct("<I")
_KIND = struct.Struct("<BB")
#: Added to the code of a dtype: the tensor's order follows its shape.
_ORDERED = 0x80
#: A dotted name with this last part is the extra state of the module before it, as in a state dict.
EXTRA_STATE = "_extra_state"


def is_extra_state(name: str) -> bool:
    """Whether a dotted name is the name of a module's extra state, as in a state dict."""
    return name == EXTRA_STATE or name.endswith("." + EXTRA_STATE)


def extra_state_name(module: str) -> str:
    """The name under which a state dict stores the extra state of a module; ``""`` is the root."""
    return f"{module}.{EXTRA_STATE}" if module else EXTRA_STATE


def is_sane(shape: Sequence[int]) -> bool:
    """Whether a shape that a peer claims is possible: few dimensions, and no overflowing product."""
    return len(shape) <= MAX_NDIM and prod(max(size, 1) for size in shape) <= MAX_NUMEL


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor and its place in the flat buffer, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    #: Its dimensions from the outermost to the innermost, as its elements follow each other; empty: row-major.
    order: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """The tensors of one dtype, without gaps: ``entries[first:last]`` of the layout."""

    dtype: str
    offset: int
    nbytes: int
    first: int
    last: int


class Layout:
    """All tensors of a model in one flat, aligned buffer, grouped by dtype.

    Layouts compare by value: the same names, shapes, dtypes, orders and modules with extra state make an equal layout,
    in whatever sequence they are given. Within a group, tensors whose size is a multiple of `ALIGNMENT` come first, so
    that they are aligned without padding. The orders of tensors change no offset.

    Args:
        specs: name, dtype's name and shape of each tensor.
        extras: names of the modules that have extra state; ``""`` is the root.
        orders: by name, the order of each tensor whose elements do not lie in row-major order: see `Entry`.

    Raises:
        LayoutError: a name occurs twice, or a dtype is unknown.
    """

    def __init__(
        self,
        specs: Iterable[tuple[str, str, tuple[int, ...]]],
        extras: Iterable[str] = (),
        orders: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ) -> None:
        sized = [(name, dtype, shape, _nbytes(name, dtype, shape)) for name, dtype, shape in specs]
        sized.sort(key=lambda spec: (-ITEMSIZES[spec[1]], spec[1], spec[3] % ALIGNMENT != 0, spec[0]))
        self.entries: tuple[Entry, ...] = tuple(_place_entries(sized, orders))
        self.extras: tuple[str, ...] = tuple(sorted(extras))
        self.nbytes: int = self.entries[-1].offset + self.entries[-1].nbytes if self.entries else 0
        self._refuse_duplicates()

    def _refuse_duplicates(self) -> None:
        for names in (sorted(entry.name for entry in self.entries), self.extras):
            for name, following in pairwise(names):
                if name == following:
                    raise LayoutError(f"'{name}' occurs twice in one layout.", unexpected=[name])

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups, one per dtype, in the order of the buffer."""
        first, groups = 0, []
        for last in range(1, len(self.entries) + 1):
            head, tail = self.entries[first], self.entries[last - 1]
            if last == len(self.entries) or self.entries[last].dtype != head.dtype:
                size = tail.offset + tail.nbytes - head.offset
                groups.append(Group(head.dtype, head.offset, size, first, last))
                first = last
        return tuple(groups)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors, in the order of the buffer."""
        return tuple(entry.name for entry in self.entries)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Where the gaps between groups begin and end: bytes of no tensor, which the digest covers nevertheless."""
        ends = [(group.offset + group.nbytes, after.offset) for group, after in pairwise(self.groups)]
        return tuple((end, start) for end, start in ends if end < start)

    @cached_property
    def orders(self) -> Mapping[str, tuple[int, ...]]:
        """By name, the order of each tensor whose elements do not lie in row-major order."""
        return {entry.name: entry.order for entry in self.entries if entry.order}

    @cached_property
    def digest(self) -> bytes:
        """xxh3-128 of the encoded layout, 16 bytes."""
        return xxhash.xxh3_128_digest(self.encode())

    @cached_property
    def _digest_but_orders(self) -> bytes:
        if not self.orders:
            return self.digest
        return Layout(((entry.name, entry.dtype, entry.shape) for entry in self.entries), self.extras).digest

    def fits(self, other: Layout) -> bool:
        """Whether weights of the other layout fit a destination of this one: nothing differs but orders."""
        return self is other or self._digest_but_orders == other._digest_but_orders

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and (self is other or self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<Layout of {len(self.entries)} tensors, {self.nbytes} bytes, {self.digest.hex()[:8]}>"

    def encode(self) -> bytes:
        """Encode the layout as bytes, for `decode`."""
        return self._encoded

    @cached_property
    def _encoded(self) -> bytes:
        parts = [_MAGIC, _COUNT.pack(len(self.entries))]
        for entry in self.entries:
            code = _CODES[entry.dtype] | (_ORDERED if entry.order else 0)
            parts += (_encode_text(entry.name), _KIND.pack(code, len(entry.shape)))
            parts += (struct.pack(f"<{len(entry.shape)}Q", *entry.shape), bytes(entry.order))
        parts.append(_COUNT.pack(len(self.extras)))
        parts += map(_encode_text, self.extras)
        return b"".join(parts)

    @classmethod
    def decode(cls, data: bytes) -> Layout:
        """Decode what `encode` returned.

        Raises:
            ProtocolError: the bytes are malformed. Time and memory stay in proportion to their number.
        """
        try:
            layout = cls(*_parse(data))
        except (struct.error, IndexError, UnicodeDecodeError, LayoutError) as error:
            raise ProtocolError(f"The layout cannot be decoded: {error}.", unread=data) from error
        if layout.encode() != data:
            raise ProtocolError("The layout is not in canonical form.", unread=data)
        return layout

    def summary(self) -> str:
        """Describe the layout in an error message: the number of tensors of each dtype, and the first names."""
        counts = ", ".join(f"{group.last - group.first} {group.dtype}" for group in self.groups)
        names = listed([quoted(entry.name) for entry in sorted(self.entries, key=attrgetter("name"))])
        return f"{len(self.entries)} tensors ({counts}): {names}" if self.entries else "no tensors"

    def difference(self, other: Layout, summary: str = "The weights do not fit the destination") -> LayoutError | None:
        """Return the error for weights of layout `other` and a destination of this layout; None if they fit.

        Args:
            other: the layout of the weights.
            summary: the beginning of the error message.
        """
        if self.fits(other):
            return None
        expected, received = _described(self), _described(other)
        missing = sorted(expected.keys() - received.keys())
        unexpected = sorted(received.keys() - expected.keys())
        mismatched = {
            name: _describe_mismatch(expected[name], received[name])
            for name in sorted(expected.keys() & received.keys())
            if expected[name] != received[name]
        }
        parts = [_list_names("missing", missing), _list_names("unexpected", unexpected), _list_mismatches(mismatched)]
        message = f"{summary}: {'; '.join(filter(None, parts))}."
        return LayoutError(message + _hint(missing, unexpected), missing, unexpected, mismatched)

    def other_dtypes(self, other: Layout) -> dict[str, tuple[str, str]]:
        """The tensors that have another dtype in `other`, with both dtypes.

        Empty if names, shapes or modules with extra state differ too.
        """
        here, there = _tensors(self), _tensors(other)
        if here.keys() != there.keys() or self.extras != other.extras:
            return {}
        pairs = {name: (entry, there[name]) for name, entry in here.items() if entry != there[name]}
        if any(one[0] != two[0] for one, two in pairs.values()):
            return {}
        return {name: (one[1], two[1]) for name, (one, two) in pairs.items()}

    def misfit(self, sent: Layout) -> LayoutError | None:
        """Return the error of a worker whose model has this layout, for weights of layout `sent`; None if they fit.

        If only a dtype differs, or one layout is a part of the other, its message names ``wire_dtype=`` or ``names=``.
        """
        error = self.difference(sent)
        if error is None:
            return None
        pairs = set(self.other_dtypes(sent).values())
        if not error.mismatched and bool(error.missing) != bool(error.unexpected):
            hint = "To sync a part of a model, give trainer and worker the same names=."
            return LayoutError(f"{error} {hint}", error.missing, error.unexpected)
        if len(pairs) != 1:
            return error
        ((own_dtype, sent_dtype),) = pairs
        if not (_is_cast_by_to(own_dtype) and _is_cast_by_to(sent_dtype)):
            return error
        cast = f"cast the worker's model with model.to(torch.{sent_dtype})."
        hint = cast
        if own_dtype in _WIRE_DTYPES and sent_dtype in {*_WIRE_DTYPES, "float64"}:
            hint = f"give the trainer's scheme wire_dtype='{own_dtype}', or {cast}"
            if ITEMSIZES[sent_dtype] <= ITEMSIZES[own_dtype]:  # the dtype of the trainer's own model is not known here
                hint += (
                    f" If the trainer's model is {sent_dtype} itself, only that cast helps: wire_dtype= widens nothing."
                )
        message = f"{error} Both must have the same dtype: {hint}"
        return LayoutError(message, error.missing, error.unexpected, error.mismatched)


def _nbytes(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    if dtype not in ITEMSIZES:
        raise LayoutError(f"'{name}' has the dtype {dtype}, which cannot be sent.", mismatched={name: dtype})
    return prod(shape) * ITEMSIZES[dtype]


def _is_cast_by_to(dtype: str) -> bool:
    """Whether `nn.Module.to` casts tensors of this dtype, and to it: it leaves integers and bools as they are."""
    return "float" in dtype or "complex" in dtype


def _place_entries(
    specs: Iterable[tuple[str, str, tuple[int, ...], int]], orders: Mapping[str, tuple[int, ...]]
) -> Iterator[Entry]:
    end, group = 0, ""
    for name, dtype, shape, nbytes in specs:
        if dtype != group:
            end, group = -(-end // ALIGNMENT) * ALIGNMENT, dtype
        yield Entry(name, dtype, shape, end, nbytes, orders.get(name, ()))
        end += nbytes


def _encode_text(text: str) -> bytes:
    # A name may be any Python string, and those may contain lone surrogates.
    encoded = text.encode("utf-8", "surrogatepass")
    return _COUNT.pack(len(encoded)) + encoded


_Parsed = tuple[list[tuple[str, str, tuple[int, ...]]], list[str], dict[str, tuple[int, ...]]]


def _parse(data: bytes) -> _Parsed:
    if data[: len(_MAGIC)] != _MAGIC:
        raise LayoutError("it does not start with the magic bytes")
    (count,), offset = _COUNT.unpack_from(data, len(_MAGIC)), len(_MAGIC) + _COUNT.size
    specs, extras, orders = [], [], {}
    for _ in range(count):
        name, offset = _read_text(data, offset)
        code, ndim = _KIND.unpack_from(data, offset)
        shape: tuple[int, ...] = struct.unpack_from(f"<{ndim}Q", data, offset + _KIND.size)
        if not is_sane(shape):
            raise LayoutError(f"'{name}' has an impossible shape")
        specs.append((name, _DTYPES[code & ~_ORDERED], shape))
        offset += _KIND.size + 8 * ndim
        if code & _ORDERED:
            orders[name] = _read_order(data, offset, ndim)
            offset += ndim
    (count,), offset = _COUNT.unpack_from(data, offset), offset + _COUNT.size
    for _ in range(count):
        name, offset = _read_text(data, offset)
        extras.append(name)
    return specs, extras, orders


def _read_order(data: bytes, offset: int, ndim: int) -> tuple[int, ...]:
    order, dimensions = tuple(data[offset : offset + ndim]), list(range(ndim))
    if sorted(order) != dimensions or list(order) == dimensions:
        raise LayoutError("a tensor has an impossible order")
    return order


def _read_text(data: bytes, offset: int) -> tuple[str, int]:
    (size,) = _COUNT.unpack_from(data, offset)
    start = offset + _COUNT.size
    if len(data) - start < size:
        raise LayoutError("a name is cut off")
    return data[start : start + size].decode("utf-8", "surrogatepass"), start + size


_Described = dict[str, tuple[tuple[int, ...], str] | None]


def _tensors(layout: Layout) -> dict[str, tuple[tuple[int, ...], str]]:
    return {entry.name: (entry.shape, entry.dtype) for entry in layout.entries}


def _described(layout: Layout) -> _Described:
    tensors: _Described = {**_tensors(layout)}
    return tensors | dict.fromkeys(map(extra_state_name, layout.extras))


def _describe_mismatch(
    expected: tuple[tuple[int, ...], str] | None, received: tuple[tuple[int, ...], str] | None
) -> str:
    if expected is None or received is None:
        return "a tensor on one side, extra state on the other"
    differences = []
    if expected[0] != received[0]:
        differences.append(f"shape {received[0]}, expected {expected[0]}")
    if expected[1] != received[1]:
        differences.append(f"dtype {received[1]}, expected {expected[1]}")
    return ", ".join(differences)


#: An error lists up to this many names in full; of a longer list it gives the number and the first few.
MOST_LISTED = 5
_FIRST_FEW = 3


def listed(items: Sequence[str]) -> str:
    """Join items for an error message: all of a short list, the first few of a long one."""
    if len(items) <= MOST_LISTED:
        return ", ".join(items)
    return f"{', '.join(items[:_FIRST_FEW])} and {len(items) - _FIRST_FEW} more"


def _list_names(kind: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    count = f"{len(names)} names: " if len(names) > MOST_LISTED else ""
    return f"{kind} {count}{listed([quoted(name) for name in names])}"


def quoted(name: str) -> str:
    """Quote a tensor's name for an error message."""
    return f"'{name}'"


def _list_mismatches(mismatched: Mapping[str, str]) -> str:
    """List the mismatched tensors; if there are many, group them by difference (e.g. a model cast to another dtype)."""
    if len(mismatched) <= MOST_LISTED:
        items = [f"{quoted(name)} ({how})" for name, how in mismatched.items()]
        return f"mismatched {listed(items)}" if items else ""
    ways: dict[str, list[str]] = {}
    for name, how in mismatched.items():
        ways.setdefault(how, []).append(quoted(name))
    items = [f"{how} (in {len(names)}: {listed(names)})" for how, names in ways.items()]
    return f"mismatched {len(mismatched)} names: {listed(items)}"


def _hint(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """The hint for missing extra state, or names that differ only by a wrapper's prefix (DDP, torch.compile)."""
    if missing and not unexpected and all(map(is_extra_state, missing)):
        return (
            " TensorDict.from_module() leaves extra state out: pass the module, its state_dict(), or "
            "WeightStrategy().extract_weights(module)."
        )
    if not missing or len(missing) != len(unexpected):
        return ""
    longer, shorter = (unexpected, missing) if len(unexpected[0]) > len(missing[0]) else (missing, unexpected)
    prefix = longer[0].removesuffix(shorter[0])
    if not prefix or any(long != prefix + short for long, short in zip(longer, shorter, strict=True)):
        return ""
    message = f" The names differ only by the prefix '{prefix}' of the "
    if longer is unexpected:
        return f"{message}weights: pass the module inside that wrapper."
    return f"{message}destination: give both sides the wrapper, or both the module inside it."
