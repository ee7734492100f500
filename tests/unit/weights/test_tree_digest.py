"""The digest is as the protocol defines it, and weights are copied whole, whatever the number of threads."""

from __future__ import annotations

import pytest
import torch
import xxhash
from data_samples import in_order
from torch import Tensor, nn

from weightsync.weights import division, packing, threads, tree_digest
from weightsync.weights.packing import Pieces, digest_of, movable, pack, pack_digested, scatter
from weightsync.weights.reading import layout_of, ordered, read_weights
from weightsync.weights.tensors import address_of, bits_of
from weightsync.weights.tree_digest import CHUNK, ChunkHashes, StreamedDigest, digest

KIB = 1024


def reference(payload: bytes, extras: bytes) -> str:
    """The digest, as docs/protocol.md defines it."""
    chunks = [payload[at : at + 512 * KIB] for at in range(0, len(payload), 512 * KIB)]
    hashes = b"".join(xxhash.xxh3_128(chunk).digest() for chunk in chunks)
    return xxhash.xxh3_128(len(payload).to_bytes(8, "little") + hashes + extras).hexdigest()


def payload_of(nbytes: int) -> bytearray:
    return bytearray((bytes(range(251)) * (nbytes // 251 + 1))[:nbytes])


@pytest.mark.parametrize(
    ("nbytes", "extras", "golden"),
    [
        (0, b"", "2c0a8a99dc147d5445c3b49d035665b2"),
        (1, b"", "c7598232a9fdf3840632188e8b6eaef2"),
        (1000, b"extra", "9602cec96234472003c2f6563a14c613"),
        (524288, b"", "6ab336c48509dd7f930c7ff66766c430"),
        (524289, b"", "8dbd628c17a0b7bcfe95b3189ff281f0"),
        (1500000, b"extra", "75149f52f09944562a96c14f56391a05"),
    ],
)
def test_the_digest_matches_the_definition_in_the_protocol(nbytes: int, extras: bytes, golden: str) -> None:
    payload = payload_of(nbytes)

    assert digest(memoryview(payload), extras).hex() == golden == reference(bytes(payload), extras)


@pytest.fixture(params=[1, 2, 3, 7])
def used(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of threads that torch may use. A thread is worth starting for 64 KiB."""
    monkeypatch.setattr(threads, "LEAST", 64 * KIB)
    monkeypatch.setattr(threads, "LEAST_PART", 64 * KIB)
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    return request.param


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 77])
def test_the_digest_is_the_same_on_any_number_of_threads_and_in_any_pieces(used: int, nbytes: int) -> None:
    payload = memoryview(payload_of(nbytes))
    expected = reference(bytes(payload), b"e")

    assert digest(payload, b"e").hex() == expected
    for piece in (CHUNK // 3, CHUNK, 2 * CHUNK + 5):
        streamed, followed, given = StreamedDigest(), ChunkHashes(payload), ChunkHashes(payload)
        order = given.in_order(0)
        for at in range(0, nbytes, piece):
            streamed.take(payload[at : at + piece])
            order.take(payload[at : at + piece])
            followed.reach(at, min(at + piece, nbytes))
        assert {hashes.combined(b"e").hex() for hashes in (streamed, followed, given)} == {expected}


class Subclass(Tensor):
    """A tensor that only torch can copy."""


def mixed() -> dict[str, Tensor]:
    """Large and small tensors in turn, over more than four chunks. Some cannot be moved as bytes."""
    drawn = torch.Generator().manual_seed(19)

    def bits(nbytes: int) -> Tensor:
        return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=drawn)

    given = {f"{number:02}.large": bits(300 * KIB).view(torch.int32) for number in range(4)}
    given |= {f"{number:02}.small": bits(4 * KIB).view(torch.int32) for number in range(150)}
    given["03.strided"] = bits(256 * KIB).view(torch.int32).view(256, 256).t()
    given["03.subclass"] = bits(100 * KIB).view(torch.int32).as_subclass(Subclass)
    given["flags"] = bits(200 * KIB) > 100
    given["negative"] = torch.randn(64 * KIB, dtype=torch.complex64, generator=drawn).conj().imag
    return given


def test_weights_are_packed_and_hashed_exactly_on_any_number_of_threads(used: int) -> None:
    weights = read_weights(mixed())
    layout = layout_of(weights)
    packed, digested = bytearray(layout.nbytes), bytearray(layout.nbytes)

    pack(weights, layout, memoryview(packed))
    found = pack_digested(weights, layout, memoryview(digested), b"e")

    for entry, tensor in zip(layout.entries, ordered(weights, layout), strict=True):
        expected = in_order(bits_of(tensor).numpy().tobytes(), entry)
        assert packed[entry.offset : entry.offset + entry.nbytes] == expected, entry.name
    assert packed == digested
    pieces = Pieces(layout, movable(layout, ordered(weights, layout)))
    assert [len(each.parts) > 1 for each in (pieces._whole, pieces._chunked)] == [used > 1] * 2
    assert found.hex() == reference(bytes(packed), b"e") == digest_of(weights, layout, b"e").hex()


def test_scatter_writes_only_chosen_tensors_on_any_number_of_threads_and_bumps_their_versions(used: int) -> None:
    weights = read_weights(mixed())
    layout = layout_of(weights)
    payload = bytearray(layout.nbytes)
    pack(weights, layout, memoryview(payload))
    source = ordered(weights, layout)
    into = [torch.zeros_like(tensor, memory_format=torch.preserve_format) for tensor in source]
    chosen = [index for index in range(len(into)) if index % 5]
    versions = [tensor._version for tensor in into]

    scatter(layout, into, chosen, address_of(memoryview(payload)))

    for index, (tensor, expected) in enumerate(zip(into, source, strict=True)):
        written = index in chosen
        assert torch.equal(bits_of(tensor), bits_of(expected) * written), layout.entries[index].name
        assert (tensor._version > versions[index]) == written


def test_scatter_with_a_plan_writes_small_tensors_with_and_without_version_counters(used: int) -> None:
    weights = read_weights({name: tensor for name, tensor in mixed().items() if "small" in name})
    layout = layout_of(weights)
    payload = bytearray(layout.nbytes)
    pack(weights, layout, memoryview(payload))
    source = ordered(weights, layout)
    into = [torch.zeros_like(tensor) for tensor in source]
    with torch.inference_mode():
        into[7] = torch.zeros_like(source[7])
    chosen = [index for index in range(len(into)) if index % 5]
    pieces = Pieces(layout, movable(layout, into, least=0))

    scatter(layout, into, chosen, address_of(memoryview(payload)), pieces)

    assert len(pieces._whole.parts) == 1 <= used  # however many threads there are
    for index, (tensor, expected) in enumerate(zip(into, source, strict=True)):
        assert torch.equal(tensor, expected * (index in chosen))
        assert tensor.is_inference() or (tensor._version > 0) == (index in chosen)


def test_scatter_keeps_the_memory_for_joined_small_tensors_from_the_second_copy_on() -> None:
    source, into = [torch.randn(5), torch.randn(3)], [torch.zeros(5), torch.zeros(3)]
    weights = read_weights({"a": source[0], "b": source[1]})
    layout = layout_of(weights)
    payload = memoryview(bytearray(layout.nbytes))
    pack(weights, layout, payload)
    pieces, kept = Pieces(layout, movable(layout, into, least=0)), []
    for _ in range(3):
        into[0].zero_()
        scatter(layout, into, [0, 1], address_of(payload), pieces)
        kept.append(list(pieces._memories.values()))
        assert all(map(torch.equal, into, source))

    assert list(map(len, kept)) == [0, 1, 1]
    assert kept[1][0] is kept[2][0]


def test_scatter_bumps_the_other_versions_if_torch_refuses_inference_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = torch.autograd.graph.increment_version

    def refusing(tensors: list[Tensor]) -> None:
        if any(tensor.is_inference() for tensor in tensors):
            raise RuntimeError("Inference tensors do not track version counter.")
        count(tensors)

    monkeypatch.setattr(torch.autograd.graph, "increment_version", refusing)
    weights = read_weights({"a": torch.ones(4), "b": torch.ones(4)})
    layout = layout_of(weights)
    payload = bytearray(layout.nbytes)
    pack(weights, layout, memoryview(payload))
    into = [torch.zeros(4), torch.zeros(4)]
    with torch.inference_mode():
        into[0] = torch.zeros(4)

    scatter(layout, into, [0, 1], address_of(memoryview(payload)), Pieces(layout, movable(layout, into, least=0)))

    assert [tensor.tolist() for tensor in into] == [[1.0] * 4] * 2
    assert into[1]._version == 1


def test_backward_through_overwritten_weights_raises() -> None:
    model = nn.Linear(256, 256)
    loss = (model(model(torch.ones(256))) ** 2).sum()
    weights = read_weights({"weight": torch.ones(256, 256), "bias": torch.ones(256)})
    layout = layout_of(weights)
    payload = bytearray(layout.nbytes)
    pack(weights, layout, memoryview(payload))

    scatter(layout, ordered(read_weights(model), layout), range(2), address_of(memoryview(payload)))

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("cut", [128, 100])
@pytest.mark.parametrize("first", [0, 1])
def test_a_chunk_is_hashed_only_once_filled_in_either_order_of_its_parts(
    monkeypatch: pytest.MonkeyPatch, cut: int, first: int
) -> None:
    monkeypatch.setattr(tree_digest, "CHUNK", 64)
    expected, payload = payload_of(250), bytearray(250)
    hashes = ChunkHashes(memoryview(payload))

    parts = [(0, cut), (cut, 250)]
    for start, end in (parts[first], parts[1 - first]):
        payload[start:end] = expected[start:end]
        hashes.reach(start, end)

    assert hashes.combined(b"x") == digest(memoryview(expected), b"x")


def test_tensors_that_span_chunks_and_parts_are_packed_and_hashed_exactly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module, name, small in (
        (packing, "DIGEST_CHUNK", 64),
        (packing, "LARGE_HASHED", 64),
        (division, "CHUNK", 64),
        (division, "LARGE", 64),
        (tree_digest, "CHUNK", 64),
        (threads, "LEAST", 256),
        (threads, "LEAST_PART", 256),
    ):
        monkeypatch.setattr(module, name, small)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    # Names that no other test uses: plans are kept by layout, and other tests made theirs with other sizes.
    sizes = (5, 8, 90, 16, 3, 70, 1, 200, 16)
    tensors = {f"spans.{number}": torch.randn(size) for number, size in enumerate(sizes)}
    tensors |= {"spans.cast": torch.randn(40)[::2], "spans.bools": torch.arange(100) % 3 == 0}
    weights = read_weights(tensors)
    layout = layout_of(weights)
    plain, hashed = bytearray(b"\xaa" * layout.nbytes), bytearray(b"\x55" * layout.nbytes)

    pack(weights, layout, memoryview(plain))
    found = pack_digested(weights, layout, memoryview(hashed), b"x")

    assert plain == hashed
    for entry in layout.entries:
        sent = tensors[entry.name].contiguous().view(torch.uint8).numpy().tobytes()
        assert bytes(plain[entry.offset : entry.offset + entry.nbytes]) == sent
    assert found == digest(memoryview(plain), b"x") == digest_of(weights, layout, b"x")
