"""Every byte of a payload is copied from and to its tensor, gathered on a device or not, whole or in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weightsync import ConfigurationError, LayoutError
from weightsync.weights import packing
from weightsync.weights.extra_state import encode_extras
from weightsync.weights.layout import ALIGNMENT, Layout
from weightsync.weights.packing import digest_of, digest_of_weights, kept_views, pack, scatter, views
from weightsync.weights.reading import Weights, layout_of, ordered, read_weights
from weightsync.weights.tensors import address_of, bits_of
from weightsync.weights.tree_digest import digest

#: Tensors in three groups of dtypes. A gap follows each group but the last.
GIVEN = {
    "a": torch.arange(1, 17, dtype=torch.float32),
    "b": torch.arange(17, 23, dtype=torch.float32).view(2, 3),
    "c": torch.arange(23, 26, dtype=torch.int64),
    "d": torch.tensor([True, False, True]),
    "e": torch.arange(26, 42, dtype=torch.float32),
}
WEIGHTS = read_weights(GIVEN)
LAYOUT = layout_of(WEIGHTS)


def expected() -> bytes:
    """The bytes that the payload must have."""
    payload = bytearray(LAYOUT.nbytes)
    for entry in LAYOUT.entries:
        payload[entry.offset : entry.offset + entry.nbytes] = bits_of(GIVEN[entry.name]).numpy().tobytes()
    return bytes(payload)


@pytest.fixture(params=[1, 88, 64 << 20])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The number of bytes moved at a time."""
    monkeypatch.setattr(packing, "CHUNK", request.param)
    packing._chunks.cache_clear()
    yield request.param
    packing._chunks.cache_clear()


