"""Layouts are values: the same names, shapes and dtypes give the same bytes, and other bytes are refused."""

from __future__ import annotations

import contextlib
import pickle
from math import prod

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weightsync import LayoutError, ProtocolError
from weightsync.weights.layout import ALIGNMENT, ITEMSIZES, Layout

names = st.text(max_size=12)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
specs = st.lists(
    st.tuples(names, st.sampled_from(list(ITEMSIZES)), shapes), max_size=12, unique_by=lambda spec: spec[0]
)
layouts = st.builds(Layout, specs, st.lists(names, max_size=4, unique=True))


@example(Layout([("any text \ud800", "float32", (2,))], ["\udfff"]))
@given(layouts)
def test_a_layout_survives_encoding_and_decoding(layout: Layout) -> None:
    decoded = Layout.decode(layout.encode())

    assert decoded == layout
    assert decoded.entries == layout.entries
    assert decoded.extras == layout.extras
    assert decoded.nbytes == layout.nbytes
    assert decoded.digest == layout.digest
    assert len(layout.digest) == 16


@given(specs, st.randoms(use_true_random=False))
def test_a_layout_does_not_depend_on_the_order_of_the_given_tensors(found: list, random) -> None:
    shuffled = random.sample(found, len(found))

    assert Layout(found) == Layout(shuffled)
    assert Layout(found).entries == Layout(shuffled).entries
    assert hash(Layout(found)) == hash(Layout(shuffled))


@given(layouts)
def test_groups_are_aligned_and_tensors_lie_back_to_back(layout: Layout) -> None:
    covered = []
    for group in layout.groups:
        assert group.offset % ALIGNMENT == 0
        end = group.offset
        for entry in layout.entries[group.first : group.last]:
            assert (entry.dtype, entry.offset) == (group.dtype, end)
            assert entry.nbytes == prod(entry.shape) * ITEMSIZES[entry.dtype]
            end += entry.nbytes
            covered.append(entry)
        assert end == group.offset + group.nbytes

    assert tuple(covered) == layout.entries
    assert layout.nbytes == (layout.groups[-1].offset + layout.groups[-1].nbytes if layout.groups else 0)
    assert len({group.dtype for group in layout.groups}) == len(layout.groups)


def test_tensors_whose_size_is_a_multiple_of_the_alignment_come_first_and_are_aligned() -> None:
    layout = Layout([("a", "float32", (3,)), ("b", "float32", (16,)), ("c", "float32", (1,)), ("d", "float32", (4, 8))])

    assert [entry.name for entry in layout.entries] == ["b", "d", "a", "c"]
    assert all(entry.offset % ALIGNMENT == 0 for entry in layout.entries[:2])


@given(st.binary(max_size=80))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Layout.decode(data)


@given(layouts, st.data())
def test_damaged_bytes_give_a_protocol_error_or_another_layout(layout: Layout, data: st.DataObject) -> None:
    encoded = bytearray(layout.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(encoded) - 1))
        encoded[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(encoded)))
    damaged = bytes(encoded[:cut]) + data.draw(st.binary(max_size=8))

    decoded = None
    with contextlib.suppress(ProtocolError):
        decoded = Layout.decode(damaged)

    assert decoded is None or decoded.encode() == damaged


def test_a_claim_of_four_billion_tensors_is_refused_at_once() -> None:
    with pytest.raises(ProtocolError):
        Layout.decode(b"WSL\x01" + b"\xff\xff\xff\xff" * 3)


@pytest.mark.parametrize("shape", [(1 << 62, 0), (1 << 62,), (1,) * 64], ids=["no elements", "elements", "dimensions"])
def test_the_largest_shapes_are_not_refused(shape: tuple[int, ...]) -> None:
    layout = Layout([("a", "uint8", shape)])

    assert Layout.decode(layout.encode()) == layout


