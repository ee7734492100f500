"""Two phases: staging validates an update in full, a swap makes all of it live. A refusal changes nothing."""

from __future__ import annotations

import copy
import gc
import itertools
import mmap
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from data_samples import ARRANGEMENTS, Policy, bits, packed, sample, sampled_dicts, snapshot, trained
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictParams
from torch import Tensor, nn

from weightsync import LayoutError
from weightsync.weights import target as target_module
from weightsync.weights.mapped import KEPT_PAYLOADS
from weightsync.weights.packing import pack
from weightsync.weights.reading import layout_of, read_weights
from weightsync.weights.target import DestinationPlan, Mode, Target, _Undo
from weightsync.weights.tensors import DTYPE_NAMES, address_of
from weightsync.weights.tree_digest import digest

modes = pytest.mark.parametrize("mode", Mode)


@modes
@given(sampled_dicts)
def test_a_dict_gets_every_bit_of_an_update_in_place(mode: Mode, found: dict[str, tuple[Tensor, bytes]]) -> None:
    source = {name: tensor for name, (tensor, _) in found.items()}
    arranged = zip(source.items(), itertools.cycle(ARRANGEMENTS[:-1]), strict=False)
    destination = {
        name: sample(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), 7, arrangement)[0]
        for (name, tensor), arrangement in arranged
    }
    before = dict(destination)
    layout, payload, extras = packed(source)
    target = Target(destination, mode)

    target.swap(target.stage(layout, payload, extras))

    assert all(bits(destination[name]) == expected for name, (_, expected) in found.items())
    assert all(destination[name] is before[name] for name in before)
    assert target.digest() == digest(payload, extras)


@modes
@settings(max_examples=20)
@given(st.integers(0, 1000))
def test_a_policy_gets_all_weights_and_keeps_its_parameter_objects(mode: Mode, seed: int) -> None:
    source, worker = trained(seed), trained(seed + 1)
    before = dict(worker.named_parameters(remove_duplicate=False))
    layout, payload, extras = packed(source)
    target = Target(worker, mode)

    target.swap(target.stage(layout, payload, extras))

    assert snapshot(worker) == snapshot(source)
    assert target.digest() == digest(payload, extras) == Target(source).digest()
    assert all(p is before[name] for name, p in worker.named_parameters(remove_duplicate=False))
    assert worker.head.weight is worker.embedding.weight
    assert worker.body[1].num_batches_tracked == source.body[1].num_batches_tracked
    assert all(parameter.requires_grad for parameter in worker.parameters())
    worker.body(torch.randn(4, 3)).sum().backward()


@modes
def test_parameters_of_a_dict_keep_their_memory(mode: Mode) -> None:
    parameter = nn.Parameter(torch.zeros(64))
    before = parameter.data_ptr()
    target = Target({"a": parameter}, mode)

    target.swap(target.stage(*packed({"a": torch.ones(64)})))

    assert (parameter.data_ptr(), parameter.tolist()) == (before, [1.0] * 64)


class Counts(nn.Module):
    """A module with a weight, and with a number as its extra state."""

    def __init__(self, weight: nn.Parameter, number: int) -> None:
        super().__init__()
        self.weight, self.number = weight, number

    def get_extra_state(self) -> int:
        return self.number

    def set_extra_state(self, state: int) -> None:
        self.number = state


@modes
def test_extra_state_goes_to_the_current_module_even_if_it_has_the_tensors_of_another(mode: Mode) -> None:
    first, second = (Counts(nn.Parameter(torch.zeros(2)), 0) for _ in range(2))
    second.weight = first.weight
    model = nn.Sequential(first)
    target = Target(model, mode)
    sent = packed(nn.Sequential(Counts(nn.Parameter(torch.ones(2)), 1)))
    model[0] = second
    target.swap(target.stage(*sent))

    assert (first.number, second.number) == (0, 1)
    staged = target.stage(*packed(nn.Sequential(Counts(nn.Parameter(torch.ones(2)), 2))))
    model[0] = first
    first.weight = second.weight
    target.swap(staged)
    assert (first.number, second.number) == (2, 1)