@pytest.fixture(params=["in the processor's memory", "gathered"])
def gathered(request: pytest.FixtureRequest, chunk: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether tensors are moved piece by piece, as if they were on a device."""
    device = bool(request.param == "gathered")
    if device:
        monkeypatch.setattr(packing, "_on_one_device", lambda tensors: len(tensors) > 0)
    return device


def test_pack_writes_the_tensors_and_zeros_in_the_gaps_and_nothing_behind_them(gathered: bool) -> None:
    payload = bytearray(b"\xaa" * (LAYOUT.nbytes + 5))
    pack(WEIGHTS, LAYOUT, memoryview(payload))

    assert bytes(payload) == expected() + b"\xaa" * 5
    assert len(LAYOUT.gaps) == 2
    exact = bytearray(LAYOUT.nbytes)
    pack(WEIGHTS, LAYOUT, memoryview(exact))
    assert bytes(exact) == expected()


def test_scatter_copies_the_chosen_tensors_and_leaves_the_others(gathered: bool) -> None:
    payload = memoryview(bytearray(expected()))
    every = range(len(LAYOUT.entries))
    for chosen in ((), (1, 3), every):
        into = [torch.zeros(entry.shape, dtype=GIVEN[entry.name].dtype) for entry in LAYOUT.entries]
        scatter(LAYOUT, into, chosen, address_of(payload))
        taken = every if gathered and chosen else chosen  # a gathered piece is copied whole
        for index, (entry, tensor) in enumerate(zip(LAYOUT.entries, into, strict=True)):
            assert torch.equal(tensor, GIVEN[entry.name] * (index in taken))


def test_the_digest_covers_the_payload_and_the_extra_state(gathered: bool) -> None:
    payload = memoryview(bytearray(expected()))

    assert digest_of(WEIGHTS, LAYOUT, b"extras") == digest(payload, b"extras") != digest(payload, b"")
    assert digest_of_weights(GIVEN) == digest(payload, encode_extras({}))


def test_the_extra_state_of_a_module_is_in_its_digest() -> None:
    class Moody(nn.Linear):
        mood = 1

        def get_extra_state(self) -> Any:
            return self.mood

        def set_extra_state(self, state: Any) -> None:
            self.mood = state

    module = Moody(2, 2)
    before = digest_of_weights(module)
    assert digest_of_weights(module) == before
    module.mood = 2
    assert digest_of_weights(module) != before


@pytest.mark.parametrize("first", range(6))
def test_views_of_any_run_of_tensors_match_the_bytes_that_start_with_the_run(first: int) -> None:
    found = ordered(WEIGHTS, LAYOUT)
    for last in range(first, 6):
        start = LAYOUT.entries[first].offset if first < last else 0
        flat = torch.frombuffer(bytearray(expected()[start:]), dtype=torch.uint8)
        seen = views(LAYOUT, flat, first, last)
        assert [tuple(each.shape) for each in seen] == [entry.shape for entry in LAYOUT.entries[first:last]]
        assert all(map(torch.equal, seen, found[first:last]))
    assert len(views(LAYOUT, torch.frombuffer(bytearray(expected()), dtype=torch.uint8))) == 5


def test_the_views_of_a_buffer_are_made_once_and_are_inference_tensors() -> None:
    payload = memoryview(bytearray(expected()))
    seen = kept_views(LAYOUT, address_of(payload))

    assert kept_views(LAYOUT, address_of(payload)) is seen
    assert all(each.is_inference() for each in seen)
    assert packing._kept_views.cache_info().maxsize == packing._chunks.cache_info().maxsize == 8


def test_pieces_have_one_dtype_and_are_as_large_as_the_chunk_size_allows(chunk: int) -> None:
    assert [entry.nbytes for entry in LAYOUT.entries] == [24, 64, 64, 24, 3]
    assert (
        packing._chunks(LAYOUT)
        == {
            1: ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5)),
            88: ((0, 1), (1, 2), (2, 4), (4, 5)),
            64 << 20: ((0, 1), (1, 4), (4, 5)),
        }[chunk]
    )


def sparse() -> Weights:
    """Weights of which one tensor became sparse after the layout was made."""
    weights = read_weights(dict(GIVEN))
    weights.tensors["e"] = GIVEN["e"].to_sparse()
    return weights


def test_a_tensor_that_cannot_be_copied_is_named(gathered: bool) -> None:
    with pytest.raises(LayoutError, match=r"^'e' has the layout ") as caught:
        pack(sparse(), LAYOUT, memoryview(bytearray(LAYOUT.nbytes)))
    assert list(caught.value.mismatched) == ["e"]
    assert str(caught.value) == f"'e' {caught.value.mismatched['e']}."
    with pytest.raises(LayoutError, match=r"^'e' has the layout "):
        digest_of(sparse(), LAYOUT, b"")


def test_an_error_that_no_tensor_caused_is_raised_unchanged(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("out of memory")

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(torch, "_foreach_copy_", fails)
    for ask in (
        lambda: pack(WEIGHTS, LAYOUT, memoryview(bytearray(LAYOUT.nbytes))),
        lambda: digest_of(WEIGHTS, LAYOUT, b""),
    ):
        with pytest.raises(RuntimeError) as caught:
            ask()
        assert caught.value is error
    pack(read_weights({}), layout_of(read_weights({})), memoryview(bytearray()))


@pytest.mark.parametrize(
    "view", [memoryview(bytes(999)), memoryview(bytearray(999))[::2], memoryview(bytearray(LAYOUT.nbytes - 1))]
)
def test_an_unusable_buffer_is_refused_with_the_required_size(view: memoryview) -> None:
    with pytest.raises(ConfigurationError, match=rf"needs {LAYOUT.nbytes} contiguous, writable bytes\.$"):
        pack(WEIGHTS, LAYOUT, view)


def on(device: str) -> Any:
    return SimpleNamespace(device=device, is_cpu=device == "cpu", is_meta=device == "meta")


@pytest.mark.parametrize(
    ("devices", "gathers"),
    [
        ([], False),
        (["cpu"], False),
        (["meta", "meta"], False),
        (["cpu", "cuda:0"], False),
        (["cuda:0", "cpu"], False),
        (["cuda:0", "cuda:1"], False),
        (["cuda:0"], True),
        (["cuda:0", "cuda:0"], True),
    ],
)
def test_tensors_are_gathered_only_if_all_are_on_one_accelerator(devices: list[str], gathers: bool) -> None:
    assert packing._on_one_device([on(device) for device in devices]) is gathers


def test_groups_that_touch_have_no_gap() -> None:
    size = ALIGNMENT // 4
    touching = Layout([("a", "float32", (size,)), ("b", "int32", (size,))])
    assert touching.gaps == ()
    apart = Layout([("a", "float32", (1,)), ("b", "int32", (1,))])
    assert apart.gaps == ((4, ALIGNMENT),)
    assert isinstance(views(touching, torch.zeros(touching.nbytes, dtype=torch.uint8))[0], Tensor)
