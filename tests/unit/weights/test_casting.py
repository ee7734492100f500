"""`wire_dtype` casts wider floating tensors while they are packed, and never makes a finite value infinite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pools import statistics
from skipping import skip_without_gpus
from torch import Tensor

from weightsync import ConfigurationError, Layout, LayoutError, WireDtype
from weightsync.engine.packer import Packer
from weightsync.weights import packing
from weightsync.weights.casting import sent_layout, wire_dtype_of
from weightsync.weights.packing import digest_of, views
from weightsync.weights.reading import read_weights
from weightsync.weights.tensors import owning

HALF, BRAIN, SINGLE = WireDtype.FLOAT16, WireDtype.BFLOAT16, WireDtype.FLOAT32


@pytest.mark.parametrize("given", ["bfloat16", torch.bfloat16, WireDtype.BFLOAT16])
def test_wire_dtype_accepts_a_torch_dtype_its_name_or_a_member(given: Any) -> None:
    assert wire_dtype_of(given) is WireDtype.BFLOAT16
    assert wire_dtype_of(None) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("int8", "'int8'"),
        (torch.int8, "'int8'"),
        (torch.float64, "'float64'"),
        (torch.quint8, "'torch.quint8'"),
        ("half", "'half'"),
        (16, "16"),
    ],
)
def test_an_unsupported_wire_dtype_is_refused_with_the_choices(given: Any, said: str) -> None:
    choices = "choose one of 'float32', 'bfloat16', 'float16'"
    with pytest.raises(ConfigurationError, match=f"wire_dtype={said} is unknown: {choices}"):
        wire_dtype_of(given)


def mixed() -> dict[str, Tensor]:
    torch.manual_seed(1)
    found = {
        "wide": torch.randn(7, dtype=torch.float64),
        "strided": torch.randn(5, 3).t(),
        "scalar": torch.tensor(-0.0),
        "large": torch.randn(20_000),  # so large that its bytes are moved, if its dtype stays
        "empty": torch.empty(0, 4),
        "half": torch.randn(3).half(),
        "brain": torch.randn(9).bfloat16(),
        "tiny": torch.randn(2).to(torch.float8_e5m2),
        "count": torch.tensor(3),
        "mask": torch.tensor([True, False]),
        "phase": torch.randn(2, dtype=torch.complex64),
        "nans": torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0]),
    }
    return found


WIDER = {HALF: {"float64", "float32"}, BRAIN: {"float64", "float32"}, SINGLE: {"float64"}}


@pytest.mark.parametrize("wire_dtype", list(WireDtype))
@pytest.mark.parametrize("device", ["cpu", "the CPU as a device", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_wider_floats_are_cast_as_torch_casts_them_and_other_tensors_are_unchanged(
    wire_dtype: WireDtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        skip_without_gpus("A CAST ON A DEVICE", "no GPU; the same path was tested with the CPU as the device")
    if device == "the CPU as a device":
        monkeypatch.setattr(packing, "_on_one_device", bool)
    weights, packer = mixed(), Packer(wire_dtype=wire_dtype)
    wider, dtype = WIDER[wire_dtype], wire_dtype.value
    given = {n: t.cuda() for n, t in weights.items()} if device == "cuda" else weights
    wanted = {  # cast on the same device, since a GPU gives NaNs other bits than the CPU does
        name: (tensor.to(getattr(torch, dtype)) if str(tensor.dtype).removeprefix("torch.") in wider else tensor).cpu()
        for name, tensor in given.items()
    }
    packed = packer.pack(given)

    sent = views(packed.layout, owning(packed.buffer.view))
    found = {entry.name: tensor for entry, tensor in zip(packed.layout.entries, sent, strict=True)}
    assert {name: tensor.dtype for name, tensor in found.items()} == {n: t.dtype for n, t in wanted.items()}
    assert {name: bits(tensor) for name, tensor in found.items()} == {n: bits(t) for n, t in wanted.items()}
    assert packed.digest == digest_of(read_weights(wanted), packed.layout, b"")
    assert packed.layout == packer.layout_of(weights)
    assert packed.wire_dtype is wire_dtype
    packer.close()


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_a_cast_to_float16_halves_the_payload_and_computes_the_layout_once() -> None:
    weights = {"a": torch.randn(64, 64), "b": torch.randn(64)}
    whole, half = Packer(), Packer(wire_dtype=HALF)

    assert half.pack(weights).nbytes * 2 == whole.pack(weights).nbytes
    assert half.pack(weights).layout is half.pack(weights).layout
    layout = Layout([("a", "int64", (2,)), ("b", "bfloat16", (2,))])
    assert sent_layout(layout, BRAIN) is layout
    assert sent_layout(layout, None) is layout


@pytest.mark.parametrize(
    ("wire_dtype", "fits", "overflows"),
    [(HALF, 65519.0, 65520.0), (BRAIN, 3.38e38, 3.4e38), (SINGLE, 3.4e38, 1e39)],
)
def test_a_value_that_would_become_infinite_is_refused_by_name(
    wire_dtype: WireDtype, fits: float, overflows: float
) -> None:
    packer, given = Packer(wire_dtype=wire_dtype), mixed()
    tensor = torch.zeros(4, 4, dtype=torch.float64 if wire_dtype is SINGLE else torch.float32)
    weights = {**given, "layer.weight": tensor}
    tensor[1, 2] = fits
    packer.release_packed(packer.pack(weights))
    tensor[1, 2] = tensor[3, 3] = -overflows

    with pytest.raises(
        LayoutError, match=r"'layer.weight' has 2 values, such as -\S+, that would be sent as inf"
    ) as caught:
        packer.pack(weights)

    advice = "wire_dtype='bfloat16' has the range of float32" if wire_dtype is HALF else "bring it into range"
    assert f"wire_dtype='{wire_dtype.value}' was chosen. No version was sent: {advice}." in str(caught.value)
    assert set(caught.value.mismatched) == {"layer.weight"}
    assert statistics(packer._pool).pinned == 0
    tensor.fill_(float("inf"))
    assert packer.pack(weights).digest
    packer.close()
