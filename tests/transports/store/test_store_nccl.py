"""Payloads over NCCL, between a trainer and a worker with a GPU each."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from fleet import PATIENCE, Crew, WorkerSetup, constants, large
from skipping import skip_without_gpus
from store_fleet import reach

from weightsync import ConfigurationError, DistributedWeightSyncScheme

GPUS = torch.cuda.device_count()


@pytest.mark.gpu
@pytest.mark.parametrize("sync", [True, False])
def test_weights_sent_over_nccl_are_applied(crew: Crew, store: Any, sync: bool) -> None:
    if GPUS < 2:
        skip_without_gpus("NCCL", f"it needs a GPU for each of two ranks, and there are {GPUS}")
    torch.cuda.set_device(0)
    (worker,) = crew.start(None)
    worker.do(meet_on_gpu, store.port, sync)
    worker.tell(serve_on_gpu)
    scheme = DistributedWeightSyncScheme("nccl", sync)
    scheme.init_on_sender("policy", store=store, num_workers=1, model=large(3.0).cuda())
    with contextlib.closing(scheme):
        assert scheme.get_sender().send(timeout=PATIENCE).ok
    assert {3.0} == worker.answer()


def test_constructing_an_nccl_scheme_without_a_gpu_raises_configuration_error() -> None:
    if GPUS:
        pytest.skip("THE ERROR OF NCCL WITHOUT A GPU WAS NOT TESTED: this machine has a GPU")
    with pytest.raises(ConfigurationError, match="nccl"):
        DistributedWeightSyncScheme("nccl")


def meet_on_gpu(setup: WorkerSetup, port: int, sync: bool) -> None:
    torch.cuda.set_device(1)
    setup.model = large().cuda()
    setup.kept["store"] = reach(port)
    setup.scheme = DistributedWeightSyncScheme("nccl", sync)
    setup.scheme.init_on_worker("policy", store=setup.kept["store"], rank=1, model=setup.model)
    setup.receiver = setup.scheme.get_receiver()


def serve_on_gpu(setup: WorkerSetup) -> set[float]:
    assert setup.receiver.receive(timeout=PATIENCE)
    return constants(setup.model.cpu())
