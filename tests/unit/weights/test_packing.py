"""Packing moves every tensor bit by bit, whatever its dtype, shape and strides."""

from __future__ import annotations

import ctypes

import numpy
import pytest
import torch
import xxhash
from data_samples import bits, in_order, sample, sampled_dicts
from hypothesis import given
from torch import Tensor

from weightsync import ConfigurationError, LayoutError
from weightsync.weights import packing
from weightsync.weights.layout import Layout
from weightsync.weights.packing import Pieces, digest_of, movable, pack, pack_digested, views
from weightsync.weights.reading import Weights, layout_of, ordered, read_weights
from weightsync.weights.tensors import DTYPES, address_of
from weightsync.weights.tree_digest import CHUNK, digest


@given(sampled_dicts)
def test_packed_tensors_are_bit_identical_and_padding_is_zero(found: dict[str, tuple[Tensor, bytes]]) -> None:
    weights = read_weights({name: tensor for name, (tensor, _) in found.items()})
    layout = layout_of(weights)
    payload = bytearray(b"\xaa" * (layout.nbytes + 5))

    pack(weights, layout, memoryview(payload))

    assert bytes(payload[layout.nbytes :]) == b"\xaa" * 5
    covered = 0
    for entry in layout.entries:
        assert bytes(payload[entry.offset : entry.offset + entry.nbytes]) == in_order(found[entry.name][1], entry)
        assert not any(payload[covered : entry.offset])
        covered = entry.offset + entry.nbytes
    assert digest_of(weights, layout, b"x") == digest(memoryview(payload)[: layout.nbytes], b"x")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arrangement", ["contiguous", "strided"])
def test_random_bits_of_every_dtype_are_packed_unchanged(dtype: str, arrangement: str) -> None:
    tensor, expected = sample(dtype, (1 << 16,), 3, arrangement)

    weights = read_weights({"a": tensor})
    payload = bytearray(len(expected))
    pack(weights, layout_of(weights), memoryview(payload))

    assert payload == expected


@pytest.mark.parametrize("dtype", [name for name, dtype in DTYPES.items() if dtype.itemsize == 2])
@pytest.mark.parametrize("step", [1, 2], ids=["contiguous", "strided"])
def test_all_patterns_of_sixteen_bits_are_packed_unchanged(dtype: str, step: int) -> None:
    patterns = numpy.arange(1 << 16, dtype=numpy.uint16)
    tensor = torch.from_numpy(patterns.repeat(step)).view(DTYPES[dtype])[::step]

    weights = read_weights({"a": tensor})
    payload = bytearray(2 << 16)
    pack(weights, layout_of(weights), memoryview(payload))

    assert payload == patterns.tobytes()


def test_lazily_conjugated_and_negated_tensors_are_packed_resolved() -> None:
    tensor = torch.randn(5, dtype=torch.complex64)
    weights = read_weights({"conj": tensor.conj(), "neg": tensor.conj().imag})
    payload = bytearray(layout_of(weights).nbytes)

    pack(weights, layout_of(weights), memoryview(payload))

    assert bytes(payload[:40]) == bits(tensor.conj().resolve_conj())
    assert bytes(payload[64:84]) == bits(-tensor.imag)


def test_weights_are_packed_and_hashed_under_allow_mutation_on_saved_tensors() -> None:
    weights = read_weights({"flags": torch.tensor([True, False]), "strided": torch.arange(8.0)[::2]})
    layout = layout_of(weights)
    payload = bytearray(layout.nbytes)

    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        pack(weights, layout, memoryview(payload))
        found = digest_of(weights, layout, b"")

    places = {each.name: slice(each.offset, each.offset + each.nbytes) for each in layout.entries}
    assert {name: bytes(payload[place]) for name, place in places.items()} == {
        "flags": b"\x01\x00",
        "strided": bits(torch.tensor([0.0, 2.0, 4.0, 6.0])),
    }
    assert found == digest(memoryview(payload), b"")


def test_a_reused_buffer_is_overwritten() -> None:
    buffers = [bytearray(4), bytearray(4)]
    for value in range(6):
        weights = read_weights({"a": torch.tensor(float(value))})
        pack(weights, layout_of(weights), memoryview(buffers[value % 2]))

        assert buffers[value % 2] == bits(torch.tensor(float(value)))


def test_packing_leaves_no_export_of_the_buffer() -> None:
    buffer = bytearray(400)
    weights = read_weights({"a": torch.ones(100)})

    pack(weights, layout_of(weights), memoryview(buffer))
    buffer.clear()  # raises BufferError if an export of it is left

    assert not buffer


