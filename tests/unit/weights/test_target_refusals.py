"""An update that does not fit is refused with the differences, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from data_samples import Counted, packed, snapshot, trained
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from weightsync import ConfigurationError, LayoutError, ProtocolError
from weightsync.weights.destination_checks import FunctionalCallError
from weightsync.weights.extra_state import encode_extras
from weightsync.weights.target import Mode, Target, plan_for

modes = pytest.mark.parametrize("mode", Mode)


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
    ("change", "message"),
    [
        (_renamed, "missing 'scale'; unexpected 'renamed'"),
        (_reshaped, r"'scale' \(shape \(1,\), expected \(\)\)"),
        (_recast, r"'brief' \(dtype float16, expected bfloat16\)"),
        (_untied, "'embedding.weight', 'head.weight' are tied"),
        (_without_extra, "missing 'counted._extra_state'"),
    ],
)
def test_an_update_that_does_not_fit_is_refused_and_changes_nothing(mode: Mode, change, message: str) -> None:
    worker = trained(1)
    target = Target(worker, mode)
    target.swap(target.stage(*packed(trained(3))))
    before, served = snapshot(worker), target.digest()

    with pytest.raises(LayoutError, match=message):
        target.stage(*packed(change(trained(2).state_dict())))

    assert snapshot(worker) == before
    assert target.digest() == served
    target.swap(target.stage(*packed(trained(2))))
    assert snapshot(worker) == snapshot(trained(2))


@modes
def test_payloads_and_extra_state_that_contradict_their_layout_are_refused(mode: Mode) -> None:
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


TARGET, UPDATE = Target(trained(1)), packed(trained(2))[:2]
SERVED = TARGET.digest()


@given(st.binary(max_size=40))
def test_arbitrary_bytes_as_extra_state_are_refused_and_change_nothing(extras: bytes) -> None:
    with pytest.raises(ProtocolError):
        TARGET.stage(*UPDATE, extras)

    assert TARGET.digest() == SERVED


@modes
def test_an_unsupported_destination_is_refused(mode: Mode) -> None:
    with pytest.raises(ConfigurationError, match="int are not supported"):
        Target(3, mode)
    with pytest.raises(LayoutError, match="'weight' is not initialised"):
        Target(nn.LazyLinear(3), mode)


@modes
@pytest.mark.parametrize("replacement", [torch.zeros_like, Tensor.detach])
def test_a_parameter_replaced_after_staging_gets_the_weights(mode: Mode, replacement) -> None:
    source, worker = nn.Linear(2, 2), nn.Linear(2, 2)
    target = Target(worker, mode)
    staged = target.stage(*packed(source))
    worker.weight = nn.Parameter(replacement(worker.weight))

    target.swap(staged)

    assert snapshot(worker) == snapshot(source)


@modes
@pytest.mark.parametrize("values", [torch.ones(2, 2, device="meta"), torch.ones(2, 2).to_sparse()])
def test_a_parameter_replaced_by_a_meta_or_sparse_one_is_refused(mode: Mode, values: Tensor) -> None:
    worker = nn.Linear(2, 2)
    target = Target(worker, mode)
    update = packed(nn.Linear(2, 2))
    target.swap(target.stage(*update))
    worker.weight = nn.Parameter(values)

    with pytest.raises(LayoutError, match="'weight'"):
        target.swap(target.stage(*update))


@modes
@pytest.mark.parametrize("shape", [(3, 2), (2, 2)])
def test_reading_the_layout_between_stage_and_swap_has_no_effect(mode: Mode, shape: tuple[int, int]) -> None:
    source, worker = nn.Linear(2, 2), nn.Linear(2, 2)
    target = Target(worker, mode)
    staged = target.stage(*packed(source))
    worker.weight = nn.Parameter(torch.zeros(shape))
    assert target.layout is not None

    if shape == (2, 2):
        target.swap(staged)
        assert snapshot(worker) == snapshot(source)
    else:
        with pytest.raises(LayoutError, match="'weight'"):
            target.swap(staged)


@modes
def test_staged_updates_may_be_swapped_in_any_order_and_repeatedly(mode: Mode) -> None:
    worker, sources = nn.Linear(2, 2), [nn.Linear(2, 2), nn.Linear(2, 2)]
    target = Target(worker, mode)
    staged = [target.stage(*packed(source)) for source in sources]

    for index in (1, 0, 0, 1):
        target.swap(staged[index])

        assert snapshot(worker) == snapshot(sources[index])


def _tied(model: nn.Module) -> None:
    model.b = model.a


def _expanded(model: nn.Module) -> None:
    model.b.data = torch.zeros(1).expand(3)


@modes
@pytest.mark.parametrize("change", [_tied, _expanded])
def test_an_update_refused_for_tied_or_expanded_parameters_applies_once_they_are_restored(
    mode: Mode, change: Callable[[nn.Module], None]
) -> None:
    worker = nn.Module()
    worker.a, worker.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    target, own = Target(worker, mode), worker.b
    update = packed({"a": torch.ones(3), "b": torch.full((3,), 2.0)})
    change(worker)
    for _ in range(2):
        with pytest.raises(LayoutError, match="'b'"):
            target.swap(target.stage(*update))

    worker.b, own.data = own, torch.zeros(3)
    target.swap(target.stage(*update))

    assert (worker.a.tolist(), worker.b.tolist()) == ([1, 1, 1], [2, 2, 2])


class CallsInForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

    def forward(self, act: Callable[[], None]) -> Tensor:
        act()
        return self.a


@modes
def test_a_destination_that_was_refused_is_not_read_again_in_a_functional_call(mode: Mode) -> None:
    def stage() -> None:
        with pytest.raises(FunctionalCallError, match="'a'"):
            target.stage(*update)

    worker = CallsInForward()
    target, update = Target(worker, mode), packed({"a": torch.ones(3), "b": torch.full((3,), 2.0)})
    _tied(worker)
    with pytest.raises(LayoutError, match="'b'"):
        target.swap(target.stage(*update))

    plain = {"a": torch.zeros(3), "b": torch.zeros(3)}
    assert torch.func.functional_call(worker, plain, (stage,), tie_weights=False) is plain["a"]


@modes
@pytest.mark.parametrize("turned", [True, False], ids=["another order", "the known order"])
def test_a_swap_in_a_functional_call_is_refused_and_the_version_applies_afterwards(mode: Mode, turned: bool) -> None:
    def apply() -> None:
        staged = target.stage(*update)
        with pytest.raises(FunctionalCallError, match="'a'"):
            target.swap(staged)

    worker, plain = CallsInForward(), {"a": torch.zeros(2, 3), "b": torch.zeros(3)}
    worker.a = nn.Parameter(torch.zeros(2, 3))
    target = Target(worker, mode)
    target.refuses_functional_calls = True
    update = packed({"a": torch.ones(3, 2).t() if turned else torch.ones(2, 3), "b": torch.ones(3)})
    assert (target.layout != update[0]) is turned

    torch.func.functional_call(worker, plain, (apply,))

    assert not plain["a"].any()
    target.swap(target.stage(*update))
    assert worker.a.tolist() == [[1, 1, 1], [1, 1, 1]]


@modes
def test_a_parameter_that_became_a_buffer_of_another_dtype_on_both_sides_gets_the_next_version(mode: Mode) -> None:
    worker = CallsInForward()
    target = Target(worker, mode)
    target.refuses_functional_calls = True
    del worker.a
    worker.register_buffer("a", torch.zeros(3, dtype=torch.float64))

    target.swap(target.stage(*packed({"a": torch.ones(3, dtype=torch.float64), "b": torch.ones(3)})))

    assert worker.a.tolist() == [1, 1, 1]


@modes
@pytest.mark.parametrize("modules", [0, 1, 2], ids=["itself", "in another", "twice in another"])
def test_a_parameter_that_became_a_buffer_of_the_same_dtype_gets_the_next_version(mode: Mode, modules: int) -> None:
    def update(a: float, b: float) -> Any:
        owners = ["" if not modules else f"{owner}." for owner in range(modules or 1)]
        return packed(
            {f"{owner}{name}": torch.full((3,), fill) for owner in owners for name, fill in (("a", a), ("b", b))}
        )

    changed = CallsInForward()
    target = Target(nn.ModuleList([changed] * modules) if modules else changed, mode)
    target.refuses_functional_calls = True
    target.swap(target.stage(*update(1.0, 1.0)))
    del changed.a
    changed.register_buffer("a", torch.zeros(3))

    target.swap(target.stage(*update(2.0, 3.0)))

    assert (changed.a.tolist(), changed.b.tolist()) == ([2, 2, 2], [3, 3, 3])


def test_a_parameter_in_a_dict_that_became_a_plain_tensor_gets_the_next_version() -> None:
    """A dict takes any tensor for good, so no functional call is to be waited for."""
    held: dict[str, Tensor] = {"a": nn.Parameter(torch.zeros(3))}
    target = Target(held)
    target.refuses_functional_calls = True
    held["a"] = torch.zeros(3)

    target.swap(target.stage(*packed({"a": torch.ones(3)})))

    assert held["a"].tolist() == [1, 1, 1]


@modes
@pytest.mark.parametrize("kind", [dict, nn.Module])
def test_the_error_names_an_expanded_tensor(mode: Mode, kind: type) -> None:
    destination, wide = kind(), torch.zeros(1).expand(3)
    if isinstance(destination, dict):
        destination["wide"] = wide
    else:
        destination.register_buffer("wide", wide)

    with pytest.raises(LayoutError, match="'wide' of the destination is expanded") as caught:
        Target(destination, mode).stage(*packed({"wide": torch.ones(3)}))

    assert caught.value.mismatched == {"wide": "expanded"}


def test_the_error_names_extra_state_that_contradicts_its_layout() -> None:
    layout, payload, _ = packed(trained(2))

    with pytest.raises(ProtocolError, match=r"Extra state arrived for \['other'\], but the layout lists \['counted'\]"):
        Target(trained(1)).stage(layout, payload, encode_extras({"other": 1}))
    with pytest.raises(ProtocolError, match=r"Extra state arrived for \[\], but the layout lists \['counted'\]"):
        Target(trained(1)).stage(layout, payload)


class Unwritable(Tensor):
    """A tensor that raises when it is written."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch._foreach_copy_:
            raise TypeError("never")
        return super().__torch_function__(func, types, args, kwargs or {})


