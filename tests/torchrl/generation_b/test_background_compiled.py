"""Compiled models (`torch.compile`), while versions arrive in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from duo import Duo
from fleet import PATIENCE, filled
from torch import Tensor, nn

from weightsync.clock import Deadline


class Doubled(nn.Module):
    """A model that is compiled to one graph, or to two with a call between them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        self.meanwhile: Callable[[], Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.weight
        if self.meanwhile is not None:
            outside(self.meanwhile)
        return y + self.bias


@torch.compiler.disable
def outside(function: Callable[[], Any]) -> None:
    function()


@pytest.fixture
def compiled(scheme_class: Any) -> Any:
    """A connected trainer and worker, the worker's compiled model, and the list of compiled graphs."""
    torch._dynamo.reset()
    duo, graphs = Duo(scheme_class, make=lambda fill: filled(Doubled(), fill)), []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    duo.connect()
    with torch.no_grad():  # otherwise torch's compiler warns about a gradient that it reads itself
        yield duo, torch.compile(duo.model, backend=backend), graphs
    duo.end()
    torch._dynamo.reset()


def stage(duo: Duo, fill: float) -> None:
    """Send a version, and wait until it is staged. The caller keeps the model in use, so that it is not swapped."""
    filled(duo.source, fill)
    duo.sending.get_sender().send_async()
    deadline = Deadline(PATIENCE)
    while duo.receiving.get_receiver()._served.staged is None:
        assert not deadline.passed
        threading.Event().wait(0.001)


def test_forward_hooks_that_swap_versions_are_not_compiled(compiled: Any) -> None:
    duo, model, graphs = compiled
    sender, zero = duo.sending.get_sender(), torch.zeros(2)
    assert model(zero).tolist() == [2.0, 2.0]
    for fill in (2.0, 3.0, 4.0):
        with duo.receiving.get_receiver().serving():
            stage(duo, fill)
        assert model(zero).tolist() == [2 * fill, 2 * fill]
        assert sender.wait_async(timeout=PATIENCE).ok

    assert len(graphs) == 1


def test_g3_no_version_goes_live_within_a_compiled_forward(compiled: Any) -> None:
    duo, model, _ = compiled
    fills = iter([2.0, 3.0])
    duo.model.meanwhile = lambda: stage(duo, next(fills))
    for before, after in ((1.0, 2.0), (2.0, 3.0)):
        assert model(torch.zeros(2)).tolist() == [2 * before, 2 * before]
        assert duo.sending.get_sender().wait_async(timeout=PATIENCE).ok
        assert duo.model.weight.tolist() == [after, after]