@given(sampled_dicts)
def test_the_digest_is_the_same_if_weights_are_hashed_in_small_pieces(found: dict[str, tuple[Tensor, bytes]]) -> None:
    weights = read_weights({name: tensor for name, (tensor, _) in found.items()})
    layout = layout_of(weights)
    payload = memoryview(bytearray(layout.nbytes))
    pack(weights, layout, payload)
    before, packing.CHUNK = packing.CHUNK, 48
    try:
        packing._chunks.cache_clear()

        assert digest_of(weights, layout, b"e") == digest(payload, b"e")
    finally:
        packing.CHUNK = before
        packing._chunks.cache_clear()


def test_an_empty_model_has_a_layout_and_a_digest() -> None:
    weights = read_weights({})
    layout = layout_of(weights)

    pack(weights, layout, memoryview(bytearray()))

    assert (layout.nbytes, layout.entries) == (0, ())
    assert digest_of(weights, layout, b"") == digest(memoryview(b""), b"") == xxhash.xxh3_128_digest(bytes(8))


@pytest.mark.parametrize("view", [memoryview(bytes(16)), memoryview(bytearray(15)), memoryview(bytearray(64))[::2]])
def test_packing_into_a_read_only_short_or_strided_buffer_is_refused(view: memoryview) -> None:
    weights = read_weights({"a": torch.ones(4)})

    with pytest.raises(ConfigurationError, match="16 contiguous, writable bytes"):
        pack(weights, layout_of(weights), view)


def test_a_sparse_tensor_that_fits_a_known_layout_is_refused_by_name() -> None:
    known = Layout([("a", "float32", (2,)), ("b", "float32", (3,))])
    sparse = Weights({"a": torch.ones(2), "b": torch.ones(3).to_sparse()}, {})

    with pytest.raises(LayoutError, match="'b' has the layout"):
        layout_of(sparse, known)
    with pytest.raises(LayoutError, match="'b' has the layout"):
        pack(sparse, known, memoryview(bytearray(known.nbytes)))


def test_the_error_names_only_the_tensor_that_cannot_be_copied() -> None:
    known = layout_of(read_weights({"a": torch.ones(20_000), "b": torch.ones(3)}))
    sparse = Weights({"a": torch.ones(20_000), "b": torch.ones(3).to_sparse()}, {})

    with pytest.raises(LayoutError) as caught:
        pack(sparse, known, memoryview(bytearray(known.nbytes)))

    assert list(caught.value.mismatched) == ["b"]


def test_the_digest_of_a_large_tensor_is_computed_from_the_tensor_and_not_from_its_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def damages(to: int, source: int, nbytes: int) -> None:
        ctypes.memmove(to, source, nbytes)
        ctypes.memset(to, 0xFF, 1)

    monkeypatch.setattr(packing, "mover", lambda _: damages)
    weights = read_weights({"large": torch.zeros(CHUNK // 2)})
    layout = layout_of(weights)
    view = memoryview(bytearray(layout.nbytes))
    pieces = Pieces(layout, movable(layout, ordered(weights, layout)))

    found = pack_digested(weights, layout, view, b"", pieces)

    assert bytes(view).count(0xFF)
    assert found == digest(memoryview(bytes(layout.nbytes)), b"")


def test_copied_ranges_are_reported_without_gaps_and_none_crosses_a_chunk() -> None:
    before = torch.get_num_threads()
    weights = read_weights({"a": torch.randn(1000), "b": torch.randn(1_200_000), "c": torch.randn(1_300_000)})
    layout = layout_of(weights)
    payload = memoryview(bytearray(layout.nbytes))
    written: list[tuple[int, int]] = []
    tensors = ordered(weights, layout)
    try:
        torch.set_num_threads(1)
        pieces = Pieces(layout, movable(layout, tensors, least=0))
        pieces.fill(tensors, address_of(payload), on_written=lambda *part: written.append(part))
    finally:
        torch.set_num_threads(before)

    assert bytes(payload) == b"".join(bits(tensor) for tensor in tensors)
    written.sort()
    assert [start for start, _ in written] == [0, *(end for _, end in written[:-1])]
    assert written[-1][1] == layout.nbytes
    assert all(start // CHUNK == (end - 1) // CHUNK for start, end in written)
    assert pack_digested(weights, layout, payload, b"x", pieces) == digest(payload, b"x")


def test_an_empty_layout_has_no_views() -> None:
    assert views(Layout(()), torch.empty(0, dtype=torch.uint8)) == []


def test_torch_compile_does_not_trace_the_hashing_of_weights() -> None:
    """The default backend fails at tensors of inference mode, and torch is unusable in that thread from then on."""
    weights = read_weights({"a": torch.ones(3), "b": torch.ones(2, dtype=torch.int64)})
    layout, graphs = layout_of(weights), []
    torch._dynamo.reset()

    @torch.compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
    def hashed() -> bytes:
        return digest_of(weights, layout, b"")

    assert hashed() == digest_of(weights, layout, b"")
    assert not graphs
    torch._dynamo.reset()
