"""Two phases: a staged update is validated in full, a swap makes all of it live, a refusal changes nothing."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from data_samples import ARRANGEMENTS, Counted, Policy, bits, packed, sample, sampled_dicts, snapshot, trained
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictParams
from torch import Tensor, nn

from weightsync import ConfigurationError, LayoutError, ProtocolError
from weightsync.extras import encode_extras
from weightsync.packing import digest
from weightsync.target import Mode, SwapBroken, Target
from weightsync.tensors import DTYPE_NAMES

modes = pytest.mark.parametrize("mode", Mode)


@modes
@given(sampled_dicts)
def test_every_bit_of_a_dict_becomes_live(mode: Mode, found: dict[str, tuple[Tensor, bytes]]) -> None:
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
@given(st.integers(0, 1000))
def test_a_policy_is_served_whole(mode: Mode, seed: int) -> None:
    source, worker = trained(seed), trained(seed + 1)
    before = {name: parameter for name, parameter in worker.named_parameters(remove_duplicate=False)}
    layout, payload, extras = packed(source)
    target = Target(worker, mode)

    target.swap(target.stage(layout, payload, extras))

    assert snapshot(worker) == snapshot(source)
    assert target.digest() == digest(payload, extras) == Target(source).digest()
    assert all(p is before[name] for name, p in worker.named_parameters(remove_duplicate=False))
    assert worker.head.weight is worker.embedding.weight
    assert worker.body[1].num_batches_tracked == source.body[1].num_batches_tracked
    assert all(parameter.requires_grad for parameter in worker.parameters())
    worker.train()(torch.tensor([1])) if False else worker.body(torch.randn(4, 3)).sum().backward()


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


def test_mapped_parameters_are_the_payload_and_buffers_are_not() -> None:
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


def test_a_payload_that_cannot_be_mapped_is_copied_and_the_one_before_is_left_alone() -> None:
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


def test_a_mapped_payload_lives_as_long_as_it_is_served() -> None:
    worker = nn.Linear(3, 3)
    target = Target(worker, Mode.MAP)
    for value in range(10):
        values = {"weight": torch.full((3, 3), float(value)), "bias": torch.zeros(3)}
        target.swap(target.stage(*packed(values)))
        target.release()

        assert worker.weight.unique().tolist() == [value]


def test_a_copied_payload_is_free_after_the_swap() -> None:
    worker = nn.Linear(3, 3)
    target = Target(worker)
    layout, payload, _ = packed(nn.Linear(3, 3))
    target.swap(target.stage(layout, payload))
    before = snapshot(worker)

    payload[:] = bytes(payload.nbytes)

    assert snapshot(worker) == before


@modes
def test_a_graph_of_the_old_weights_cannot_be_used_any_more(mode: Mode) -> None:
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
def test_inference_mode_does_not_matter(mode: Mode, made_in: bool, swapped_in: bool) -> None:
    with torch.inference_mode(made_in):
        worker = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    source = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    for _ in range(2):
        with torch.inference_mode(swapped_in):
            target = Target(worker, mode)
            target.swap(target.stage(*packed(source)))

            assert snapshot(worker) == snapshot(source)


def _renamed(source: dict) -> dict:
    return {("renamed" if name == "scale" else name): value for name, value in source.items()}


def _reshaped(source: dict) -> dict:
    return {**source, "scale": torch.ones(1)}


def _recast(source: dict) -> dict:
    return {**source, "brief": source["brief"].to(torch.float16)}


def _untied(source: dict) -> dict:
    return {**source, "head.weight": source["head.weight"] + 1}


def _without_extra(source: dict) -> dict:
    return {name: value for name, value in source.items() if name != "counted._extra_state"}


@modes
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_renamed, "missing 'scale'; unexpected 'renamed'"),
        (_reshaped, r"'scale' \(shape \(1,\) where \(\) is wanted\)"),
        (_recast, r"'brief' \(dtype float16 where bfloat16 is wanted\)"),
        (_untied, "'embedding.weight', 'head.weight' are tied"),
        (_without_extra, "missing 'counted._extra_state'"),
    ],
)
def test_what_does_not_fit_changes_nothing(mode: Mode, change, told: str) -> None:
    worker = trained(1)
    target = Target(worker, mode)
    target.swap(target.stage(*packed(trained(3))))
    before, served = snapshot(worker), target.digest()

    with pytest.raises(LayoutError, match=told):
        target.stage(*packed(change(trained(2).state_dict())))

    assert snapshot(worker) == before
    assert target.digest() == served
    target.swap(target.stage(*packed(trained(2))))
    assert snapshot(worker) == snapshot(trained(2))


@modes
def test_payloads_and_extras_that_belie_their_layout_are_refused(mode: Mode) -> None:
    worker = trained(1)
    before = snapshot(worker)
    target = Target(worker, mode)
    layout, payload, extras = packed(trained(2))

    for bad in (payload[:-1], memoryview(bytes(payload) + b"x"), memoryview(b"")):
        with pytest.raises(ProtocolError, match="A payload of"):
            target.stage(layout, bad, extras)
    for other in (b"", extras[:-1], extras + b"x", encode_extras({"other": 1}), encode_extras({"counted": 1, "": 2})):
        with pytest.raises(ProtocolError):
            target.stage(layout, payload, other)

    assert snapshot(worker) == before


@given(st.binary(max_size=40))
def test_arbitrary_extras_change_nothing(extras: bytes) -> None:
    worker = trained(1)
    before = snapshot(worker)
    layout, payload, _ = packed(trained(2))

    with pytest.raises(ProtocolError):
        Target(worker).stage(layout, payload, extras)

    assert snapshot(worker) == before


@modes
def test_a_destination_that_cannot_be_written_is_refused(mode: Mode) -> None:
    module = nn.Module()
    module.register_buffer("wide", torch.zeros(1).expand(3))

    with pytest.raises(LayoutError, match="'wide' of the destination is expanded"):
        Target(module, mode).stage(*packed({"wide": torch.ones(3)}))


@modes
def test_an_unsupported_destination_is_refused(mode: Mode) -> None:
    with pytest.raises(ConfigurationError, match="builtins.int"):
        Target(3, mode)
    with pytest.raises(LayoutError, match="'weight' is not initialised"):
        Target(nn.LazyLinear(3), mode)


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
def test_transposed_and_folded_ties_are_understood(mode: Mode) -> None:
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(2, 3))
    module.t = nn.Parameter(module.w.detach().t())
    module.register_buffer("windows", torch.zeros(5).unfold(0, 3, 1))
    values = torch.randn(2, 3)
    line = torch.randn(5)
    target = Target(module, mode)

    target.swap(target.stage(*packed({"w": values, "t": values.t(), "windows": line.unfold(0, 3, 1)})))

    assert torch.equal(module.w, values)
    assert module.w.data_ptr() == module.t.data_ptr()
    assert torch.equal(module.windows, line.unfold(0, 3, 1))
    with pytest.raises(LayoutError, match="'w' share memory|'w', 't' share memory|'t', 'w' share memory"):
        target.stage(*packed({"w": values, "t": values.t() + 1, "windows": line.unfold(0, 3, 1)}))
    with pytest.raises(LayoutError, match="'windows' share memory"):
        target.stage(*packed({"w": values, "t": values.t(), "windows": torch.randn(3, 3)}))


@modes
def test_parameters_that_share_memory_without_being_one_stay_tied(mode: Mode) -> None:
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
def test_a_tie_of_a_parameter_and_a_buffer_is_copied(mode: Mode) -> None:
    module = nn.Module()
    module.a = nn.Parameter(torch.zeros(3))
    module.register_buffer("b", module.a.detach())
    memory = module.b.data_ptr()
    target = Target(module, mode)

    target.swap(target.stage(*packed({"a": torch.ones(3), "b": torch.ones(3)})))

    assert module.a.data_ptr() == module.b.data_ptr() == memory
    assert module.b.tolist() == [1, 1, 1]


@modes
def test_nan_agrees_with_itself_and_zero_not_with_minus_zero(mode: Mode) -> None:
    tied = nn.Module()
    tied.a = tied.b = nn.Parameter(torch.zeros(2))
    target = Target(tied, mode)

    target.swap(target.stage(*packed({"a": torch.tensor([torch.nan, 0.0]), "b": torch.tensor([torch.nan, 0.0])})))
    with pytest.raises(LayoutError, match="tied"):
        target.stage(*packed({"a": torch.tensor([0.0, 0.0]), "b": torch.tensor([-0.0, 0.0])}))


@modes
def test_a_parameter_replaced_after_staging_gets_the_weights(mode: Mode) -> None:
    source, worker = nn.Linear(2, 2), nn.Linear(2, 2)
    target = Target(worker, mode)
    staged = target.stage(*packed(source))
    worker.weight = nn.Parameter(torch.zeros(2, 2))

    target.swap(staged)

    assert snapshot(worker) == snapshot(source)


@modes
def test_a_destination_that_no_longer_fits_at_the_swap_is_refused(mode: Mode) -> None:
    worker = nn.Linear(2, 2)
    target = Target(worker, mode)
    staged = target.stage(*packed(nn.Linear(2, 2)))
    worker.weight = nn.Parameter(torch.zeros(3, 2))
    before = snapshot(worker)

    with pytest.raises(LayoutError, match="'weight'"):
        target.swap(staged)

    assert snapshot(worker) == before


class Fragile(Counted):
    """Refuses some states, after having changed half of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.state = "old"
        self.stubborn = False

    def set_extra_state(self, state: object) -> None:
        if state == "bad" or self.stubborn:
            self.state = "half"
            self.stubborn = self.stubborn or (state == "bad" and self.never_again)
            raise OSError("no such state")
        self.state = state

    never_again = False


