"""Whether parameters use the memory of a payload or of a copy, and when the memory of a copy is used again."""

from __future__ import annotations

import io
import mmap
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from data_samples import packed
from fleet import functions_called
from torch import Tensor, nn

from weightsync.weights import mapped
from weightsync.weights.layout import ALIGNMENT, Layout
from weightsync.weights.mapped import KEPT_BELOW_NBYTES, KEPT_COPIES, KEPT_LARGE, KEPT_PAYLOADS, MappedPayloads
from weightsync.weights.packing import pack
from weightsync.weights.reading import layout_of, read_weights
from weightsync.weights.target import Mode, Target
from weightsync.weights.tensors import address_of

SMALL, LARGE = 100, KEPT_BELOW_NBYTES // 4


def written(memory: memoryview, count: int, value: float = 1.0) -> Layout:
    """Pack two tensors of this size and value into the memory. Returns their layout."""
    weights = read_weights({"a": torch.full((count,), value), "b": torch.full((count,), value)})
    layout = layout_of(weights)
    pack(weights, layout, memory)
    return layout


def aligned(kind: Callable[[int], bytearray | mmap.mmap], nbytes: int, shift: int = 0) -> memoryview:
    """Memory that begins ``shift`` bytes behind an aligned address."""
    view = memoryview(kind(nbytes + 2 * ALIGNMENT))
    start = -address_of(view) % ALIGNMENT + shift
    return view[start : start + nbytes]


def shared(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes)


@pytest.fixture
def payloads() -> Iterator[MappedPayloads]:
    made = MappedPayloads()
    yield made
    made._kept.clear()
    made._copies.clear()


@pytest.mark.parametrize(
    ("memory", "access", "own"),
    [
        pytest.param(aligned(shared, 8 * SMALL), memoryview, True, id="a slot"),
        pytest.param(aligned(shared, 8 * LARGE), memoryview, True, id="a large slot"),
        pytest.param(aligned(bytearray, 8 * LARGE), memoryview, True, id="large and inline"),
        pytest.param(aligned(bytearray, 8 * SMALL), memoryview, False, id="small and inline"),
        pytest.param(aligned(shared, 8 * SMALL), memoryview.toreadonly, False, id="read-only"),
        pytest.param(aligned(shared, 8 * SMALL, 4), memoryview, False, id="not aligned"),
        pytest.param(aligned(bytearray, 8 * LARGE, 4), memoryview, False, id="large, inline and not aligned"),
    ],
)
def test_writable_aligned_slots_and_large_payloads_are_viewed_and_others_are_copied(
    payloads: MappedPayloads, memory: memoryview, access: Callable[[memoryview], memoryview], own: bool
) -> None:
    count = len(memory) // 8
    layout, payload = written(memory, count), access(memory)

    found = payloads.of(layout, payload)
    written(memory, count, 2.0)

    assert [set(view.tolist()) for view in found.views] == [{2.0 if own else 1.0}] * 2
    assert (found.views[0].data_ptr() == address_of(payload)) == own


def inline(value: float, layout: Layout | None = None) -> tuple[Layout, memoryview]:
    memory = aligned(bytearray, 8 * SMALL)
    made = written(memory, SMALL, value)
    return layout or made, memory


def test_copies_of_small_inline_payloads_alternate_between_two_buffers(payloads: MappedPayloads) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(SMALL)) for _ in range(2)]
    layout, places = None, []
    for version in range(1, 6):
        layout, memory = inline(float(version), layout)
        copy = payloads.of(layout, memory)
        for parameter, view in zip(parameters, copy.views, strict=True):
            parameter.data = view
        assert [set(parameter.tolist()) for parameter in parameters] == [{float(version)}] * 2
        places.append(parameters[0].data_ptr())
    first, second = places[:KEPT_COPIES]
    assert first != second
    assert places == [first, second, first, second, first]


def row(tensor: Tensor) -> Tensor:
    return tensor.view(10, -1)[3]


