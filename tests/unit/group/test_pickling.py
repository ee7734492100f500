"""How a worker pickles its results."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weightsync.group.pickling import pickled, unpickled
from weightsync.weights.tensors import DTYPES, bits_of


def round_trip(tensor: Tensor) -> Tensor:
    """A tensor as the trainer gets it, after checks that it is the same as the one that a worker has put."""
    found: Tensor = pickle.loads(pickled(tensor))
    assert (type(found), found.dtype, found.shape) == (type(tensor), tensor.dtype, tensor.shape)
    assert found.requires_grad == tensor.requires_grad
    assert found.stride() == tensor.stride()
    assert torch.equal(bits_of(found), bits_of(tensor))
    return found


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_tensors_of_every_dtype_arrive_bit_identical(dtype: torch.dtype) -> None:
    numbers = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
    tensor = (numbers % 2 if dtype is torch.bool else numbers).view(dtype).view(2, 3)

    for each in (tensor, tensor[1:], tensor[:0], tensor[0, 0]):
        round_trip(each)


def test_a_view_is_sent_without_the_rest_of_its_storage() -> None:
    rollout = torch.arange(float(1 << 16)).view(-1, 64)
    views = [rollout[0], rollout[:, 0][:4], rollout[:2, ::16], rollout[0, :4].expand(2, 4)]

    found = pickle.loads(data := pickled(views))

    assert len(data) < 2_000
    assert all(map(torch.equal, found, views))
    assert [each.stride() for each in found] == [each.clone().stride() for each in views]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        torch.arange(24.0).view(2, 3, 4).transpose(1, 2)[1:],
        torch.ones(2, requires_grad=True) * 3,
        nn.Parameter(torch.arange(6.0).view(2, 3).t()),
    ],
    ids=["permuted", "slice-of-transposed", "computed", "parameter"],
)
def test_strided_tensors_and_tensors_with_gradients_are_not_pickled_by_torch(tensor: Tensor) -> None:
    round_trip(tensor)

    assert b"torch.storage" not in bytes(pickled(tensor))  # not pickled by torch


def test_unpickled_tensors_own_writable_memory() -> None:
    tensor = torch.zeros(4)
    found = round_trip(tensor)
    found += 1

    assert tensor.tolist() == [0] * 4


@pytest.mark.parametrize(
    "tensor",
    [
        nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True),
        torch.ones(2, 3).t(),
        torch.ones(1).expand(3),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, dtype=torch.complex64).conj().imag,
    ],
    ids=["parameter", "requires-grad", "transposed", "expanded", "conjugated", "negated"],
)
def test_parameters_views_and_conjugated_tensors_arrive_unchanged(tensor: Tensor) -> None:
    round_trip(tensor)


def test_tensor_attributes_and_identities_are_preserved() -> None:
    tensor, marked = torch.ones(2), torch.ones(2)
    marked.origin = "here"  # type: ignore[attr-defined]

    first, again, found = pickle.loads(pickled([tensor, tensor, marked]))

    assert first is again
    assert found.origin == "here"


class RaisesStopIteration:
    """A value whose unpickling raises StopIteration."""

    def __reduce__(self) -> Any:
        return next, (iter(()),)


def test_stop_iteration_while_unpickling_is_an_error_and_does_not_end_the_results() -> None:
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(iter(lambda: unpickled(pickle.dumps(RaisesStopIteration())), None))