@modes
def test_a_tensor_of_a_subclass_that_cannot_be_written_is_named_with_its_type(mode: Mode) -> None:
    with pytest.raises(LayoutError) as caught:
        Target({"a": torch.zeros(2), "odd": torch.zeros(2).as_subclass(Unwritable)}, mode)

    why = "is a Unwritable, which cannot be written (TypeError('never'))"
    assert caught.value.mismatched == {"odd": why}
    assert why in str(caught.value)


def test_a_destination_that_has_not_changed_keeps_its_plan() -> None:
    for module in (nn.Linear(2, 2), trained(1)):
        plan = plan_for(module)
        again = plan_for(module, plan)

        assert (again.family, again.form, again.layout) == (plan.family, plan.form, plan.layout)
        assert (again is plan) == (not plan.weights.slots)


@modes
def test_a_module_that_replaces_another_gets_its_extra_state(mode: Mode) -> None:
    worker, source = (nn.Sequential(Counted(), nn.Linear(2, 2)) for _ in range(2))
    source[0].state = "new"
    target = Target(worker, mode)
    worker[0] = Counted()

    target.swap(target.stage(*packed(source)))

    assert worker[0].state == "new"


@modes
def test_extra_state_added_after_the_target_was_made_is_in_the_layout(mode: Mode) -> None:
    worker = nn.Sequential(nn.Identity(), nn.Linear(2, 2))
    target = Target(worker, mode)
    worker[0] = Counted()

    assert target.layout.extras == ("0",)