@pytest.mark.parametrize("shape", [(1 << 62, 4), ((1 << 62) + 1, 0), (1,) * 65])
def test_an_impossible_shape_is_refused(shape: tuple[int, ...]) -> None:
    layout = Layout([("a", "uint8", shape)])

    with pytest.raises(ProtocolError, match="impossible shape") as caught:
        Layout.decode(layout.encode())
    assert caught.value.unread == layout.encode()


def test_an_encoding_whose_tensors_are_out_of_order_is_refused() -> None:
    swapped = Layout([("a", "uint8", (1,)), ("b", "uint8", (1,))]).encode().translate(bytes.maketrans(b"ab", b"ba"))

    with pytest.raises(ProtocolError, match="not in canonical form") as caught:
        Layout.decode(swapped)
    assert caught.value.unread == swapped


@given(layouts)
def test_a_layout_fits_itself(layout: Layout) -> None:
    assert layout.difference(Layout.decode(layout.encode())) is None


def test_differences_are_listed_by_name() -> None:
    wanted = Layout([("a", "float32", (3,)), ("b", "int64", (2,)), ("c", "float32", ())], ["norm"])
    given_ = Layout([("a", "float32", (4,)), ("b", "int32", (2,)), ("d", "float32", ())], [""])

    error = wanted.difference(given_)

    assert isinstance(error, LayoutError)
    assert error.missing == ("c", "norm._extra_state")
    assert error.unexpected == ("_extra_state", "d")
    assert error.mismatched == {
        "a": "shape (4,), expected (3,)",
        "b": "dtype int32, expected int64",
    }
    assert str(error) == (
        "The weights do not fit the destination: missing 'c', 'norm._extra_state'; unexpected '_extra_state', 'd'; "
        "mismatched 'a' (shape (4,), expected (3,)), 'b' (dtype int32, expected int64)."
    )
    assert pickle.loads(pickle.dumps(error)).missing == error.missing

    state, tensor = Layout([], ["a"]), Layout([("a._extra_state", "float32", (3,))])
    for one, other in ((state, tensor), (tensor, state)):
        found = one.difference(other)
        assert found.mismatched == {"a._extra_state": "a tensor on one side, extra state on the other"}


def test_the_error_names_a_wrappers_prefix() -> None:
    plain = Layout([("a.w", "float32", (3,)), ("b", "float32", (2,))])
    wrapped = Layout([("module.a.w", "float32", (3,)), ("module.b", "float32", (2,))])

    assert "by the prefix 'module.' of the weights: pass the module inside" in str(plain.difference(wrapped))
    assert "by the prefix 'module.' of the destination: give both sides the wrapper" in str(wrapped.difference(plain))


def test_the_error_for_missing_extra_state_mentions_tensordict_from_module() -> None:
    model = Layout([("b", "float32", (2,))], ["", "norm"])
    bare = Layout([("b", "float32", (2,))])

    assert "TensorDict.from_module() leaves extra state out: pass the module" in str(model.difference(bare))
    assert "from_module" not in str(bare.difference(model))


def test_many_names_are_counted_in_the_message_and_complete_in_the_errors_attributes() -> None:
    model = Layout([(f"p{i:04}", "float32", (i % 2 + 1,)) for i in range(1200)])
    renamed = Layout([(f"q{i:04}", "float32", (i % 2 + 1,)) for i in range(1200)])
    cast = Layout([(f"p{i:04}", "bfloat16", (i % 2 + 1,)) for i in range(1200)])
    reshaped = Layout([(f"p{i:04}", "float32", (i,)) for i in range(1200)])

    fewer, other, dtype, shape = (model.difference(found) for found in (Layout([]), renamed, cast, reshaped))

    assert None not in (fewer, other, dtype, shape)
    assert str(fewer) == (
        "The weights do not fit the destination: missing 1200 names: 'p0000', 'p0001', 'p0002' and 1197 more."
    )
    assert len(fewer.missing) == len(other.unexpected) == len(dtype.mismatched) == 1200
    assert "missing 1200 names: 'p0000'" in str(other)
    assert "unexpected 1200 names: 'q0000'" in str(other)
    assert str(dtype) == (
        "The weights do not fit the destination: mismatched 1200 names: dtype bfloat16, expected float32 "
        "(in 1200: 'p0000', 'p0001', 'p0002' and 1197 more)."
    )
    assert "mismatched 1200 names: shape (0,), expected (1,) (in 1: 'p0000'), " in str(shape)
    assert max(len(str(error)) for error in (fewer, other, dtype, shape)) < 400


