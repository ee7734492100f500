"""Extra state travels without pickle, whatever its types."""

from __future__ import annotations

import contextlib
import enum
import math
from collections import OrderedDict

import numpy
import pytest
import torch
from data_samples import bits, samples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from weightsync import LayoutError, ProtocolError
from weightsync.weights.extra_state import MAX_DEPTH, decode_extras, encode_extras

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(10**40), 10**40),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(exclude_categories=()), max_size=10),
    st.binary(max_size=10),
    samples.map(lambda found: found[0]),
)
keys = st.one_of(st.text(max_size=5), st.integers())
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
    ),
    max_leaves=8,
)
extras = st.dictionaries(st.text(max_size=5), values, max_size=3)


def same(one: object, other: object) -> bool:
    """Equality of value and type: NaN equals NaN, tensors are compared bit by bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (one.dtype, one.shape, bits(one)) == (other.dtype, other.shape, bits(other))
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        ordered = not isinstance(one, OrderedDict) or list(one) == list(other)
        return ordered and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        both_nan = math.isnan(one) and math.isnan(other)
        return both_nan or (one == other and math.copysign(1, one) == math.copysign(1, other))
    return repr(one) == repr(other)


@given(extras)
def test_extra_state_survives_encoding_and_decoding(found: dict[str, object]) -> None:
    encoded = encode_extras(found)

    assert same(decode_extras(encoded), found)
    assert encode_extras(decode_extras(encoded)) == encoded


def test_no_extra_state_takes_no_bytes() -> None:
    assert encode_extras({}) == b""
    assert decode_extras(b"") == {}


def test_equal_dicts_give_equal_bytes_and_ordered_ones_keep_their_order() -> None:
    assert encode_extras({"": {"a": 1, "b": 2}}) == encode_extras({"": {"b": 2, "a": 1}})
    assert list(decode_extras(encode_extras({"": OrderedDict(b=2, a=1)}))[""]) == ["b", "a"]


def test_decoded_tensors_own_their_memory() -> None:
    encoded = encode_extras({"m": [torch.ones(2), nn.Parameter(torch.ones(2))]})
    first, second = decode_extras(encoded)["m"]
    first.zero_()

    assert decode_extras(encoded)["m"][0].tolist() == [1, 1]
    assert not second.requires_grad


class Tagged(Tensor):
    """A subclass that behaves like a tensor."""


def test_a_tensor_subclass_is_decoded_as_a_plain_tensor() -> None:
    found = decode_extras(encode_extras({"m": torch.arange(3.0).as_subclass(Tagged)}))["m"]

    assert type(found) is Tensor
    assert found.tolist() == [0, 1, 2]


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "builtins.object"),
        ({1, 2}, "builtins.set"),
        (numpy.float64(1), "numpy.float64"),
        (Colour.RED, "Colour"),
        (torch.float32, "torch.dtype"),
        ({"deep": [({1.5: 2},)]}, "key of type float"),
        ({True: 1}, "key of type bool"),
        (torch.ones(2).to_sparse(), "a tensor that has the layout"),
        (torch.ones(2, device="meta"), "a tensor that is on the meta device"),
    ],
)
def test_unsupported_types_are_refused_with_the_modules_name(value: object, message: str) -> None:
    with pytest.raises(LayoutError, match=r"module 'a\.norm'") as caught:
        encode_extras({"a.norm": {"x": value}})

    assert message in str(caught.value)
    assert message in caught.value.mismatched["a.norm._extra_state"]


def test_state_that_contains_itself_is_refused() -> None:
    endless: list[object] = []
    endless.append(endless)

    with pytest.raises(LayoutError, match="nested more than"):
        encode_extras({"m": endless})


def test_a_peer_cannot_exhaust_the_stack() -> None:
    deep = b"l\x01" + bytes(7)
    with pytest.raises(ProtocolError, match="nested too deep"):
        decode_extras(b"\x01" + bytes(7) + b"s" + bytes(8) + deep * 10_000 + b"N")


def test_extra_state_nested_as_deep_as_allowed_survives_encoding_and_decoding() -> None:
    value: object = torch.ones(1)
    for _ in range(MAX_DEPTH + 1):
        value = [value]

    assert same(decode_extras(encode_extras({"m": value}))["m"], value)


def test_an_error_has_the_bytes_that_could_not_be_decoded() -> None:
    encoded = encode_extras({"m": [1, 2]})
    for data, message, unread in ((encoded[:-1], "cut off", encoded[:-1]), (encoded + b"ab", "surplus", b"ab")):
        with pytest.raises(ProtocolError, match=message) as caught:
            decode_extras(data)
        assert caught.value.unread == unread


@given(st.binary(min_size=1, max_size=60))
def test_arbitrary_bytes_give_a_protocol_error_or_a_value(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode_extras(data)


@given(extras, st.data())
def test_damaged_bytes_give_a_protocol_error_or_a_value(found: dict[str, object], data: st.DataObject) -> None:
    encoded = bytearray(encode_extras({"m": 1, **found}))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(1, len(encoded)))

    with contextlib.suppress(ProtocolError):
        decode_extras(bytes(encoded[:cut]))


def _tensor(dtype: bytes, shape: tuple[int, ...], data: bytes) -> bytes:
    def sized(part: bytes) -> bytes:
        return len(part).to_bytes(8, "little") + part

    dims = b"".join(size.to_bytes(8, "little") for size in shape)
    return b"\x01" + bytes(7) + b"s" + bytes(8) + b"T" + sized(dtype) + sized(dims) + sized(data)


@pytest.mark.parametrize(
    "encoded",
    [
        _tensor(b"float32", (2,), bytes(7)),
        _tensor(b"float99", (2,), bytes(8)),
        _tensor(b"\xff", (2,), bytes(8)),
        _tensor(b"float32", (1 << 63, 0), b""),
        _tensor(b"float32", (1 << 40, 1 << 40, 0), b""),
        _tensor(b"float32", (1,) * 65, bytes(4)),
    ],
)
def test_malformed_tensors_are_refused(encoded: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_extras(encoded)