def _second_is_transposed() -> nn.Sequential:
    source = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    source[1].weight.data = torch.rand(8, 8).t()
    return source


def test_parameters_in_the_sent_order_are_mapped_and_others_are_copied() -> None:
    worker, source = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), _second_is_transposed()
    before = [each.weight.data_ptr() for each in worker]
    target = Target(worker, Mode.MAP)

    target.swap(target.stage(*packed(source)))

    assert snapshot(worker) == snapshot(source)
    assert [each.weight.data_ptr() == address for each, address in zip(worker, before, strict=True)] == [False, True]


def test_parameters_sent_in_another_order_are_not_written_into_shared_memory() -> None:
    worker, source = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).share_memory(), _second_is_transposed()
    seen = worker[1].weight.detach()
    before = seen.tolist()
    target = Target(worker, Mode.MAP)
    target.unshare()

    target.swap(target.stage(*packed(source)))

    assert snapshot(worker) == snapshot(source)
    assert seen.tolist() == before


def test_leave_moves_a_replaced_parameter_out_of_the_slot_and_the_next_version_is_mapped() -> None:
    worker = nn.Linear(8, 8)
    target = Target(worker, Mode.MAP)
    target.swap(target.stage(*packed(nn.Linear(8, 8))))
    worker.weight = nn.Parameter(worker.weight.detach())
    mapped, values = worker.weight.data_ptr(), snapshot(worker)

    target.leave()

    assert worker.weight.data_ptr() != mapped
    assert snapshot(worker) == values
    own = worker.weight.data_ptr()
    target.swap(target.stage(*packed(nn.Linear(8, 8))))
    assert worker.weight.data_ptr() != own


@pytest.mark.parametrize("moves", ["float32", "float64"])
def test_leave_moves_a_parameter_out_of_the_slot_after_share_memory_moved_another(moves: str) -> None:
    def made() -> nn.ModuleDict:
        return nn.ModuleDict({"float32": nn.Linear(8, 8), "float64": nn.Linear(8, 8).double()})

    worker = made()
    target = Target(worker, Mode.MAP)
    target.swap(target.stage(*packed(made())))
    other = worker["float64" if moves == "float32" else "float32"]
    worker[moves].share_memory()
    mapped, values = other.weight.data_ptr(), snapshot(worker)

    target.leave()

    assert other.weight.data_ptr() != mapped
    assert snapshot(worker) == values


def moved(model: nn.Linear) -> None:
    model.weight.data = model.weight.data.clone()


def replaced(model: nn.Linear) -> None:
    model.weight = nn.Parameter(torch.zeros(4, 4))


def transposed(model: nn.Linear, _: object = None) -> None:
    model.weight.data = model.weight.data.t()


def tied(model: nn.Linear) -> None:
    model.bias = nn.Parameter(model.weight.data[0])


def cast(model: nn.Linear) -> None:
    model.weight.data = model.weight.data.view(torch.int32).view(torch.float32).double()


def reshaped(model: nn.Linear) -> None:
    model.weight.data = model.weight.data.view(2, 8)


def enlarged(model: nn.Linear) -> None:
    model.weight = nn.Parameter(torch.zeros(5, 4))


@modes
@pytest.mark.parametrize("change", [moved, replaced, transposed], ids=lambda each: each.__name__)
def test_a_destination_changed_after_staging_gets_the_whole_staged_version(
    mode: Mode, change: Callable[[nn.Linear], None]
) -> None:
    worker = nn.Linear(4, 4)
    target = Target(worker, mode)
    for _ in range(2):
        target.swap(target.stage(*packed(nn.Linear(4, 4))))
        source = nn.Linear(4, 4)
        staged = target.stage(*packed(source))
        change(worker)
        target.swap(staged)

        assert snapshot(worker) == snapshot(source)