def test_the_summary_of_a_layout_is_one_line() -> None:
    layout = Layout([*((f"p{i}", "float32", (2,)) for i in range(9)), ("n", "int64", ())])

    assert layout.summary() == "10 tensors (1 int64, 9 float32): 'n', 'p0', 'p1' and 7 more"
    assert Layout([]).summary() == "no tensors"


def test_a_name_that_occurs_twice_is_refused() -> None:
    with pytest.raises(LayoutError, match="'a' occurs twice") as caught:
        Layout([("a", "float32", ()), ("a", "int8", (3,))])
    assert caught.value.unexpected == ("a",)


@pytest.mark.parametrize(
    ("wanted", "given", "said"),
    [
        ("float32", "float64", "wire_dtype='float32', or cast the worker's model with model.to(torch.float64)."),
        (
            "float32",
            "bfloat16",
            "give the trainer's scheme wire_dtype='float32', or cast the worker's model with model.to(torch.bfloat16). "
            "If the trainer's model is bfloat16 itself, only that cast helps: wire_dtype= widens nothing.",
        ),
        (
            "bfloat16",
            "float16",
            "give the trainer's scheme wire_dtype='bfloat16', or cast the worker's model with model.to(torch.float16). "
            "If the trainer's model is float16 itself, only that cast helps: wire_dtype= widens nothing.",
        ),
        ("bfloat16", "float32", "wire_dtype='bfloat16', or cast the worker's model with model.to(torch.float32)."),
        ("float32", "complex64", "same dtype: cast the worker's model with model.to(torch.complex64)."),
        ("float32", "float8_e5m2", "same dtype: cast the worker's model with model.to(torch.float8_e5m2)."),
        ("int64", "int32", "(dtype int32, expected int64)."),
        ("float32", "int64", "(dtype int64, expected float32)."),
        ("int64", "float32", "(dtype float32, expected int64)."),
    ],
)
def test_the_error_for_a_wrong_dtype_advises_only_casts_that_can_work(wanted: str, given: str, said: str) -> None:
    error = Layout([("a", wanted, (2,))]).misfit(Layout([("a", given, (2,))]))

    assert str(error).endswith(said)
    assert (error.missing, error.unexpected) == ((), ())
    assert error.mismatched == {"a": f"dtype {given}, expected {wanted}"}


def test_the_names_option_is_advised_only_if_one_sides_names_contain_the_others() -> None:
    whole = Layout([("a", "float32", (2,)), ("b", "float32", (2,))])
    part, renamed = Layout([("a", "float32", (2,))]), Layout([("a", "float32", (2,)), ("c", "float32", (2,))])
    reshaped = Layout([("a", "float32", (3,))])

    fewer, more, others, both = whole.misfit(part), part.misfit(whole), whole.misfit(renamed), whole.misfit(reshaped)

    assert all(str(error).endswith("give trainer and worker the same names=.") for error in (fewer, more))
    assert [(error.missing, error.unexpected) for error in (fewer, more)] == [(("b",), ()), ((), ("b",))]
    assert not any("names=" in str(error) for error in (others, both))
    assert (both.missing, set(both.mismatched)) == (("b",), {"a"})


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(LayoutError, match="'a' has the dtype qint8") as caught:
        Layout([("a", "qint8", (3,))])
    assert caught.value.mismatched == {"a": "qint8"}
