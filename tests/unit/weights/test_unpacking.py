"""`present`: the contents of an update, as weights that own their memory."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from weightsync.engine.packer import Packer
from weightsync.errors import ProtocolError
from weightsync.weights.extra_state import encode_extras
from weightsync.weights.packing import digest_of
from weightsync.weights.reading import layout_of, read_weights
from weightsync.weights.strategy import WeightStrategy
from weightsync.weights.unpacking import present, present_as


class Counting(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 7}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"seen": 7}


def odd() -> dict[str, torch.Tensor]:
    return {
        "a.half": torch.ones(3, dtype=torch.bfloat16),
        "a.flags": torch.tensor([True, False]),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "z": torch.full((2, 2), 1 + 2j),
        "tiny": torch.ones(2).to(torch.float8_e4m3fn),
        "strided": torch.arange(6.0).view(2, 3).t(),
    }


@pytest.mark.parametrize("extract_as", ["state_dict", "tensordict"])
@pytest.mark.parametrize("make", [lambda: nn.Sequential(Counting(3, 2), nn.BatchNorm1d(2)), odd], ids=["module", "odd"])
def test_presented_weights_have_the_digest_of_the_packed_weights(make, extract_as):
    packed = Packer().pack(make())

    found = present(packed.layout, packed.buffer.view, packed.extras, WeightStrategy(extract_as))

    read = read_weights(found)
    assert isinstance(found, TensorDict if extract_as == "tensordict" else dict)
    assert layout_of(read) == packed.layout
    assert digest_of(read, packed.layout, packed.extras) == packed.digest


def test_extra_state_is_presented_under_its_name_in_the_state_dict():
    packed = Packer().pack(Counting(3, 2))

    found = present(packed.layout, packed.buffer.view, packed.extras, WeightStrategy("state_dict"))

    assert {"seen": 7} == found["_extra_state"]
    Counting(3, 2).load_state_dict(found)


def test_each_presented_tensor_owns_its_memory():
    packed = Packer().pack({"a": torch.ones(4), "b": torch.zeros(100_000)})

    found = present(packed.layout, packed.buffer.view, packed.extras, WeightStrategy("state_dict"))
    packed.buffer.view[:] = bytes(packed.buffer.view.nbytes)

    assert torch.equal(torch.ones(4), found["a"])
    assert len(pickle.dumps(found["a"])) < 1000


def test_a_payload_that_is_too_short_is_refused():
    packed = Packer().pack({"a": torch.ones(4)})

    with pytest.raises(ProtocolError, match="8 bytes"):
        present(packed.layout, packed.buffer.view[:8], packed.extras, WeightStrategy())


@pytest.mark.parametrize("extras", [{}, {"": 1, "other": 2}], ids=["none", "surplus"])
def test_extra_state_that_contradicts_the_layout_is_refused(extras):
    packed = Packer().pack(Counting(3, 2))

    with pytest.raises(ProtocolError, match=r"Extra state arrived for \[.*\], but the layout lists \[''\]"):
        present(packed.layout, packed.buffer.view, encode_extras(extras), WeightStrategy())


@pytest.mark.parametrize(
    "weights",
    [
        {"a.w": torch.ones(2), "_extra_state": {"n": 1}},
        {"a": {"w": torch.ones(2), "_extra_state": (1, "x")}},
        TensorDict({"a": {"w": torch.ones(2)}}, []),
    ],
    ids=["flat", "nested", "tensordict"],
)
def test_weights_are_presented_in_the_form_in_which_they_were_given(weights):
    packed = Packer().pack(weights)

    found = present_as(packed.form, packed.layout, packed.buffer.view, packed.extras)

    assert type(weights) is type(found)
    assert weights.keys() == found.keys()
    assert type(weights.get("a")) is type(found.get("a"))
    if isinstance(weights.get("a"), dict):
        assert weights["a"]["_extra_state"] == found["a"]["_extra_state"]
    again = Packer().pack(found)
    assert (packed.form, packed.digest) == (again.form, again.digest)
