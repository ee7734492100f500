"""`check_finite=True`: the trainer refuses weights with NaN or infinite values, by name, and workers keep theirs."""

from __future__ import annotations

import math
import multiprocessing
import warnings
from typing import Any

import pytest
import torch
from fleet import PATIENCE, constants, small
from torch import nn

from weightsync import NonFiniteError
from weightsync.engine.packer import Packer
from weightsync.weights import casting
from weightsync.weights.tensors import DTYPES

NAN, INF = float("nan"), float("inf")


def test_check_finite_refuses_nan_and_inf_and_the_worker_keeps_its_version(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    source, model = small(1.0), small(0.0)
    with ours, theirs, scheme_class() as trainer, scheme_class() as worker:
        trainer.init_on_sender("policy", pipes=[ours], model=source, check_finite=True)
        worker.init_on_worker("policy", pipe=theirs, model=model)
        sender, receiver = trainer.get_sender(), worker.get_receiver()
        sender.send_async()
        receiver.receive(timeout=0)
        sender.wait_async(timeout=PATIENCE)

        with torch.no_grad():
            source[0].weight[0, :2] = torch.tensor([NAN, -INF])
            source[2].bias[1] = INF
        for send in (sender.send, sender.send_async):
            with pytest.raises(NonFiniteError, match=r"'0\.weight' \(1 NaN, 1 infinite\).*version was sent") as caught:
                send()
        assert caught.value.tensors == {"0.weight": (1, 1), "2.bias": (0, 1)}
        assert (sender.version, receiver.version, constants(model)) == (1, 1, {1.0})


def test_without_check_finite_non_finite_values_reach_the_worker(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    source, model = {"w": torch.tensor([INF])}, {"w": torch.zeros(1)}
    with ours, theirs, scheme_class() as trainer, scheme_class() as worker:
        trainer.init_on_sender("policy", pipes=[ours], model=source)
        worker.init_on_worker("policy", pipe=theirs, model=model)
        trainer.get_sender().send_async()
        assert worker.get_receiver().receive(timeout=PATIENCE)
        assert trainer.get_sender().wait_async(timeout=PATIENCE).ok

    assert model["w"].item() == INF


@pytest.mark.parametrize(
    "name", [name for name, dtype in DTYPES.items() if dtype.is_floating_point or dtype.is_complex]
)
def test_nan_is_found_in_tensors_of_every_dtype(name: str) -> None:
    warnings.simplefilter("ignore", UserWarning)  # torch warns about complex32
    weights = {
        "fine": torch.ones(3).to(DTYPES[name]),
        "empty": torch.ones(0).to(DTYPES[name]),
        "count": torch.tensor(3),
        "short": torch.tensor([7], dtype=torch.uint16),  # of which torch has no extremes
    }
    packer = Packer(finite_model_id="policy")
    packer.release_packed(packer.pack(weights))

    bad = torch.tensor([1.0, NAN]).to(DTYPES[name])
    with pytest.raises(NonFiniteError) as caught:
        packer.pack({**weights, "bad": bad})
    assert caught.value.tensors == {"bad": (1, 0)}
    packer.close()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.complex128], ids=str
)
def test_finite_values_pass_even_if_their_sum_overflows(dtype: torch.dtype) -> None:
    large = torch.full((4,), torch.finfo(dtype).max, dtype=dtype)
    packer = Packer(finite_model_id="policy")
    packer.release_packed(packer.pack({"large": large}))

    with pytest.raises(NonFiniteError) as caught:
        packer.pack({"large": large, "bad": torch.tensor([INF, -INF], dtype=dtype)})
    assert caught.value.tensors == {"bad": (0, 2)}
    packer.close()


def test_float8_is_checked_in_pieces_which_bounds_the_memory_of_the_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    check = casting._is_finite
    monkeypatch.setattr(casting, "_PIECE", 64)
    monkeypatch.setattr(casting, "_is_finite", lambda values: (sizes.append(values.numel()), check(values))[1])
    weights = torch.ones(1000)
    packer = Packer(finite_model_id="policy")
    packer.release_packed(packer.pack({"large": weights.to(torch.float8_e5m2)}))
    weights[999] = INF

    with pytest.raises(NonFiniteError) as caught:
        packer.pack({"large": weights.to(torch.float8_e5m2)})
    assert caught.value.tensors == {"large": (0, 1)}
    assert max(sizes) == 64
    packer.close()


def test_a_packer_without_check_finite_packs_nan() -> None:
    packer = Packer()
    packed = packer.pack(nn.ParameterDict({"bad": nn.Parameter(torch.tensor([NAN]))}))
    assert math.isnan(packed.buffer.view[:4].cast("f")[0])
    packer.release_packed(packed)
    packer.close()
