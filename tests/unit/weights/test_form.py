"""A form recognises its tensors, and notices what has changed about them: with torch's guards, and without."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from weightsync.weights import tensors as module
from weightsync.weights.tensors import Form


@pytest.fixture(params=["with torch's guards", "without"], autouse=True)
def guards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether torch has guards of tensors in this test."""
    if request.param == "without":
        monkeypatch.setattr(module, "TensorGuards", None)
    return request.param != "without"


def sample_tensors() -> list[Tensor]:
    return [
        nn.Parameter(torch.randn(4, 4)),
        nn.Parameter(torch.randn(2, 6)[:, :3], requires_grad=False),
        torch.arange(8.0),
        torch.randn(3, dtype=torch.complex64),
        torch.empty(0, 2),
    ]


def moved(tensors: list[Tensor]) -> None:
    tensors[0].data = tensors[0].data + 1


def reshaped(tensors: list[Tensor]) -> None:
    tensors[0].data = tensors[0].data.view(2, 8)


def transposed(tensors: list[Tensor]) -> None:
    tensors[0].data = tensors[0].data.t()


def cast(tensors: list[Tensor]) -> None:
    tensors[2].data = tensors[2].data.view(torch.int32)


def negated(tensors: list[Tensor]) -> None:
    tensors[2].data = torch._neg_view(tensors[2].data)


def conjugated(tensors: list[Tensor]) -> None:
    tensors[3].data = tensors[3].data.conj()


def freed(tensors: list[Tensor]) -> None:
    tensors[2].untyped_storage().resize_(0)


def made_sparse(tensors: list[Tensor]) -> None:
    tensors[2] = tensors[2].to_sparse()


def one_less(tensors: list[Tensor]) -> None:
    tensors.pop()


def one_more(tensors: list[Tensor]) -> None:
    tensors.append(torch.empty(0))


@pytest.mark.parametrize(
    "change",
    [moved, reshaped, transposed, cast, negated, conjugated, freed, made_sparse, one_less, one_more],
    ids=lambda each: each.__name__,
)
def test_a_form_does_not_fit_tensors_that_have_changed(change: Callable[[list[Tensor]], None]) -> None:
    tensors = sample_tensors()
    form = Form(tensors)
    assert form.fits(tensors)
    change(tensors)

    assert not form.fits(tensors)


@pytest.mark.parametrize(
    "change",
    [reshaped, transposed, cast, negated, conjugated, freed, made_sparse, one_less, one_more],
    ids=lambda each: each.__name__,
)
def test_a_moved_form_does_not_fit_tensors_that_also_changed(change: Callable[[list[Tensor]], None]) -> None:
    form = Form(sample_tensors())
    tensors = sample_tensors()
    change(tensors)
    moved = form.moved(tensors)

    assert moved is None or not moved.fits(tensors)


def test_a_sized_form_does_not_fit_a_tensor_that_was_shrunk_at_the_same_address() -> None:
    tensors = sample_tensors()
    form = Form(tensors, sized=True)
    assert form.fits(tensors)
    tensors[2].untyped_storage().resize_(8)
    form.addresses = list(map(Tensor.data_ptr, tensors))

    assert not form.fits(tensors)


def test_a_moved_form_fits_only_the_tensors_that_it_was_moved_to() -> None:
    first, second = sample_tensors(), sample_tensors()
    form = Form(first)
    moved = form.moved(second)

    assert moved is not None
    assert (form.fits(first), form.fits(second)) == (True, False)
    assert (moved.fits(first), moved.fits(second)) == (False, True)


def test_a_form_does_not_move_to_a_tensor_without_memory() -> None:
    form = Form([torch.ones(2, 2)])

    assert form.moved([torch._efficientzerotensor(2, 2)]) is None
    assert form.moved([torch.ones(2, 2, device="meta")]) is None


def test_a_nested_tensor_does_not_fit_even_at_the_address_of_a_known_tensor() -> None:
    first, second = torch.ones(2, 2), torch.ones(2, 2)
    sizes, strides = torch.full((2, 1), 2), torch.ones((2, 1), dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that such tensors are new
        there, elsewhere = (
            torch._nested_view_from_buffer(tensor.flatten(), sizes, strides, torch.arange(2) * 2)
            for tensor in (first, second)
        )
        none = torch.nested.nested_tensor([])
    form = Form([first])
    moved = form.moved([elsewhere])

    assert there.data_ptr() == first.data_ptr()
    assert not form.fits([there])  # torch's guards would end the process here
    assert moved is None or not moved.fits([elsewhere])
    assert not Form([torch.empty(0)]).fits([none])


@pytest.mark.parametrize(
    "mode",
    [
        contextlib.nullcontext,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ],
    ids=["usual", "no_grad", "inference_mode", "autocast"],
)
def test_a_form_fits_tensors_with_other_values_in_any_torch_mode(
    mode: Callable[[], contextlib.AbstractContextManager[object]],
) -> None:
    tensors = sample_tensors()
    form = Form(tensors)
    for tensor in tensors:
        tensor.data.mul_(2)

    with mode():
        assert form.fits(tensors)
    assert form.fits(tensors)


def test_a_tensor_that_now_requires_grad_fits_and_the_guards_are_renewed(guards: bool) -> None:
    tensors = sample_tensors()
    form = Form(tensors)
    tensors[2].requires_grad_()

    assert form.fits(tensors)
    assert guards == (form._guards is not None and form._guards.check(*tensors))


def test_a_tensor_listed_twice_fits_until_it_changes() -> None:
    tensors = sample_tensors()
    tensors.append(tensors[0])
    form = Form(tensors)

    assert form.fits(tensors)
    reshaped(tensors)
    assert not form.fits(tensors)


def test_tensors_listed_twice_are_checked_by_the_guards_in_one_call(
    guards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = sample_tensors()
    form = Form([*tensors, *tensors[:2]])
    monkeypatch.setattr(module, "_traits", lambda tensors: pytest.fail("read one by one") if guards else form._traits)

    assert form.fits([*tensors, *tensors[:2]])


def test_a_reshaped_view_in_place_of_a_tensor_listed_twice_does_not_fit() -> None:
    first, second = torch.randn(4, 4), torch.randn(3)
    other = first.view(2, 8)
    form = Form([first, first, other, second])

    assert not form.fits([first, other, other, second])
    assert form.fits([first, first, other, second])
    assert form.fits([first, first.view(4, 4), other, second])


def test_tensors_that_changed_places_in_the_list_do_not_fit() -> None:
    tensors = sample_tensors()
    form = Form(tensors)
    tensors[0], tensors[1] = tensors[1], tensors[0]

    assert not form.fits(tensors)


@pytest.mark.parametrize("view", [torch._neg_view, torch.conj], ids=["negated", "conjugated"])
def test_a_form_does_not_fit_if_a_different_tensor_is_the_lazy_view(view: Callable[[Tensor], Tensor]) -> None:
    first, second = torch.randn(2, 3, dtype=torch.complex64)
    form = Form([view(first), second])

    assert form.fits([view(first), second])
    assert not form.fits([first, view(second)])


def test_a_form_keeps_no_tensor_alive() -> None:
    tensors = sample_tensors()
    form = Form(tensors)
    assert form.fits(tensors)
    held = [weakref.ref(tensor) for tensor in tensors]
    del tensors
    gc.collect()

    assert [each() for each in held] == [None] * 5
