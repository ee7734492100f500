"""A trainer and a worker on two GPUs of one host, which either process may number differently."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from typing import Any

import pytest
import torch
from fleet import Crew, WorkerSetup
from skipping import skip_without_gpus
from test_gpu import contents, join_gpu, on_gpu, place, synced, trainer
from test_kernels import copied, mapped

from weightsync.weights.device.base import DeviceMemory
from weightsync.weights.device.driver import Driver

pytestmark = pytest.mark.gpu


def join_gpu_number(setup: WorkerSetup, number: int) -> None:
    torch.cuda.set_device(number)
    join_gpu(setup)


def opened_slots(setup: WorkerSetup) -> int:
    """The number of the trainer's GPU slots that the worker has opened."""
    (link,) = setup.receiver.driver._links.values()
    return sum(isinstance(each, DeviceMemory) for each in link._mapped._mappings.values())


@pytest.mark.parametrize("scheme", [mapped, copied])
@pytest.mark.parametrize("trainers_number", [0, 1])
def test_a_worker_on_another_gpu_gets_whole_versions_however_the_gpus_are_numbered(
    scheme: Any, trainers_number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.device_count() < 2:
        skip_without_gpus("A WORKER ON ANOTHER GPU", f"it needs two GPUs, and there are {torch.cuda.device_count()}")
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(reversed(gpus) if trainers_number else gpus))
    torch.cuda.set_device(0)
    crew, model = Crew(multiprocessing.get_context("spawn")), on_gpu(1.0)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(crew.end)
        (worker,) = crew.start(scheme())
        worker.do(join_gpu_number, 1 - trainers_number)
        before = worker.do(place)
        with trainer(scheme(), worker, model=model) as sender:
            for version in range(1, 6):
                synced(sender, worker, model, version, float(version))
                assert worker.do(contents) == {float(version)}
            assert worker.do(opened_slots) == (2 if Driver().reaches(1, 0) else 0)
        assert worker.do(place) == before