@pytest.mark.parametrize("keep", [Tensor.detach, Tensor.numpy, row])
def test_a_copy_that_a_user_still_views_is_not_reused(payloads: MappedPayloads, keep: Callable[[Tensor], Any]) -> None:
    layout, memory = inline(1.0)
    first = payloads.of(layout, memory)
    kept = keep(first.views[1])
    for version in (2.0, 3.0, 4.0):
        assert payloads.of(layout, inline(version)[1]) is not first

    assert set(kept.tolist()) == {1.0}


def test_a_copy_that_was_shrunk_is_not_reused_even_at_the_same_address(payloads: MappedPayloads) -> None:
    layout, memory = inline(1.0)
    first = payloads.of(layout, memory)
    first.views[0].untyped_storage().resize_(8)
    first._addresses = [first.views[0].untyped_storage().data_ptr()]  # as if the memory had been freed before

    assert payloads.of(layout, inline(2.0)[1]) is not first


def test_only_the_newest_copies_in_use_are_kept(payloads: MappedPayloads) -> None:
    layout, in_use, copies = None, [], []
    for version in range(KEPT_COPIES + 1):
        layout, memory = inline(float(version), layout)
        copy = payloads.of(layout, memory)
        in_use.append(copy.views[0].detach())
        copies.append(weakref.ref(copy))
        del copy

    assert [copy() is None for copy in copies] == [True] + [False] * KEPT_COPIES