def _fragile(state: object) -> nn.Module:
    module = nn.Sequential(Counted(), Fragile(), Counted())
    module[0].state = module[2].state = {"tensor": torch.zeros(2)}
    module[1].state = state
    with torch.no_grad():
        module[1].weight += 1
    return module


@modes
def test_a_hook_that_raises_is_undone(mode: Mode) -> None:
    worker = nn.Sequential(Counted(), Fragile(), Counted())
    target = Target(worker, mode)
    before = snapshot(worker)

    with pytest.raises(OSError, match="no such state"):
        target.swap(target.stage(*packed(_fragile("bad"))))

    assert snapshot(worker) == before
    target.swap(target.stage(*packed(_fragile("good"))))
    assert snapshot(worker) == snapshot(_fragile("good"))


@modes
def test_a_hook_that_cannot_be_undone_breaks_the_swap(mode: Mode) -> None:
    worker = nn.Sequential(Counted(), Fragile(), Counted())
    worker[1].never_again = True
    target = Target(worker, mode)

    with pytest.raises(SwapBroken, match="'1' could not be put back") as caught:
        target.swap(target.stage(*packed(_fragile("bad"))))

    assert isinstance(caught.value.__cause__, OSError)


class Deaf(Counted):
    """Never takes a state, and never changes."""

    def set_extra_state(self, state: object) -> None:
        raise NotImplementedError