@modes
@pytest.mark.parametrize("change", [tied, cast, reshaped, enlarged], ids=lambda each: each.__name__)
def test_a_staged_version_that_no_longer_fits_its_changed_destination_is_refused(
    mode: Mode, change: Callable[[nn.Linear], None]
) -> None:
    layout, payload, extras = packed(nn.Linear(4, 4))
    worker = nn.Linear(4, 4)
    target = Target(worker, mode)
    target.swap(target.stage(layout, payload, extras))
    staged = target.stage(layout, payload, extras)
    change(worker)
    before = snapshot(worker)

    with pytest.raises(LayoutError, match="'weight'"):
        target.swap(staged)

    assert snapshot(worker) == before


@modes
@pytest.mark.parametrize("make", [nn.Identity, dict, TensorDict, lambda: nn.Sequential(nn.ReLU())])
def test_an_empty_model_is_valid(mode: Mode, make) -> None:
    layout, payload, extras = packed(make())
    target = Target(make(), mode)

    target.swap(target.stage(layout, payload, extras))

    assert target.digest() == digest(payload, extras)


@modes
@pytest.mark.parametrize("lock", [True, False])
def test_a_tensordict_is_written_in_place(mode: Mode, lock: bool) -> None:
    tensordict = (
        TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(())}}).lock_()
        if lock
        else TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(())}})
    )
    held = tensordict["a"]
    target = Target(tensordict, mode)

    target.swap(target.stage(*packed({"a": torch.ones(3), "n.b": torch.tensor(2.0)})))

    assert held.tolist() == [1, 1, 1]
    assert tensordict["n", "b"] == 2
    assert tensordict.is_locked == lock


@modes
def test_parameters_of_a_tensordict_keep_their_identity(mode: Mode) -> None:
    params = TensorDictParams(TensorDict({"w": torch.zeros(2), "n": {"b": torch.zeros(3)}}))
    held = params["n", "b"]
    target = Target(params, mode)

    target.swap(target.stage(*packed({"w": torch.ones(2), "n": {"b": torch.ones(3)}})))

    assert params["n", "b"] is held
    assert held.tolist() == [1, 1, 1]


@modes
def test_strided_destinations_keep_their_strides(mode: Mode) -> None:
    base = torch.zeros(4, 6)
    module = nn.Module()
    module.w = nn.Parameter(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last))
    module.register_buffer("every_other", base[:, ::2])
    strides = module.w.stride()
    values = {"w": torch.randn(2, 3, 4, 5), "every_other": torch.randn(4, 3)}
    target = Target(module, mode)

    target.swap(target.stage(*packed(values)))

    assert module.w.stride() == strides
    assert torch.equal(module.w, values["w"])
    assert torch.equal(base[:, ::2], values["every_other"])
    assert not base[:, 1::2].any()


def test_mapped_parameters_view_the_payload_and_buffers_do_not() -> None:
    source, worker = trained(1), trained(2)
    layout, payload, extras = packed(source)
    target = Target(worker, Mode.MAP)
    target.swap(target.stage(layout, payload, extras))
    start = torch.frombuffer(payload, dtype=torch.uint8).data_ptr()
    entries = {entry.name: entry for entry in layout.entries}

    for name, parameter in worker.named_parameters():
        assert parameter.numel() == 0 or parameter.data_ptr() == start + entries[name].offset
    worker.body(torch.randn(4, 3))

    assert digest(payload, extras) == Target(source).digest()
    assert worker.body[1].num_batches_tracked == source.body[1].num_batches_tracked + 1


