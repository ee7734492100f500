"""A sender that has planned how it copies weights notices whatever changes about them, and sends them as they are."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from weightsync import LayoutError
from weightsync.engine.packer import Packer
from weightsync.weights import packing, send_plan
from weightsync.weights.packing import Move, views
from weightsync.weights.reading import Weights, layout_of, read_weights
from weightsync.weights.send_plan import SendPlan
from weightsync.weights.target import Target
from weightsync.weights.tensors import Form, borrowed
from weightsync.weights.threads import LEAST


class Model(nn.Module):
    """Tensors of a few bytes and of more than are moved one by one, in several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Parameter(torch.randn(3, 3))
        self.large = nn.Parameter(torch.randn(100, 100))
        self.small = nn.ParameterList([torch.randn(1 + index) for index in range(7)])
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("none", torch.empty(0, 2))


def sent(packer: Packer, model: nn.Module) -> dict[str, Tensor]:
    """What a worker would get."""
    packed = packer.pack(model)
    try:
        flat = borrowed(packing.address_of(packed.buffer.view), packed.layout.nbytes).clone()
    finally:
        packer.handed_over(packed)
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


def gone(model: Model) -> None:
    del model.large


@pytest.mark.parametrize(
    "change",
    [values, moved, reshaped, transposed, cast, negated, replaced, tied, resized, renamed, gone],
    ids=lambda each: each.__name__,
)
def test_whatever_changes_between_two_sends_is_sent_as_it_is(change: Callable[[Model], None]) -> None:
    model = Model()
    packer = planned(model)
    with torch.no_grad():
        change(model)

    for _ in range(3):  # what has changed is planned anew, and used
        found = sent(packer, model)
        state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        assert found.keys() == state.keys()
        assert all(found[name].dtype == state[name].dtype for name in state)
        assert all(torch.equal(found[name], state[name]) for name in state)


def test_parameters_that_are_tied_and_untied_between_two_sends_are_sent_as_they_are() -> None:
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


def test_memory_that_was_freed_is_not_read() -> None:
    model = Model()
    packer = planned(model)
    model.small[3].untyped_storage().resize_(0)
    with pytest.raises(LayoutError, match=r"'small\.3' was freed or shrunk"):
        packer.pack(model)
    model.small[3].untyped_storage().resize_(16)
    with torch.no_grad():
        model.small[3].fill_(5)

    assert sent(packer, model)["small.3"].tolist() == [5.0] * 4


def test_memory_that_was_shrunk_is_not_read_even_where_it_was() -> None:
    model = Model()
    packer = planned(model)
    model.large.untyped_storage().resize_(8)
    # As if it had been shrunk in place: the addresses alone would not show it.
    packer._plan._form = Form(model.state_dict().values())  # type: ignore[union-attr]

    with pytest.raises(LayoutError, match="'large' was freed or shrunk"):
        packer.pack(model)


def test_small_tensors_are_joined_once_they_have_stayed_where_they_were() -> None:
    model = Model()
    packer = planned(model)
    pieces = packer._plan._pieces  # type: ignore[union-attr]
    moves = [step.move for step in pieces._steps]

    assert sorted(len(memories) for _, memories in pieces._runs.values()) == [1, 9]
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


def test_a_copy_is_planned_once_and_only_for_weights_that_stay_where_they_are() -> None:
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


def test_a_plan_keeps_the_layout_of_the_one_before() -> None:
    before = SendPlan(read_weights(Model()), None, None)

    assert SendPlan(read_weights(Model()), before, None).layout is before.layout


def test_tensors_that_have_no_place_in_memory_are_said_to_be_nowhere() -> None:
    class Odd(Tensor):
        pass

    for tensor in (torch.ones(2, device="meta"), torch.ones(2).as_subclass(Odd)):
        assert send_plan._place_of(Weights({"a": tensor}, {})) is None
    assert send_plan._place_of(Weights({"a": torch.ones(2)}, {})) == torch.device("cpu")