def test_a_copy_is_reused_only_for_the_same_layout_object(payloads: MappedPayloads) -> None:
    layout, memory = inline(1.0)
    copy = payloads.of(layout, memory)
    assert payloads.of(layout, inline(2.0)[1]) is copy
    equal, memory = inline(3.0)
    names, shapes = (
        Layout([(name, "float32", shape) for name in pair])
        for pair, shape in (("ac", (SMALL,)), ("ab", (2, SMALL // 2)))
    )

    for other in (equal, names, shapes):
        assert other.nbytes == layout.nbytes
        assert payloads.of(other, memory) is not copy
    assert copy.views[0].tolist() == [2.0] * SMALL


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize("access", [memoryview, memoryview.toreadonly])
def test_saving_a_mapped_model_of_several_dtypes_writes_only_its_weights(
    count: int, access: Callable[[memoryview], memoryview]
) -> None:
    dtypes = torch.float64, torch.float32, torch.bfloat16, torch.float16
    source, worker = (
        nn.ParameterDict(
            {f"w{index}": nn.Parameter(torch.randn(count).to(dtype)) for index, dtype in enumerate(dtypes)}
        )
        for _ in range(2)
    )
    layout, payload, extras = packed(source)
    target = Target(worker, Mode.MAP)
    target.swap(target.stage(layout, access(payload), extras, in_slot=True))

    saved = io.BytesIO()
    torch.save(worker.state_dict(), saved)

    assert saved.tell() < layout.nbytes + 4096
    loaded = torch.load(io.BytesIO(saved.getvalue()))
    assert all(torch.equal(loaded[name], value) for name, value in source.state_dict().items())


def test_a_copy_with_a_view_of_one_dtype_is_not_reused(payloads: MappedPayloads) -> None:
    layout, payload, _ = packed({"a": torch.ones(SMALL), "b": torch.ones(SMALL, dtype=torch.bfloat16)})
    first = payloads.of(layout, payload.toreadonly())
    kept = first.views[1].detach()

    assert payloads.of(layout, payload.toreadonly()) is not first
    del kept
    assert payloads.of(layout, payload.toreadonly()) is first


def test_without_torch_reference_counts_no_copy_is_reused(
    payloads: MappedPayloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "_uses", None)
    layout, memory = inline(1.0)
    copies = [payloads.of(layout, memory) for _ in range(KEPT_COPIES + 2)]
    assert len(set(map(id, copies))) == len(copies)


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_views_of_a_slot_are_kept_from_its_second_use(payloads: MappedPayloads, count: int) -> None:
    slots = [aligned(shared, 8 * count) for _ in range(KEPT_PAYLOADS + 1)]
    (layout,) = {written(slot, count) for slot in slots}
    once = payloads.of(layout, slots[0], in_slot=True)
    again = payloads.of(layout, slots[0], in_slot=True)
    assert again is not once
    assert payloads.of(layout, slots[0], in_slot=True) is again

    for slot in slots[1:]:
        payloads.of(layout, slot, in_slot=True)
    assert payloads.of(layout, slots[0], in_slot=True) is not again


def test_views_of_only_two_large_slots_are_kept(payloads: MappedPayloads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "LARGE_NBYTES", 8 * SMALL)
    slots = [shared(8 * SMALL) for _ in range(KEPT_LARGE + 1)]
    (layout,) = {written(memoryview(slot), SMALL) for slot in slots}
    for slot in slots:
        for _ in range(2):
            payloads.of(layout, memoryview(slot), in_slot=True)

    slots[0].close()  # raises BufferError if a view of it is left
    with pytest.raises(BufferError):
        slots[1].close()


def test_no_views_are_kept_of_memory_that_is_not_a_slot(payloads: MappedPayloads) -> None:
    memory = shared(8 * SMALL)
    for _ in range(3):
        payloads.of(written(memoryview(memory), SMALL), memoryview(memory))

    memory.resize(len(memory))  # raises while a view of it is left


def as_data_of_a_parameter(tensor: Tensor) -> Any:
    parameter = torch.nn.Parameter(torch.zeros(()))
    parameter.data = tensor
    return parameter


@pytest.mark.parametrize("keep", [Tensor.detach, Tensor.numpy, row, as_data_of_a_parameter])
def test_references_to_a_slot_besides_the_kept_views_are_noticed(
    payloads: MappedPayloads, keep: Callable[[Tensor], Any]
) -> None:
    slot = aligned(shared, 8 * SMALL)
    layout, lent = written(slot, SMALL), slot[:]
    payloads.of(layout, lent, in_slot=True)
    assert not payloads.only_keeps(lent), "no views are kept yet"
    found = payloads.of(layout, lent, in_slot=True)
    assert payloads.only_keeps(lent)

    kept = keep(found.views[0])
    assert not payloads.only_keeps(lent)
    del kept
    assert payloads.only_keeps(lent)
    assert not payloads.only_keeps(slot[:]), "code elsewhere may hold other views of the slot"


def test_without_torch_reference_counts_a_slot_is_assumed_to_be_referenced(
    payloads: MappedPayloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "_uses", None)
    slot = aligned(shared, 8 * SMALL)
    layout = written(slot, SMALL)
    for _ in range(2):
        payloads.of(layout, slot, in_slot=True)

    assert not payloads.only_keeps(slot)


@pytest.mark.parametrize("access", [memoryview, memoryview.toreadonly])
def test_a_payload_without_tensors_has_no_memory(
    payloads: MappedPayloads, access: Callable[[memoryview], memoryview]
) -> None:
    found = payloads.of(layout_of(read_weights({})), access(memoryview(bytearray())))

    assert (found.views, found.used) == ([], False)


def test_copying_a_buffer_beside_mapped_parameters_makes_no_call_per_parameter() -> None:
    def calls_of_a_swap(parameters: int) -> int:
        model = nn.Module()
        model.register_buffer("mean", torch.zeros(3))
        for index in range(parameters):
            model.register_parameter(f"weight_{index}", nn.Parameter(torch.zeros(9_000)))
        target = Target(model, Mode.MAP)
        first, second = (target.stage(*packed(model)) for _ in range(2))
        target.swap(first)
        return len(functions_called(lambda: target.swap(second)))

    assert calls_of_a_swap(50) == calls_of_a_swap(5)


def test_a_dtype_with_only_empty_parameters_is_mapped() -> None:
    source = {"w": torch.arange(3.0), "none": torch.empty(0, 2, dtype=torch.float16)}
    worker = nn.ParameterDict({name: torch.zeros_like(each) for name, each in source.items()})
    target = Target(worker, Mode.MAP)
    target.swap(target.stage(*packed(source)))

    assert worker["w"].tolist() == [0, 1, 2]
    assert (worker["none"].dtype, worker["none"].shape) == (torch.float16, (0, 2))