def test_a_payload_that_cannot_be_mapped_is_copied_and_the_previous_one_is_unchanged() -> None:
    worker = nn.Linear(3, 3)
    target = Target(worker, Mode.MAP)
    layout, first, _ = packed(nn.Linear(3, 3))
    target.swap(target.stage(layout, first))
    kept = bytes(first)
    unaligned = bytearray(first.nbytes + 1)
    for value, payload in ((1.0, memoryview(unaligned)[1:]), (2.0, memoryview(bytes(48)))):
        if not payload.readonly:
            payload[:] = packed({"weight": torch.full((3, 3), value), "bias": torch.full((3,), value)})[1]
        target.swap(target.stage(layout, payload))
        if not payload.readonly:
            payload[:] = bytes(payload.nbytes)

        assert worker.weight.unique().tolist() == [value if value == 1 else 0]
        assert bytes(first) == kept


@pytest.mark.parametrize("arrived", [bytes, bytearray], ids=["read-only", "aligned by chance"])
def test_copies_of_payloads_alternate_between_two_buffers_and_skip_one_that_is_viewed(
    arrived: Callable[[memoryview], bytes | bytearray],
) -> None:
    worker = nn.Linear(3, 3)
    target = Target(worker, Mode.MAP)
    places, kept = [], torch.empty(0)
    for value in range(6):
        values = {"weight": torch.full((3, 3), float(value)), "bias": torch.full((3,), float(value))}
        target.swap(target.stage(target.layout, memoryview(arrived(packed(values)[1]))))
        places.append(worker.weight.data_ptr())
        if value == 2:
            kept = worker.weight.data

        assert (worker.weight.unique().tolist(), worker.bias.unique().tolist()) == ([value], [value])
    first, second, *_ = places

    assert kept.unique().tolist() == [2]
    assert places[:4] == [first, second, first, second]
    assert (places[4] not in (first, second), places[5]) == (True, second)


def test_a_mapped_payload_lives_as_long_as_it_is_served() -> None:
    worker = nn.Linear(3, 3)
    target = Target(worker, Mode.MAP)
    for value in range(10):
        values = {"weight": torch.full((3, 3), float(value)), "bias": torch.zeros(3)}
        target.swap(target.stage(*packed(values)))
        del values
        gc.collect()

        assert worker.weight.unique().tolist() == [value]


def test_views_of_reused_slots_are_kept_and_of_a_slot_used_once_released() -> None:
    worker = nn.Linear(3, 3)
    target = Target(worker, Mode.MAP)
    layout = target.layout
    slots = [mmap.mmap(-1, layout.nbytes) for _ in range(2)]
    for value in range(6):
        source = nn.Linear(3, 3)
        pack(read_weights(source), layout, memoryview(slots[value % 2]))
        target.swap(target.stage(layout, memoryview(slots[value % 2]), in_slot=True))

        assert snapshot(worker) == snapshot(source)
        assert worker.bias.data_ptr() == torch.frombuffer(slots[value % 2], dtype=torch.uint8).data_ptr()

    single = mmap.mmap(-1, layout.nbytes)
    target.swap(target.stage(layout, memoryview(single), in_slot=True))
    target.swap(target.stage(*packed(nn.Linear(3, 3))))
    single.close()  # raises BufferError if a view of it is left
    with pytest.raises(BufferError):
        slots[0].close()
    del target  # frees the views that it keeps
    slots[0].close()


def test_g2_a_slot_reused_with_another_layout_is_read_by_that_layout() -> None:
    worker = nn.Linear(3, 3)
    target = Target(worker, Mode.MAP)
    slot = mmap.mmap(-1, target.layout.nbytes)
    for shape in ((3, 3), (3, 3), (9, 1)):
        worker.weight = nn.Parameter(torch.zeros(shape))
        source = {"weight": torch.randn(shape), "bias": torch.randn(3)}
        layout = layout_of(read_weights(source))
        pack(read_weights(source), layout, memoryview(slot))
        target.swap(target.stage(layout, memoryview(slot), in_slot=True))

        assert torch.equal(worker.weight, source["weight"])


class SubclassedParameter(nn.Parameter):
    """A parameter of a subclass, which is never mapped."""


class ReadyDevice:
    """A device that never has to be waited for."""

    def finish(self) -> None: ...

    def synchronize(self) -> None: ...


