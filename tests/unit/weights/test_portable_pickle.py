"""Weights as they travel to actors without a receiver: the bytes of each tensor, which torch alone can read."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from weightsync.weights.portable_pickle import READABLE, portable

FAR_APART = torch.arange(12.0).reshape(3, 4).t()
TENSORS = {
    **{str(dtype).removeprefix("torch."): torch.ones(2, 3).to(dtype) for dtype in sorted(READABLE, key=str)},
    "float8": torch.ones(2, 3).to(torch.float8_e4m3fn),
    "uint32": torch.ones(2, 3).to(torch.uint32),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "with gaps": FAR_APART,
    "conjugated": torch.ones(3, dtype=torch.complex64).mul(1j).conj(),
    "a parameter": nn.Parameter(torch.ones(2, 3)),
    "with a gradient": torch.ones(2, 3, requires_grad=True),
}


def travelled(weights: Any) -> Any:
    """The weights as Ray delivers them: buffers come out of band, and cannot be written to."""
    buffers: list[pickle.PickleBuffer] = []
    written = pickle.dumps(portable(weights), protocol=5, buffer_callback=buffers.append)
    return pickle.loads(written, buffers=[bytes(buffer.raw()) for buffer in buffers])


@pytest.mark.parametrize("name", TENSORS)
def test_every_tensor_is_unpickled_unchanged_and_writable(name: str) -> None:
    given = TENSORS[name]

    read = travelled({name: given})[name]

    assert (type(read), read.dtype, read.shape, read.requires_grad) == (
        type(given),
        given.dtype,
        given.shape,
        given.requires_grad,
    )
    assert read.detach().tolist() == given.detach().tolist() if name != "float8" else read.float().eq(1).all()
    read.detach().zero_()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_conjugated_complex32_tensor_is_unpickled_unchanged() -> None:
    given = torch.tensor([[1 + 2j, 3 - 4j]]).to(torch.complex32).conj()

    read = travelled({"weight": given})["weight"]

    assert (read.dtype, read.to(torch.complex64).tolist()) == (torch.complex32, [[1 - 2j, 3 + 4j]])


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_every_protocol_of_pickle_can_carry_weights(protocol: int) -> None:
    read = pickle.loads(pickle.dumps(portable({"weight": torch.ones(3)}), protocol=protocol))

    assert read["weight"].tolist() == [1.0, 1.0, 1.0]


def test_trees_keep_their_types() -> None:
    tree = TensorDict({"net": {"weight": torch.ones(2, 3)}, "bias": torch.zeros(3)}, batch_size=[])

    read = travelled(tree)
    ordered = travelled(OrderedDict(a=torch.ones(1), b={"c": torch.ones(2)}))

    assert type(read) is TensorDict
    assert (read == tree).all()
    assert type(ordered) is OrderedDict
    assert ordered["b"]["c"].tolist() == [1.0, 1.0]


def test_tied_weights_stay_tied() -> None:
    tied = torch.ones(3)

    read = travelled({"a": tied, "b": tied})

    assert read["a"] is read["b"]


def test_pickling_views_neither_calls_torch_save_nor_writes_their_whole_storage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch writes a file for each storage and each view of it. With hundreds of tensors, that took most of a push."""
    flat = torch.arange(6400.0)
    views = {str(number): flat[100 * number : 100 * number + 100] for number in range(64)}
    monkeypatch.setattr(torch, "save", None)

    written = pickle.dumps(portable(views), protocol=5)

    assert len(written) < 2 * flat.nbytes
    assert all(torch.equal(read, views[name]) for name, read in pickle.loads(written).items())


class _Marked(Tensor):
    """A subclass of Tensor."""


def test_tensor_subclasses_and_tensors_with_attributes_are_pickled_by_torch() -> None:
    named = torch.ones(2)
    named.note = "kept"  # type: ignore[attr-defined]

    read = travelled({"named": named, "plain": torch.ones(2)})

    assert read["named"].note == "kept"
    assert type(travelled({"marked": torch.ones(2).as_subclass(_Marked)})["marked"]) is _Marked


@pytest.mark.parametrize(
    "state", [lambda given: {"of": given}, lambda given: [given], lambda given: (1, {"of": given})]
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_uint16_tensor_nested_in_extra_state_is_unpickled_unchanged(
    state: Callable[[Tensor], Any], nested: bool
) -> None:
    held = state(torch.arange(3).to(torch.uint16))
    weights: Any = {"weight": torch.ones(2), "steps": 3, "_extra_state": held}
    if nested:
        weights = TensorDict({"weight": torch.ones(2)}, batch_size=[]).set_non_tensor("_extra_state", held)

    read = travelled(weights)

    assert str(dict(read.items())["_extra_state"]) == str(dict(weights.items())["_extra_state"])


def test_values_other_than_tensors_are_left_to_the_callers_pickler() -> None:
    """Ray can pickle functions, and classes of a program's main module; `pickle` cannot."""
    weights = {"weight": torch.ones(2), "schedule": lambda step: step}

    assert portable(weights) is weights
