"""`wire_dtype`: float32 in the trainer, a narrower dtype on the way and in the workers, agreed on by both ends."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from fleet import Pair, small
from msgspec.structs import replace
from torch import nn

from weightsync import (
    LayoutError,
    MultiProcessWeightSyncScheme,
    OutcomeKind,
    RefusedError,
    SharedMemWeightSyncScheme,
    State,
    WireDtype,
)
from weightsync.protocol.report_codec import decode_report, encode_report


class ModuleWithExtraState(nn.Module):
    """A module with extra state."""

    def get_extra_state(self) -> int:
        return 5

    def set_extra_state(self, state: int) -> None:
        raise NotImplementedError


def narrow(fill: float) -> nn.Module:
    """A model of float32 for the trainer, or of bfloat16 for a worker."""
    return small(fill) if fill else small(fill).bfloat16()


@pytest.fixture(params=[MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme])
def one(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(partial(request.param, wire_dtype="bfloat16"), model=narrow)
    yield pair
    pair.close()


def cast(weights: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in weights.items()}


def test_the_worker_holds_the_cast_weights_and_the_report_names_the_wire_dtype(one: Pair) -> None:
    nn.init.normal_(one.source[0].weight)
    report = one.sync()

    assert (report.ok, report.wire_dtype) == (True, WireDtype.BFLOAT16)
    assert f"{report.nbytes} bytes (bfloat16) in" in str(report)
    assert one.model[0].weight.dtype == torch.bfloat16
    assert torch.equal(one.model[0].weight, one.source[0].weight.bfloat16())
    assert one.receiver.digest() == one.sender.digest()
    assert one.source[0].weight.dtype == torch.float32
    assert decode_report(encode_report(report)) == replace(report, previous=None)


def test_weights_of_any_wider_dtype_match_the_registered_model(one: Pair) -> None:
    one.sync()

    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert one.sync(cast(one.source.state_dict(), dtype)).ok
    with pytest.raises(LayoutError, match=r"dtype float16, expected bfloat16.*give the scheme a wire_dtype"):
        one.sender.send(cast(one.source.state_dict(), torch.float16))


def test_without_a_registered_model_the_trainer_refuses_dtypes_that_were_not_agreed(one: Pair) -> None:
    one.scheme.model = None
    assert one.sync(one.source.state_dict()).ok

    with pytest.raises(
        LayoutError, match=r"other dtypes: .*dtype float16, expected bfloat16.*No version was sent"
    ) as caught:
        one.sender.send(cast(one.source.state_dict(), torch.float16))

    assert "wire_dtype='bfloat16' casts wider floating tensors only. No version was sent." in str(caught.value)
    assert (one.sender.version, one.sender.state) == (1, State.READY)
    assert one.sync(one.source.state_dict()).version == 2


def test_a_worker_whose_new_model_has_another_dtype_refuses_versions_and_stays_connected(one: Pair) -> None:
    one.sync()
    one.receiver.register_model(small(5.0))
    with pytest.raises(RefusedError) as caught:
        one.sync()

    outcome = caught.value.report[0]
    assert outcome.kind is OutcomeKind.REFUSED
    assert "'0.bias', '0.weight'" in outcome.reason
    assert "dtype bfloat16, expected float32" in outcome.reason
    assert "wire_dtype='float32', or cast the worker's model with model.to(torch.bfloat16)" in outcome.reason
    one.receiver.register_model(small(5.0).bfloat16())
    assert one.sync().ok


def test_a_value_that_overflows_the_wire_dtype_raises_before_any_send() -> None:
    pair = Pair(partial(MultiProcessWeightSyncScheme, wire_dtype=torch.float16), model=lambda f: small(f).half())
    pair.scheme.model = source = small(1.0)
    pair.sync()
    with torch.no_grad():
        source[0].weight[0, 0] = 70_000.0
    with pytest.raises(LayoutError, match=r"'0.weight' has 1 value, such as 70000, that would be sent as inf"):
        pair.sender.send()

    assert (pair.sender.version, pair.receiver.version) == (1, 1)
    with torch.no_grad():
        source[0].weight[0, 0] = 60_000.0
    assert pair.sync().version == 2
    pair.close()


@pytest.mark.parametrize("duplicate", [copy.copy, lambda scheme: pickle.loads(pickle.dumps(scheme))])
def test_a_copy_of_a_scheme_keeps_its_wire_dtype(duplicate: Any) -> None:
    scheme = duplicate(MultiProcessWeightSyncScheme(wire_dtype="float16"))

    assert scheme.wire_dtype is scheme.packer.wire_dtype is WireDtype.FLOAT16
    assert MultiProcessWeightSyncScheme().wire_dtype is None


@pytest.mark.parametrize("names", [None, "0.*"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_target_may_have_the_models_dtypes_or_the_wire_dtype(dtype: torch.dtype, names: str | None) -> None:
    model = small(1.0).append(ModuleWithExtraState())
    nn.init.normal_(model[0].weight)
    state = model.state_dict()
    count = state.pop("3._extra_state")
    copied: dict[str, Any] = {name: torch.zeros_like(each) for name, each in cast(state, dtype).items()}
    copied["3._extra_state"] = 0
    ours, theirs = multiprocessing.Pipe()
    scheme = SharedMemWeightSyncScheme({"policy": copied}, wire_dtype="bfloat16")
    chosen = {} if names is None else {"names": names}
    with theirs, scheme:
        scheme.init_on_sender("policy", pipes=[ours], model=model, **chosen)
        scheme.get_sender().send_async()

        assert copied.pop("3._extra_state") == (count if names is None else 0)
        expected = cast(state, dtype)
        for name, tensor in copied.items():
            sent = names is None or name.startswith("0.")
            assert torch.equal(tensor, expected[name] if sent else torch.zeros_like(tensor))
        assert copied["0.weight"].dtype == dtype