def of_a_subclass(model: nn.Linear, _: pytest.MonkeyPatch) -> None:
    model.weight = SubclassedParameter(model.weight.data)


def made_a_buffer(model: nn.Linear, _: pytest.MonkeyPatch) -> None:
    model._buffers["bias"] = model._parameters.pop("bias").data


def partly_on_a_device(model: nn.Linear, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(target_module, "devices_of", lambda tensors: (ReadyDevice(),))
    model.bias = nn.Parameter(model.bias.data.clone())


@pytest.mark.parametrize("change", [transposed, of_a_subclass, made_a_buffer, partly_on_a_device])
def test_g3_parameters_that_can_no_longer_be_mapped_are_copied_and_no_slot_is_written(
    change: Callable[[nn.Linear, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = nn.Linear(3, 3)
    target = Target(worker, Mode.MAP)
    layout = target.layout
    slots = [memoryview(mmap.mmap(-1, layout.nbytes)) for _ in range(2)]
    for version in range(6):
        if version == 3:
            change(worker, monkeypatch)
        source, slot = nn.Linear(3, 3), slots[version % 2]
        before = bytes(slots[1 - version % 2])
        pack(read_weights(source), layout, slot)
        target.swap(target.stage(layout, slot, in_slot=True))

        assert bytes(slots[1 - version % 2]) == before
        assert snapshot(worker) == snapshot(source)
        slots[1 - version % 2][:] = bytes(layout.nbytes)
        assert snapshot(worker) == snapshot(source)


@pytest.mark.parametrize("several_places", [False, True])
def test_g3_a_swap_writes_nothing_into_memory_that_other_processes_share(
    several_places: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if several_places:
        monkeypatch.setattr(target_module, "devices_of", lambda tensors: (ReadyDevice(),))
    worker = nn.Linear(3, 3).share_memory()
    elsewhere = [parameter.detach() for parameter in worker.parameters()]
    before, source = [bits(tensor) for tensor in elsewhere], nn.Linear(3, 3)
    target = Target(worker, Mode.MAP)
    target.unshare()

    target.swap(target.stage(*packed(source)))

    assert snapshot(worker) == snapshot(source)
    assert [bits(tensor) for tensor in elsewhere] == before


def test_a_copied_payload_is_free_after_the_swap() -> None:
    worker = nn.Linear(3, 3)
    target = Target(worker)
    layout, payload, _ = packed(nn.Linear(3, 3))
    target.swap(target.stage(layout, payload))
    before = snapshot(worker)

    payload[:] = bytes(payload.nbytes)

    assert snapshot(worker) == before


@modes
def test_backward_through_the_old_weights_raises_after_a_swap(mode: Mode) -> None:
    worker = nn.Linear(2, 2)
    inputs = torch.ones(2, requires_grad=True)
    output = worker(inputs).sum()
    target = Target(worker, mode)

    target.swap(target.stage(*packed(nn.Linear(2, 2))))

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


@modes
@pytest.mark.parametrize("made_in", [True, False])
@pytest.mark.parametrize("swapped_in", [True, False])
def test_weights_are_applied_in_and_out_of_inference_mode(mode: Mode, made_in: bool, swapped_in: bool) -> None:
    with torch.inference_mode(made_in):
        worker = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    source = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    for _ in range(2):
        with torch.inference_mode(swapped_in):
            target = Target(worker, mode)
            target.swap(target.stage(*packed(source)))

            assert snapshot(worker) == snapshot(source)
            assert all(parameter.is_inference() == made_in for parameter in worker.parameters())


@modes
@pytest.mark.parametrize("in_a_thread", [True, False])
def test_a_forward_under_autocast_uses_the_version_swapped_in_during_the_same_block(
    mode: Mode, in_a_thread: bool
) -> None:
    worker = nn.Linear(2, 1)
    target = Target(worker, mode)

    def swap(value: float) -> None:
        target.swap(target.stage(*packed({"weight": torch.full((1, 2), value), "bias": torch.zeros(1)})))

    with torch.autocast("cpu", dtype=torch.bfloat16):  # autocast keeps the results of its casts until it ends
        for value in (1.0, 2.0, 3.0):
            if in_a_thread:
                thread = threading.Thread(target=swap, args=(value,))
                thread.start()
                thread.join()
            else:
                swap(value)

            assert worker(torch.ones(1, 2)).item() == 2 * value


@modes
def test_weights_applied_by_hand_may_alias_the_destination(mode: Mode) -> None:
    destination = {"a": torch.ones(2), "b": torch.zeros(2)}

    Target(destination, mode).apply({"a": destination["b"], "b": destination["a"]})

    assert (destination["a"].tolist(), destination["b"].tolist()) == ([0, 0], [1, 1])


def test_a_deep_copy_of_a_mapped_model_is_not_changed_by_the_next_version() -> None:
    worker = nn.Linear(2, 2)
    target = Target(worker, Mode.MAP)
    target.swap(target.stage(*packed(nn.Linear(2, 2))))
    clone = copy.deepcopy(worker)
    before = snapshot(clone)

    target.swap(target.stage(*packed(nn.Linear(2, 2))))

    assert snapshot(clone) == before


def test_the_extra_state_of_a_dict_is_replaced() -> None:
    destination = {"n": {"_extra_state": 1}, "w": torch.zeros(2)}

    Target(destination).apply({"n._extra_state": {"x": (1, 2)}, "w": torch.ones(2)})

    assert destination["n"] == {"_extra_state": {"x": (1, 2)}}


def test_targets_of_two_policies_have_equal_layouts() -> None:
    assert Target(Policy()).layout == Target(trained(1)).layout


def test_views_of_only_the_latest_slots_are_kept() -> None:
    worker = nn.Linear(250, 250)
    target = Target(worker, Mode.MAP)
    layout = target.layout
    slots = [mmap.mmap(-1, layout.nbytes) for _ in range(KEPT_PAYLOADS + 2)]
    for index in (0, 0, 1, 2, 3, 4, 4, 5):
        target.swap(target.stage(layout, memoryview(slots[index]), in_slot=True))

    slots[0].close()  # later slots have taken the place of this one
    with pytest.raises(BufferError):
        slots[4].close()


def test_alternating_slots_are_swapped_without_choosing_what_to_copy_again(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = nn.Linear(250, 250)
    target = Target(worker, Mode.MAP)
    slots = [memoryview(mmap.mmap(-1, target.layout.nbytes)) for _ in range(2)]
    remembered: list[list[Tensor] | None] = []
    copied, remember = DestinationPlan.copied, _Undo.remember
    chosen: list[DestinationPlan] = []

    def choose(plan: DestinationPlan) -> Sequence[int]:
        chosen.append(plan)
        return copied(plan)

    def note(undo: _Undo, parameters: list[Tensor], memory: list[Tensor] | None) -> None:
        remembered.append(memory)
        remember(undo, parameters, memory)

    for slot in slots * 3:
        target.swap(target.stage(target.layout, slot, in_slot=True))
    monkeypatch.setattr(DestinationPlan, "copied", choose)
    monkeypatch.setattr(_Undo, "remember", note)
    for slot in slots:
        target.swap(target.stage(target.layout, slot, in_slot=True))

    assert chosen == []
    assert [[each.data_ptr() for each in memory or ()] for memory in remembered] == [
        [target.layout.entries[index].offset + address_of(slot) for index in range(2)] for slot in reversed(slots)
    ]


def test_mapped_parameters_are_not_copied_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = nn.BatchNorm1d(3)
    target, copied = Target(worker, Mode.MAP), []
    staged = target.stage(*packed(nn.BatchNorm1d(3)))
    monkeypatch.setattr(torch, "_foreach_copy_", lambda into, _: copied.extend(map(id, into)))

    target.swap(staged)

    assert sorted(copied) == sorted(map(id, worker.buffers()))
