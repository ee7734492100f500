"""A module's own hooks may raise in the middle of a swap, after which everything is restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from data_samples import Counted, packed, snapshot, trained
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from weightsync import LayoutError
from weightsync.weights.target import Mode, SwapBroken, Target

modes = pytest.mark.parametrize("mode", Mode)


class Fragile(Counted):
    """A module that raises after it has changed half of its state. A stubborn one then refuses its old state, too."""

    def __init__(self, stubborn: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.state: object = "old"
        self.stubborn = stubborn

    def set_extra_state(self, state: object) -> None:
        if state == "bad" or (self.stubborn and self.state == "half"):
            self.state = "half"
            raise OSError("no such state")
        self.state = state


def _sequence(fragile: Fragile, tensor: torch.Tensor) -> nn.Sequential:
    module = nn.Sequential(Counted(), fragile, Counted())
    module[0].state = module[2].state = {"tensor": tensor}
    return module


def _update(state: object) -> nn.Sequential:
    fragile = Fragile()
    fragile.state, fragile.weight.data = state, torch.ones(2)
    return _sequence(fragile, torch.ones(2))


@modes
def test_a_swap_is_undone_if_a_hook_raises(mode: Mode) -> None:
    worker = _sequence(Fragile(), torch.zeros(2))
    target, before = Target(worker, mode), snapshot(worker)

    with pytest.raises(OSError, match="no such state"):
        target.swap(target.stage(*packed(_update("bad"))))

    assert snapshot(worker) == before
    target.swap(target.stage(*packed(_update("good"))))
    assert snapshot(worker) == snapshot(_update("good"))


@modes
def test_a_hook_whose_change_cannot_be_undone_breaks_the_swap(mode: Mode) -> None:
    target = Target(_sequence(Fragile(stubborn=True), torch.zeros(2)), mode)

    with pytest.raises(SwapBroken, match="'1' could not be restored") as caught:
        target.swap(target.stage(*packed(_update("bad"))))

    assert isinstance(caught.value.__cause__, OSError)


class Exiting(Counted):
    """A module whose hook ends the program halfway, whatever the state is."""

    def set_extra_state(self, state: object) -> None:
        self.state = "half"
        raise SystemExit(3)


def test_a_hook_that_raises_system_exit_halfway_breaks_the_swap() -> None:
    target, source = Target(nn.Sequential(Exiting())), nn.Sequential(Counted())
    source[0].state = "new"

    with pytest.raises(SwapBroken, match="'0' could not be restored") as caught:
        target.swap(target.stage(*packed(source)))

    assert isinstance(caught.value.__cause__, SystemExit)


class AlwaysRaising(Counted):
    """A module that refuses every state, and never changes."""

    def set_extra_state(self, state: object) -> None:
        raise NotImplementedError


@modes
def test_a_hook_that_raises_without_a_change_leaves_the_old_weights(mode: Mode) -> None:
    worker = nn.Sequential(Counted(), AlwaysRaising())
    source = nn.Sequential(Counted(), Counted())
    source[0].state = source[1].state = "new"
    target, before = Target(worker, mode), snapshot(worker)

    with pytest.raises(NotImplementedError):
        target.swap(target.stage(*packed(source)))

    assert snapshot(worker) == before


class ParameterReplacing(Counted):
    """A module that replaces its own parameter when its state is set."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.size = size

    def set_extra_state(self, state: object) -> None:
        self.state = state
        self.weight = nn.Parameter(torch.zeros(self.size))


@modes
def test_a_parameter_replaced_by_a_hook_gets_the_weights_only_if_they_fit(mode: Mode) -> None:
    source = ParameterReplacing()
    source.state = "new"
    source.weight.data += 1
    fits, grows = ParameterReplacing(), ParameterReplacing(3)

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


def test_weights_that_a_functional_call_applies_go_into_the_substituted_tensors() -> None:
    model = nn.Linear(2, 2, bias=False)
    before, given = model.weight.tolist(), torch.zeros(2, 2)
    target, update = Target(model), packed({"weight": torch.ones(2, 2)})
    model.register_forward_pre_hook(lambda *_: target.swap(target.stage(*update)))

    torch.func.functional_call(model, {"weight": given}, (torch.ones(2),))

    assert given.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert model.weight.tolist() == before


class Refusing:
    """Allows this many calls, and raises at each later one."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.left = calls

    def call(self, function: Callable[..., Any], _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            raise PermissionError(function)
        return function(*args, **(kwargs or {}))


class RefusingFunctions(Refusing, TorchFunctionMode):
    __torch_function__ = Refusing.call


class RefusingOperators(Refusing, TorchDispatchMode):
    __torch_dispatch__ = Refusing.call


def _odd(fill: float) -> nn.Module:
    """A model with extra state, and with buffers whose bytes are not moved but copied by torch."""
    model = nn.Sequential(Counted(), nn.Linear(2, 3))
    model.register_buffer("mask", torch.full((2,), bool(fill)))
    model.register_buffer("strided", torch.zeros(2, 3).t())
    for tensor in model.state_dict(keep_vars=True).values():
        if isinstance(tensor, torch.Tensor):
            tensor.data.fill_(fill)
    model[0].state = fill
    return model


@modes
@pytest.mark.parametrize("kind", [RefusingFunctions, RefusingOperators])
def test_a_torch_mode_that_raises_leaves_all_old_or_all_new_weights(kind: Any, mode: Mode) -> None:
    new = snapshot(_odd(1.0))
    for calls in range(1000):
        worker = _odd(0.0)
        target, before = Target(worker, mode), snapshot(worker)
        staged, refusing = target.stage(*packed(_odd(1.0))), kind(calls)
        try:
            with refusing:
                target.swap(staged)
        except PermissionError:
            assert snapshot(worker) == before
        else:
            assert snapshot(worker) == new
            break
    assert refusing.left >= 0
