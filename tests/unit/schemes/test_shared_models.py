"""A worker's model in memory that other processes share, as when `multiprocessing` passes a module to a process."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from fleet import Pair, constants, filled, large, small
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef, shared_cache

from weightsync import SharedMemWeightSyncScheme
from weightsync.weights.meta_device import unshare


def passed(model: nn.Module) -> nn.Module:
    """The model that another process gets if this one is passed to it: another module in the same memory."""
    model.share_memory()
    received = small(0.0) if len(model) == len(small()) else large(0.0)
    for mine, theirs in zip((*received.parameters(), *received.buffers()), tensors(model), strict=True):
        mine.data = theirs.data
    return received


def tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


@pytest.mark.parametrize("make", [small, large])
def test_g7_a_worker_given_the_shared_policy_writes_into_neither_it_nor_other_workers(
    scheme_class: Any, make: Any
) -> None:
    policy = make(1.0)
    models = [passed(policy) for _ in range(2)]
    given = iter([policy, *models])
    with contextlib.closing(Pair(scheme_class, workers=2, model=lambda _: next(given))) as both:
        both.sender.send_async(worker_ids=[0])
        filled(policy, 2.0)  # the trainer trains on
        assert both.receivers[0].receive(timeout=0.0)
        assert both.sender.wait_async().ok

        assert (constants(policy), constants(models[0])) == ({2.0}, {1.0})
        assert both.sync().ok
        filled(policy, 3.0)
        assert [constants(model) for model in models] == [{2.0}, {2.0}]


@pytest.mark.parametrize("make", [small, large])
def test_g2_a_model_moved_to_shared_memory_serves_every_later_version(scheme_class: Any, make: Any) -> None:
    """`share_memory()` moves storages, as `queue.put(model.state_dict())` does: they are no longer views of a slot."""
    with contextlib.closing(Pair(scheme_class, model=make)) as both:
        for version in range(1, 13):
            filled(both.source, float(version))
            assert both.sync().ok
            assert (constants(both.model), both.receiver.version) == ({float(version)}, version)
            if version in (5, 6, 9):
                both.model.share_memory()
                both.source.share_memory()


@pytest.mark.parametrize("make", [small, large])
def test_a_replaced_model_keeps_its_last_weights(scheme_class: Any, make: Any) -> None:
    with contextlib.closing(Pair(scheme_class, model=make)) as both:
        for fill in (1.0, 2.0, 3.0):
            filled(both.source, fill)
            both.sync()
        before, after = both.model, make(0.0)
        parameters = list(before.parameters())

        both.receiver.register_model(after)
        for fill in (4.0, 5.0, 6.0, 7.0):
            filled(both.source, fill)
            both.sync()
            assert (constants(before), constants(after)) == ({3.0}, {fill})
        assert all(now is then for now, then in zip(before.parameters(), parameters, strict=True))
        assert not any(parameter.is_inference() for parameter in parameters)


def test_tied_parameters_of_a_replaced_model_stay_tied() -> None:
    def tied(fill: float) -> nn.Module:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        model[1].weight = nn.Parameter(model[0].weight.data)
        return filled(model, fill)

    with contextlib.closing(Pair(SharedMemWeightSyncScheme, model=tied)) as both:
        both.sync()
        before = both.model
        both.receiver.register_model(tied(0.0))
        both.sync()
        before[0].weight.data.fill_(5.0)

    assert (before[1].weight.unique().tolist(), before[0].bias.unique().tolist()) == ([5.0], [1.0])


def test_unshare_keeps_tensors_of_one_storage_together() -> None:
    flat = torch.arange(6.0).share_memory_()
    head, tail = nn.Parameter(flat[:4].view(2, 2).t()), flat[4:]

    assert unshare([head, tail])
    flat.zero_()

    assert (head.tolist(), tail.tolist()) == ([[0.0, 2.0], [1.0, 3.0]], [4.0, 5.0])
    assert head.untyped_storage().data_ptr() == tail.untyped_storage().data_ptr()
    assert not unshare([head, tail])


def test_g7_unshare_moves_device_tensors_that_were_passed_between_processes() -> None:
    """On a GPU, `is_shared()` is always true. Torch's cache tells which tensors were passed, on any kind of device."""
    flat, own = torch.empty(6, device="meta"), torch.empty(3, device="meta")
    shared_cache["a handle"] = StorageWeakRef(flat.untyped_storage())
    head, tail, before = flat[:4].view(2, 2), flat[4:], own.untyped_storage()._cdata
    try:
        assert unshare([head, tail, own])
        assert head.untyped_storage()._cdata == tail.untyped_storage()._cdata != flat.untyped_storage()._cdata
        assert (head.shape, tail.storage_offset(), own.untyped_storage()._cdata) == ((2, 2), 4, before)
        assert not unshare([head, tail, own])
    finally:
        del shared_cache["a handle"]


def test_unshare_moves_parameters_made_in_inference_mode() -> None:
    with torch.inference_mode():
        weight = nn.Linear(2, 2).share_memory().weight
    before = weight.tolist()

    assert unshare([weight])
    assert (weight.is_shared(), weight.tolist()) == (False, before)
