"""Tensors of a destination that share memory go on sharing it, or the update is refused."""

from __future__ import annotations

import pytest
import torch
from data_samples import Counted, packed
from torch import Tensor, nn

from weightsync import LayoutError
from weightsync.weights import aliasing
from weightsync.weights.aliasing import copy_preserving_aliases, same_bits, shared_with, sharing_of
from weightsync.weights.reading import Weights
from weightsync.weights.target import Mode, Target

modes = pytest.mark.parametrize("mode", Mode)


def _overlapping(mode: Mode) -> tuple[Target, Tensor]:
    base = torch.arange(6.0)
    module = nn.Module()
    module.whole = nn.Parameter(base)
    module.register_buffer("tail", base[4:])
    return Target(module, mode), base


@modes
def test_tensors_that_overlap_are_written_if_their_values_agree(mode: Mode) -> None:
    target, base = _overlapping(mode)
    values = torch.randn(6)

    target.swap(target.stage(*packed({"whole": values, "tail": values[4:]})))

    assert torch.equal(base, values)
    with pytest.raises(LayoutError, match="'tail', 'whole' share memory"):
        target.stage(*packed({"whole": values, "tail": values[:2]}))
    assert torch.equal(base, values)


@modes
def test_transposed_and_unfolded_views_are_written_if_their_values_agree(mode: Mode) -> None:
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(2, 3))
    module.t = nn.Parameter(module.w.detach().t())
    module.register_buffer("windows", torch.zeros(3).unfold(0, 2, 1))
    values = torch.randn(2, 3)
    line = torch.randn(3)
    target = Target(module, mode)

    target.swap(target.stage(*packed({"w": values, "t": values.t(), "windows": line.unfold(0, 2, 1)})))

    assert torch.equal(module.w, values)
    assert module.w.data_ptr() == module.t.data_ptr()
    assert torch.equal(module.windows, line.unfold(0, 2, 1))
    with pytest.raises(LayoutError, match="'t', 'w' share memory"):
        target.stage(*packed({"w": values, "t": values.t() + 1, "windows": line.unfold(0, 2, 1)}))
    with pytest.raises(LayoutError, match="'windows' share memory"):
        target.stage(*packed({"w": values, "t": values.t(), "windows": torch.randn(2, 2)}))


@modes
def test_distinct_parameters_that_share_memory_stay_tied(mode: Mode) -> None:
    module = nn.Module()
    module.a = nn.Parameter(torch.zeros(3))
    module.b = nn.Parameter(module.a.detach())
    values = torch.randn(3)
    target = Target(module, mode)
    for _ in range(2):
        target.swap(target.stage(*packed({"a": values, "b": values})))

        assert module.a.data_ptr() == module.b.data_ptr()
        assert torch.equal(module.b, values)


@modes
def test_a_parameter_tied_to_a_buffer_is_written_in_place(mode: Mode) -> None:
    module = nn.Module()
    module.a = nn.Parameter(torch.zeros(3))
    module.register_buffer("b", module.a.detach())
    memory = module.b.data_ptr()
    target = Target(module, mode)

    target.swap(target.stage(*packed({"a": torch.ones(3), "b": torch.ones(3)})))

    assert module.a.data_ptr() == module.b.data_ptr() == memory
    assert module.b.tolist() == [1, 1, 1]


@modes
def test_tied_nans_agree_but_zero_and_minus_zero_do_not(mode: Mode) -> None:
    tied = nn.Module()
    tied.a = tied.b = nn.Parameter(torch.zeros(2))
    target = Target(tied, mode)

    target.swap(target.stage(*packed({"a": torch.tensor([torch.nan, 0.0]), "b": torch.tensor([torch.nan, 0.0])})))
    with pytest.raises(LayoutError, match="tied"):
        target.stage(*packed({"a": torch.tensor([0.0, 0.0]), "b": torch.tensor([-0.0, 0.0])}))


