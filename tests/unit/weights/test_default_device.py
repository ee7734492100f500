"""With `torch.set_default_device` called by the user, tensors that must be on the CPU are still made there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from data_samples import packed, snapshot, trained
from fake_device import fake_device
from fleet import Pair, constants, filled, large, small
from torch import nn
from torch.overrides import TorchFunctionMode

from weightsync import SharedMemWeightSyncScheme, WeightStrategy
from weightsync.torchrl.transports.shared import shared_copy
from weightsync.weights.aliasing import agrees
from weightsync.weights.extra_state import decode_extras, encode_extras
from weightsync.weights.mapped import CopiedPayload
from weightsync.weights.meta_device import unshare
from weightsync.weights.packing import digest_of_weights
from weightsync.weights.reading import layout_of, read_weights
from weightsync.weights.target import Mode, Target
from weightsync.weights.tree_digest import digest
from weightsync.weights.unpacking import present


@pytest.fixture
def default_device_is_meta() -> Iterator[None]:
    """During the test, torch makes tensors on a device from which nothing can be read."""
    with torch.device("meta"):
        yield


SOURCE, OTHER = trained(1), trained(2)
LAYOUT, PAYLOAD, EXTRAS = packed(SOURCE)


@pytest.mark.usefixtures("default_device_is_meta")
def test_a_copy_of_a_payload_is_on_the_cpu() -> None:
    assert {view.device.type for view in CopiedPayload(layout_of(read_weights(OTHER))).views} == {"cpu"}


@pytest.mark.usefixtures("default_device_is_meta")
@pytest.mark.parametrize("mode", Mode)
def test_weights_are_applied_by_hand_and_digested_under_a_meta_default_device(mode: Mode) -> None:
    target = Target(OTHER, mode)

    target.apply(SOURCE)

    assert target.digest() == digest_of_weights(SOURCE) == digest(PAYLOAD, EXTRAS)


@pytest.mark.usefixtures("default_device_is_meta")
@pytest.mark.parametrize("inplace", [True, False])
def test_a_strategy_applies_weights_to_a_dict(inplace: bool) -> None:
    destination = {"a": OTHER.head.weight.detach().clone()}

    WeightStrategy("state_dict").apply_weights(destination, {"a": SOURCE.head.weight}, inplace=inplace)

    assert torch.equal(destination["a"], SOURCE.head.weight)


@pytest.mark.usefixtures("default_device_is_meta")
def test_weights_are_presented_on_the_cpu() -> None:
    found = present(LAYOUT, PAYLOAD, EXTRAS, WeightStrategy("state_dict"))

    assert digest_of_weights(found) == digest(PAYLOAD, EXTRAS)


def test_extra_state_arrives_on_the_cpu() -> None:
    given = {"module": {"full": torch.arange(3), "empty": torch.zeros(0)}}
    with torch.device("meta"):
        found: Any = decode_extras(encode_extras(given))["module"]

    assert {each.device.type for each in found.values()} == {"cpu"}
    assert torch.equal(found["full"], given["module"]["full"])


def test_overlapping_tensors_are_compared_under_a_meta_default_device() -> None:
    whole, values = torch.zeros(3), torch.tensor([1.0, 2.0, 3.0])
    with torch.device("meta"):
        assert agrees([whole[:2], whole[1:]], [values[:2], values[1:]])
        assert not agrees([whole[:2], whole[1:]], [values[:2], values[:2]])


def test_memory_that_torchrl_shares_is_on_the_cpu() -> None:
    with torch.device("meta"):
        copied = shared_copy({"a": SOURCE.head.weight})
    assert copied["a"].is_shared()

    layer = nn.Linear(2, 2).share_memory()
    before = snapshot(layer)
    with torch.device("meta"):
        assert unshare(layer.parameters())
    assert (layer.weight.is_shared(), snapshot(layer)) == (False, before)


class Counting(TorchFunctionMode):
    """A mode that counts calls: torch passes its functions through it, as through that of a default device."""

    calls = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


def test_a_sync_makes_fewer_than_50_torch_calls_for_500_tensors() -> None:
    def model(fill: float = 0.0) -> nn.Module:
        return filled(nn.ParameterList([nn.Parameter(torch.empty(3)) for _ in range(500)]), fill)

    pair = Pair(SharedMemWeightSyncScheme, model=model)
    try:
        for _ in range(3):
            pair.sync()
        with Counting() as counting:
            pair.sync()
        assert counting.calls < 50
    finally:
        pair.close()


@pytest.mark.parametrize("verify", ["auto", "digest"])
@pytest.mark.parametrize("model", [small, large])
@pytest.mark.parametrize("on_device", [True, False])
def test_versions_are_applied_under_a_meta_default_device(verify: str, model: Any, on_device: bool) -> None:
    with fake_device() if on_device else contextlib.nullcontext():
        pair = Pair(lambda: SharedMemWeightSyncScheme("state_dict", verify=verify, map_on_device=True), model=model)
        try:
            for fill in (1.0, 2.0, 3.0):
                filled(pair.source, fill)
                with torch.device("meta"):
                    assert pair.sync().ok
                assert constants(pair.model) == {fill}
        finally:
            pair.close()
