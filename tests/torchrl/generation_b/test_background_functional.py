"""Models called with other tensors (`torch.func.functional_call`), while versions arrive in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from duo import Duo, Reader
from fleet import PATIENCE, constants, filled
from torch import Tensor, nn
from torch.func import functional_call

from weightsync.clock import Deadline
from weightsync.engine.background import LOOK_AGAIN


class Outer(nn.Module):
    """A module around the served model, which calls a function before the model."""

    def __init__(self, inner: Reader) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, before: Callable[[], Any]) -> set[float]:
        before()
        found: set[float] = self.inner()
        return found


def given(model: nn.Module, fill: float) -> dict[str, Tensor]:
    """Plain tensors filled with this number, by the names in a model's state dict."""
    return {name: torch.full_like(tensor, fill).detach() for name, tensor in model.state_dict().items()}


def until(met: Callable[[], bool]) -> None:
    """Wait until other threads make the condition true."""
    deadline = Deadline(PATIENCE)
    while not met():
        assert not deadline.passed
        threading.Event().wait(0.001)


def test_g2_a_version_is_not_swapped_into_tensors_passed_to_functional_call(
    duo: Duo, caplog: pytest.LogCaptureFixture
) -> None:
    receiver, sender = duo.receiving.get_receiver(), duo.sending.get_sender()
    assert not receiver.awaits_parameters
    mine = given(duo.model, 7.0)

    def meanwhile() -> None:
        filled(duo.source, 2.0)
        sender.send_async()
        until(lambda: receiver.awaits_parameters)  # the reader has tried: no forward of the model itself runs
        threading.Event().wait(5 * LOOK_AGAIN)  # and has tried again

    outer = Outer(duo.model)
    seen = functional_call(outer, {f"inner.{name}": tensor for name, tensor in mine.items()}, (meanwhile,))

    assert sender.wait_async(timeout=PATIENCE).ok
    assert seen == {7.0}
    assert {float(value) for tensor in mine.values() for value in tensor.flatten()} == {7.0}
    assert (constants(duo.model), receiver.version) == ({2.0}, 2)
    assert ["The version waits" in message for message in caplog.messages].count(True) == 1
    # The reader acks before it resets these.
    until(lambda: not receiver.awaits_parameters and not receiver.target().refuses_functional_calls)
    assert duo.send(3.0).ok
    assert duo.model() == {3.0}


def test_permanently_replaced_parameters_get_the_next_version(duo: Duo) -> None:
    duo.model.parts[0] = nn.Parameter(torch.zeros(64))

    assert duo.send(2.0).ok
    assert (duo.model(), constants(duo.model)) == ({2.0}, {2.0})
