"""A parameter gets other memory while another thread computes with it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from weightsync.weights.tensors import set_data

# Run in a process of its own: if the two threads wait for each other, nothing in it runs any more, not even a timeout.
PROGRAM = """
    import threading, torch
    from weightsync.weights.tensors import set_data
    parameter, memory = torch.nn.Parameter(torch.ones(4)), [torch.ones(4), torch.ones(4)]
    over = threading.Event()
    def compute():
        while not over.is_set():
            parameter.sum()
    thread = threading.Thread(target=compute)
    thread.start()
    for turn in range(300_000):
        set_data([(parameter, memory[turn % 2])])
    over.set()
    thread.join()
    assert parameter.data_ptr() == memory[1].data_ptr()
"""


def test_set_data_does_not_deadlock_with_a_thread_that_computes_with_the_parameter() -> None:
    subprocess.run([sys.executable, "-c", textwrap.dedent(PROGRAM)], timeout=100, check=True)


@pytest.mark.parametrize("trained", [True, False])
def test_set_data_changes_only_the_memory_of_a_parameter(trained: bool) -> None:
    parameter, memory = nn.Parameter(torch.zeros(2, 3), requires_grad=trained), torch.ones(2, 3)
    set_data([(parameter, memory)])
    assert (parameter.data_ptr(), parameter.requires_grad, parameter.is_leaf) == (memory.data_ptr(), trained, True)
    assert torch.equal(parameter.detach(), memory)