@modes
def test_different_values_for_parameters_that_were_tied_later_are_refused(mode: Mode) -> None:
    module = nn.Module()
    module.a, module.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    update = packed({"a": torch.zeros(3), "b": torch.ones(3)})
    target = Target(module, mode)
    target.swap(target.stage(*update))
    staged = target.stage(*update)
    module.b.data = module.a.data

    for refused in (lambda: target.swap(staged), lambda: target.swap(target.stage(*update))):
        with pytest.raises(LayoutError, match="'a', 'b' are tied"):
            refused()


@modes
def test_extra_state_of_a_module_with_two_names_must_agree(mode: Mode) -> None:
    shared = Counted()
    target = Target(nn.ModuleList([shared, shared]), mode)
    target.swap(target.stage(*packed({"0._extra_state": 1, "1._extra_state": 1})))

    with pytest.raises(LayoutError, match=r"'0\._extra_state' and '1\._extra_state' belong"):
        target.swap(target.stage(*packed({"0._extra_state": 1, "1._extra_state": 2})))

    assert shared.state == 1


def test_adjacent_parameters_of_one_storage_are_mapped() -> None:
    memory = torch.zeros(6)
    module = nn.Module()
    module.a, module.b = nn.Parameter(memory[:3]), nn.Parameter(memory[3:])
    target = Target(module, Mode.MAP)

    target.swap(target.stage(*packed({"a": torch.ones(3), "b": torch.ones(3)})))

    assert not memory.any()
    assert module.b.tolist() == [1, 1, 1]


@modes
@pytest.mark.parametrize(("twin", "how"), [("tail", "share memory"), ("again", "are tied")])
def test_the_error_for_disagreeing_values_names_each_tensor_and_the_reason(mode: Mode, twin: str, how: str) -> None:
    base = torch.zeros(6)
    tensors = {"tail": base[4:], "again": base.view(6)}
    values = {"tail": torch.ones(2), "again": torch.ones(6)}
    target = Target({"whole": base, twin: tensors[twin]}, mode)

    with pytest.raises(LayoutError) as caught:
        target.stage(*packed({"whole": torch.zeros(6), twin: values[twin]}))

    assert caught.value.mismatched == dict.fromkeys((twin, "whole"), f"{how} in the destination, with different values")


def _read_chosen(destination: object) -> Weights:
    assert isinstance(destination, dict)
    others = {name: tensor for name, tensor in destination.items() if name not in ("chosen", "own")}
    return Weights({"chosen": destination["chosen"], "own": destination["own"]}, {}, others)


@modes
def test_a_selected_tensor_that_shares_memory_with_an_unselected_one_is_refused_by_name(mode: Mode) -> None:
    base = torch.zeros(3)
    own, apart, sparse = torch.zeros(1), torch.zeros(3), torch.zeros(3).to_sparse()

    with pytest.raises(LayoutError, match="'chosen' of the destination shares memory with 'other'") as caught:
        Target({"chosen": base, "own": own, "sparse": sparse, "apart": apart, "other": base[:1]}, mode, _read_chosen)

    assert caught.value.missing == ("other",)
    alone = {"chosen": base, "own": own, "sparse": sparse, "apart": apart}
    assert [entry.name for entry in Target(alone, mode, _read_chosen).layout.entries] == ["chosen", "own"]


@modes
def test_unselected_entries_may_have_any_type_and_are_not_in_the_layout(mode: Mode) -> None:
    destination = {"chosen": torch.zeros(3), "own": torch.zeros(1)}

    def read(given: object) -> Weights:
        return _read_chosen({name: tensor for name, tensor in given.items() if name != "text"})  # type: ignore[attr-defined]

    destination["text"] = "no tensor"  # type: ignore[assignment]
    target = Target(destination, mode, read)
    destination["chosen"] = torch.zeros(3)

    assert [entry.name for entry in target.layout.entries] == ["chosen", "own"]