@modes
def test_a_hook_that_refuses_without_a_change_needs_no_undoing(mode: Mode) -> None:
    worker = nn.Sequential(Counted(), Deaf())
    source = nn.Sequential(Counted(), Counted())
    source[0].state = source[1].state = "new"
    target, before = Target(worker, mode), snapshot(worker)

    with pytest.raises(NotImplementedError):
        target.swap(target.stage(*packed(source)))

    assert snapshot(worker) == before


class Meddler(Counted):
    """Replaces its own parameter when its state is set."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.size = size

    def set_extra_state(self, state: object) -> None:
        self.state = state
        self.weight = nn.Parameter(torch.zeros(self.size))


@modes
def test_a_hook_that_replaces_a_parameter_is_noticed(mode: Mode) -> None:
    source = Meddler()
    source.state = "new"
    source.weight.data += 1
    fits, grows = Meddler(), Meddler(3)

    target = Target(fits, mode)
    target.swap(target.stage(*packed(source)))
    assert snapshot(fits) == snapshot(source)

    target = Target(grows, mode)
    with pytest.raises(LayoutError, match="'weight'"):
        target.swap(target.stage(*packed(source)))
    assert grows.state == {"count": 0}


def test_parameters_are_mapped_back_if_mapping_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = trained(1)
    target = Target(worker, Mode.MAP)
    before, memory = snapshot(worker), [parameter.data_ptr() for parameter in worker.parameters()]

    def fail(_tensors: object) -> None:
        raise MemoryError

    staged = target.stage(*packed(trained(2)))
    monkeypatch.setattr(torch.autograd.graph, "increment_version", fail)
    with pytest.raises(MemoryError):
        target.swap(staged)

    assert snapshot(worker) == before
    assert [parameter.data_ptr() for parameter in worker.parameters()] == memory


@modes
def test_weights_by_hand_may_alias_the_destination(mode: Mode) -> None:
    destination = {"a": torch.ones(2), "b": torch.zeros(2)}

    Target(destination, mode).apply({"a": destination["b"], "b": destination["a"]})

    assert (destination["a"].tolist(), destination["b"].tolist()) == ([0, 0], [1, 1])


def test_a_copied_worker_is_not_disturbed_by_the_next_version() -> None:
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


def test_a_policy_fits_a_policy() -> None:
    assert Target(Policy()).layout == Target(trained(1)).layout
