"""A worker's model in the trainer's GPU memory, as after `multiprocessing` has passed it to the worker."""

from __future__ import annotations

import contextlib
import multiprocessing
from typing import Any

import pytest
import torch
from fleet import PATIENCE, constants, filled
from test_kernels import copied, mapped
from torch import nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="GPUS WERE NOT TESTED: there is no CUDA device"),
]


def lead(control: Any, scheme: Any) -> None:
    """Pass a policy on the GPU to a worker, send a version, and change the policy. Reports the weights of both."""
    context = multiprocessing.get_context("spawn")
    (pipe, theirs), (told, far) = context.Pipe(), context.Pipe()
    # The model has buffers, which are copied even if parameters move to a slot.
    model = filled(nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300)), 1.0).cuda()
    worker = context.Process(target=work, args=(far, scheme, theirs, model))
    worker.start()
    with contextlib.closing(scheme):
        scheme.init_on_sender("policy", pipes=[pipe], model=model)
        sender = scheme.get_sender()
        assert told.recv() == "joined"
        sender.send_async()
        filled(model, 2.0)
        torch.cuda.synchronize()
        told.send("go")
        sender.wait_async(timeout=PATIENCE)
        control.send((told.recv(), constants(model)))
        told.send("end")
        worker.join(PATIENCE)


def work(told: Any, scheme: Any, pipe: Any, model: nn.Module) -> None:
    scheme.init_on_worker("policy", pipe=pipe, model=model)
    told.send("joined")
    told.recv()
    scheme.get_receiver().receive(timeout=PATIENCE)
    told.send(constants(model))
    told.recv()


@pytest.mark.parametrize("scheme", [mapped, copied])
def test_g7_a_worker_that_was_passed_the_policy_on_a_gpu_does_not_undo_the_optimizers_step(scheme: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    # Use another process as the trainer: its end removes the file in which torch counts the readers of its memory.
    leader = multiprocessing.get_context("spawn").Process(target=lead, args=(theirs, scheme()))
    leader.start()
    try:
        assert ours.poll(2 * PATIENCE)
        assert ours.recv() == ({1.0}, {2.0})
        leader.join(PATIENCE)
    finally:
        leader.kill()
        leader.join()
