"""A sender with a plan for copying its weights notices every change of the weights, and sends their current values."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from operator import is_

import pytest
import torch
from torch import Tensor, nn

from weightsync import LayoutError
from weightsync.engine.packer import Packer
from weightsync.options import WireDtype
from weightsync.weights import send_plan
from weightsync.weights.packing import Move, views
from weightsync.weights.reading import Weights, layout_of, read_weights
from weightsync.weights.send_plan import SendPlan
from weightsync.weights.target import Target
from weightsync.weights.tensors import Form, bits_of, owning
from weightsync.weights.threads import LEAST


class Model(nn.Module):
    """A model with large, small and empty tensors in several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Parameter(torch.randn(3, 3))
        self.large = nn.Parameter(torch.randn(100, 100))
        self.small = nn.ParameterList([torch.randn(1 + index) for index in range(7)])
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("none", torch.empty(0, 2))


def sent(packer: Packer, model: nn.Module | dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that a worker would receive."""
    packed = packer.pack(model)
    try:
        flat = owning(memoryview(bytearray(packed.buffer.view[: packed.layout.nbytes])))
    finally:
        packer.release_packed(packed)
    found = zip(packed.layout.entries, views(packed.layout, flat), strict=True)
    return {entry.name: tensor for entry, tensor in found}


def planned(model: nn.Module) -> Packer:
    packer = Packer()
    for _ in range(3):
        sent(packer, model)
    assert packer._plan is not None
    assert packer._plan._pieces is not None
    return packer


def values(model: Model) -> None:
    for tensor in (model.square, model.large, *model.small, model.count, model.none):
        tensor.data.add_(1)
    model.flags.logical_not_()


def moved(model: Model) -> None:
    for parameter in (model.square, model.large, model.small[2]):
        parameter.data = parameter.data + 1


def reshaped(model: Model) -> None:
    model.large.data = model.large.data.view(50, 200)


def transposed(model: Model) -> None:
    model.square.data.t_()
    model.square.data = model.square.data.t()


def cast(model: Model) -> None:
    model.count.data = model.count.data.view(torch.float64)


def negated(model: Model) -> None:
    model.large.data = torch._neg_view(model.large.data)


def replaced(model: Model) -> None:
    model.square = nn.Parameter(torch.randn(3, 3))


def tied(model: Model) -> None:
    model.small[0] = nn.Parameter(model.large.data[0, :1])


def resized(model: Model) -> None:
    model.count.resize_(5)


def renamed(model: Model) -> None:
    model.other = model.square
    del model.square


def removed(model: Model) -> None:
    del model.large


@pytest.mark.parametrize(
    "change",
    [values, moved, reshaped, transposed, cast, negated, replaced, tied, resized, renamed, removed],
    ids=lambda each: each.__name__,
)
def test_weights_changed_between_two_sends_are_sent_with_their_current_values(change: Callable[[Model], None]) -> None:
    model = Model()
    packer = planned(model)
    with torch.no_grad():
        change(model)

    for _ in range(3):  # the changed weights are planned anew, and then sent by the new plan
        found = sent(packer, model)
        state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        assert found.keys() == state.keys()
        assert all(found[name].dtype == state[name].dtype for name in state)
        assert all(torch.equal(found[name], state[name]) for name in state)


def test_parameters_tied_or_untied_between_two_sends_are_sent_with_their_current_values() -> None:
    model = nn.ModuleDict({name: nn.Linear(3, 3) for name in "ab"})
    packer = planned(model)
    own = model["b"].weight
    for weight in (model["a"].weight, own):
        model["b"].weight = weight
        with torch.no_grad():
            model["a"].weight.add_(1)
        for _ in range(3):
            found = sent(packer, model)
            assert torch.equal(found["a.weight"], model["a"].weight)
            assert torch.equal(found["b.weight"], weight)


def test_freed_memory_is_not_read() -> None:
    model = Model()
    packer = planned(model)
    model.small[3].untyped_storage().resize_(0)
    with pytest.raises(LayoutError, match=r"'small\.3' was freed or shrunk"):
        packer.pack(model)
    model.small[3].untyped_storage().resize_(16)
    with torch.no_grad():
        model.small[3].fill_(5)

    assert sent(packer, model)["small.3"].tolist() == [5.0] * 4


def test_shrunk_memory_is_not_read_even_at_the_same_address() -> None:
    model = Model()
    packer = planned(model)
    model.large.untyped_storage().resize_(8)
    # As if the storage had been shrunk in place: the address alone would not show that.
    packer._plan._form = Form(model.state_dict().values())  # type: ignore[union-attr]

    with pytest.raises(LayoutError, match="'large' was freed or shrunk"):
        packer.pack(model)


class Moving(nn.Module):
    """A module whose tensors get other memory whenever its extra state is read, as by a flush of gathered values."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Parameter(torch.zeros(100, 100)), nn.Parameter(torch.zeros(5))
        self.reads = 0
        self.gathered: list[Tensor] = []

    def get_extra_state(self) -> int:
        self.reads += 1
        for parameter in self.parameters():
            parameter.data = torch.full_like(parameter.data, self.reads)
            # Take the memory that has just become free.
            self.gathered += [torch.full_like(parameter.data, -1) for _ in range(3)]
        return self.reads

    def set_extra_state(self, state: int) -> None:
        """Do nothing."""


def test_weights_moved_while_their_extra_state_is_read_are_sent_from_their_new_memory() -> None:
    model, packer = Moving(), Packer()
    for _ in range(5):
        found = sent(packer, model)
        assert {name: set(tensor.flatten().tolist()) for name, tensor in found.items()} == {
            "large": {float(model.reads)},
            "small": {float(model.reads)},
        }


def test_small_tensors_are_joined_once_their_addresses_have_stayed_the_same() -> None:
    model = Model()
    packer = planned(model)
    pieces = packer._plan._pieces  # type: ignore[union-attr]
    moves = [step.move for step in pieces._steps]

    assert sorted(map(len, pieces._memories.values())) == [1, 8]  # the tensors that are not empty
    assert moves.count(Move.JOINED) == 2  # of float32 and of int64
    assert moves.count(Move.BYTES) == 1
    assert moves.count(Move.BY_TORCH) == 1  # of bool


def test_a_sender_keeps_no_tensor_alive() -> None:
    model = Model()
    packer = planned(model)
    held = [weakref.ref(tensor) for tensor in model.state_dict(keep_vars=True).values()]
    del model
    gc.collect()

    assert [each() for each in held] == [None] * len(held)
    packer.close()


def test_a_copy_is_planned_once_and_only_for_weights_that_have_not_moved() -> None:
    weights = read_weights(Model())
    plan = SendPlan(weights, None, None)

    assert plan.pieces(weights) is None
    assert plan.fits(weights)
    pieces = plan.pieces(weights)
    assert pieces is not None
    assert plan.pieces(weights) is pieces


def test_a_copy_is_planned_again_for_another_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = read_weights({"large": torch.zeros(LEAST)})
    plan, target = SendPlan(weights, None, None), Target({"large": torch.ones(LEAST)})
    layout, payload = layout_of(weights), bytearray(4 * LEAST)
    assert plan.fits(weights)
    for used in (1, 3, 3, 1):
        monkeypatch.setattr(torch, "get_num_threads", lambda used=used: used)
        target.swap(target.stage(layout, memoryview(payload)))
        for pieces in (plan.pieces(weights), target._pieces_of(target._plan)):
            assert pieces is not None
            assert pieces._whole.threads == used


def copies(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights in other memory, with other values."""
    with torch.no_grad():
        return {
            name: each.clone().logical_not_() if each.dtype is torch.bool else each + 1
            for name, each in weights.items()
        }


def outcome(packer: Packer, weights: dict[str, Tensor]) -> object:
    """Dtype, shape and bytes that a worker would receive for each entry, or the error of the send."""
    try:
        found = sent(packer, weights)
    except LayoutError as error:
        return str(error)
    return {name: (each.dtype, each.shape, bits_of(each).numpy().tobytes()) for name, each in found.items()}


def outcome_of_a_new_packer(weights: dict[str, Tensor], wire_dtype: WireDtype | None = None) -> object:
    """The outcome of a sender that has sent nothing before."""
    packer = Packer(wire_dtype=wire_dtype)
    try:
        return outcome(packer, weights)
    finally:
        packer.close()


def shrunk(nbytes: int) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.untyped_storage().resize_(nbytes)
        return tensor

    return change


def in_inference_mode(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


def as_nested(tensor: Tensor) -> Tensor:
    """The rows of a tensor, as a nested tensor."""
    rows, columns = tensor.shape
    sizes, strides = torch.full((rows, 1), columns), torch.ones((rows, 1), dtype=torch.int64)
    return torch._nested_view_from_buffer(tensor.flatten(), sizes, strides, torch.arange(rows) * columns)


class Odd(Tensor):
    """A subclass of Tensor, which torch must copy."""


#: Changes of one tensor, which also moves to other memory. Its name stays, and sometimes its shape and dtype too.
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "only other memory": lambda tensor: tensor,
    "a parameter": lambda tensor: nn.Parameter(tensor, requires_grad=tensor.is_floating_point()),
    "of another type": lambda tensor: tensor.as_subclass(Odd),
    "of another shape": lambda tensor: tensor.view(-1, 1),
    "transposed": lambda tensor: tensor.t().contiguous().t(),
    "with gaps": lambda tensor: torch.stack([tensor, tensor], dim=-1)[..., 1],
    "at an offset": lambda tensor: torch.cat([tensor, tensor])[len(tensor) :],
    "of equal elements": lambda tensor: tensor[:1, :1].expand(tensor.shape),
    "of another dtype": lambda tensor: tensor.view(torch.int32 if tensor.itemsize == 4 else torch.bool),
    "of a wider dtype": lambda tensor: tensor.double(),
    "lazily negated": lambda tensor: tensor if tensor.dtype is torch.bool else torch._neg_view(tensor),
    "lazily conjugated": torch.conj,
    "made in inference mode": in_inference_mode,
    "freed": shrunk(0),
    "shrunk": shrunk(7),
    "sparse": lambda tensor: torch.sparse_coo_tensor(
        torch.empty((2, 0), dtype=torch.int64), torch.empty(0, dtype=tensor.dtype), tensor.shape
    ),
    "nested": as_nested,
    "on the meta device": lambda tensor: tensor.to("meta"),
    "quantised": lambda tensor: torch._empty_affine_quantized(tensor.shape, scale=1, zero_point=0, dtype=torch.quint8),
}


@pytest.mark.parametrize("name", ["small", "large", "flags", "complex"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_weights_that_move_and_change_together_are_sent_as_by_a_new_sender(
    change: Callable[[Tensor], Tensor], name: str
) -> None:
    first = {
        "small": torch.randn(3, 3),
        "flags": torch.tensor([[True, False], [False, True]]),
        "large": torch.randn(100, 100),
        "complex": torch.randn(2, 2, dtype=torch.complex64),
        "none": torch.empty(0, 2),
        "other": torch.randn(5),
    }
    packer, second = Packer(), copies(first)
    changed = copies(second)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about new and deprecated features
        changed[name] = change(changed[name])
    expected = [outcome_of_a_new_packer(weights) for weights in (first, second, changed)]
    for at in (0, 1, 1, 2, 2, 1, 2, 0):
        assert outcome(packer, (first, second, changed)[at]) == expected[at]
    packer.close()


def test_weights_that_move_before_each_send_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    called: Counter[str] = Counter()

    def counts(name: str) -> None:
        call = getattr(send_plan, name)
        monkeypatch.setattr(send_plan, name, lambda *given, **named: (called.update([name]), call(*given, **named))[1])

    counts("layout_of")
    counts("movable")
    weights = [{name: each.detach() for name, each in Model().state_dict().items()} for _ in range(5)]
    packer = Packer()
    plans = set()
    for each in [*weights, *weights]:
        sent(packer, each)
        plans.add(packer._plan)

    assert called == {"layout_of": 1, "movable": 1}
    assert len(plans) == 10
    assert outcome(packer, weights[0]) == outcome_of_a_new_packer(weights[0])


def test_cast_weights_that_move_are_sent_as_by_a_new_sender() -> None:
    packer = Packer(wire_dtype=WireDtype.BFLOAT16)
    weights = {name: each.detach() for name, each in Model().state_dict().items()}
    for _ in range(4):
        assert outcome(packer, weights) == outcome_of_a_new_packer(weights, WireDtype.BFLOAT16)
        assert torch.float32 not in {each.dtype for each in sent(packer, weights).values()}
        weights = copies(weights)


def test_weights_tied_or_untied_as_they_move_are_sent_as_by_a_new_sender() -> None:
    packer = Packer()
    for tied in (False, False, True, True, False):
        one, two = torch.randn(3), torch.randn(3)
        weights = {"one": one, "two": one if tied else two}
        for _ in range(2):
            assert outcome(packer, weights) == outcome_of_a_new_packer(weights)


def test_memory_for_joined_small_tensors_is_kept_only_from_the_second_copy_on() -> None:
    first, moved_to = Model(), Model()
    packer = planned(first)
    kept: list[list[object]] = []
    for _ in range(3):
        sent(packer, moved_to)
        assert packer._plan is not None
        assert packer._plan._pieces is not None
        kept.append(list(packer._plan._pieces._memories.values()))

    assert list(map(len, kept)) == [0, 2, 2]  # runs of float32 and of int64
    assert all(map(is_, kept[1], kept[2]))


def test_a_new_plan_keeps_the_layout_of_the_previous_plan() -> None:
    before = SendPlan(read_weights(Model()), None, None)

    assert SendPlan(read_weights(Model()), before, None).layout is before.layout


def test_meta_tensors_and_tensor_subclasses_have_no_known_place() -> None:
    for tensor in (torch.ones(2, device="meta"), torch.ones(2).as_subclass(Odd)):
        assert send_plan._place_of(Weights({"a": tensor}, {})) is None
    assert send_plan._place_of(Weights({"a": torch.ones(2)}, {})) == torch.device("cpu")