def test_copies_that_are_made_together_share_memory_and_keep_strides_and_values() -> None:
    memory = torch.zeros(256, dtype=torch.uint8)
    line = torch.arange(8.0)
    memory[128 : 128 + line.nbytes].view(torch.float32).copy_(line)
    whole = memory[128:160].view(torch.float32)
    tensors = [whole[4:], whole.view(2, 4).t(), whole.view(torch.complex64).conj(), torch._neg_view(whole)]
    with torch.inference_mode():
        tensors.append(torch.empty(0).set_(whole.untyped_storage(), whole.storage_offset(), (8,), (1,)))
    tensors.append(whole.view(torch.complex64))

    copies = copy_preserving_aliases(tensors, memory)
    memory.zero_()

    assert [copy.tolist() for copy in copies[::3]] == [line[4:].tolist(), (-line).tolist()]
    assert torch.equal(copies[1], line.view(2, 4).t())
    assert (copies[1].stride(), copies[2][1].item(), copies[4].is_inference()) == ((1, 4), 2 - 3j, True)
    assert copies[5][1].item() == 2 + 3j
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1


@pytest.mark.parametrize("shift", [0, 1])
def test_values_of_tied_tensors_are_compared_bit_for_bit_without_a_copy(
    monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    monkeypatch.setattr(aliasing, "bits_of", lambda tensor: pytest.fail(f"{tensor} was copied"))
    patterns = torch.tensor([0x7FC1, 0x0000, 0x3F80], dtype=torch.int16)  # a NaN, 0.0 and 1.0
    other = torch.cat([torch.zeros(shift, dtype=torch.int16), patterns])[shift:]  # at an odd address, if shifted

    assert same_bits(patterns.view(torch.bfloat16), other.view(torch.bfloat16))
    for index, pattern in enumerate((0x7FC2, -0x8000, 0x3F81)):  # another NaN, -0.0, and the number after 1.0
        changed = other.clone()
        changed[index] = pattern
        assert not same_bits(patterns.view(torch.bfloat16), changed.view(torch.bfloat16))


def test_conjugated_and_expanded_tensors_are_compared_by_value() -> None:
    one = torch.tensor([1 + 1j])

    assert same_bits(one.conj(), torch.tensor([1 - 1j]))
    assert not same_bits(one.conj(), one)
    assert same_bits(one.expand(2), one.repeat(2))


def test_shared_with_finds_sharing_between_the_lists_and_not_within_one() -> None:
    base = torch.ones(4)

    assert shared_with([base, base[:2]], [base[1:]]) == (0, 0)
    assert shared_with([base], [torch.ones(4), base[3:]]) == (0, 1)
    assert shared_with([base, base[:2]], [torch.ones(4)]) is None


def test_a_tensor_shares_memory_with_every_slice_within_it() -> None:
    base = torch.ones(8)

    assert shared_with([base, base[1:2]], [base[3:4]]) == (0, 0)
    assert sharing_of([base, base[1:2], torch.ones(8), base[3:4]]).overlaps == ((0, 1, 3),)


class StubTensor:
    """A tensor of four bytes, as far as it matters for what it shares memory with."""

    itemsize, shape = 1, (4,)

    def __init__(self, device: str, address: int) -> None:
        self.device = torch.device(device)
        self.address = address

    def data_ptr(self) -> int:
        return self.address

    def numel(self) -> int:
        return 4

    def stride(self) -> tuple[int]:
        return (1,)


def test_tensors_on_different_devices_share_no_memory_even_at_equal_addresses() -> None:
    here, there, behind = StubTensor("cpu", 64), StubTensor("cuda:0", 64), StubTensor("cuda:0", 68)

    assert shared_with([here], [there]) is None  # type: ignore[list-item]
    assert shared_with([StubTensor("cpu", 128), there], [behind]) is None  # type: ignore[list-item]
    assert shared_with([here, there], [behind, StubTensor("cuda:0", 66)]) == (1, 1)  # type: ignore[list-item]


def test_the_smallest_expanded_and_self_overlapping_tensors_are_found() -> None:
    assert sharing_of([torch.ones(1).expand(2)]).expanded == (0,)
    assert sharing_of([torch.ones(9).as_strided((2, 3), (4, 2))]).overlaps == ((0,),)
    assert sharing_of([torch.ones(10).as_strided((2, 3), (5, 2))]).overlaps == ()
