"""A trainer and a worker in one process, each with its own scheme, in the second generation's API."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fleet import PATIENCE, filled
from torch import nn

from weightsync import SyncReport


class Reader(nn.Module):
    """A model whose forward reads every tensor, in two passes, and returns the values: one value means one version."""

    def __init__(self, parts: int = 24, size: int = 64) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(size)) for _ in range(parts)])
        self.register_buffer("mark", torch.zeros(size))
        self.fails: BaseException | None = None
        #: Called in the middle of each forward.
        self.meanwhile: Callable[[], Any] = lambda: None

    def forward(self) -> set[float]:
        seen = {float(part[0].detach()) for part in self.parts}
        self.meanwhile()
        if self.fails is not None:
            raise self.fails
        return seen | {float(part[-1].detach()) for part in reversed(self.parts)} | set(self.mark.tolist())


def reader(fill: float = 0.0) -> Reader:
    """A `Reader` whose every element is this number."""
    model = Reader()
    filled(model, fill)
    return model


class Duo:
    """The schemes of a trainer and a worker in this process."""

    def __init__(self, scheme_class: Any, make: Callable[[float], nn.Module] = reader, **options: Any) -> None:
        self.ours, self.theirs = multiprocessing.Pipe()
        self.source, self.model = make(1.0), make(0.0)
        self.sending, self.receiving = scheme_class(**options), scheme_class(**options)
        self.sending.init_on_sender(model_id="policy", model=self.source, pipes=[self.ours])

    def arrive(self, **given: Any) -> None:
        """Initialise the worker's side."""
        self.receiving.init_on_receiver(**{"model_id": "policy", "pipe": self.theirs, "model": self.model, **given})

    def connect(self, **given: Any) -> None:
        """Initialise the worker's side, and connect both sides."""
        self.arrive(**given)
        with beside(lambda: self.sending.connect(timeout=PATIENCE)):
            self.receiving.connect(worker_idx=0, timeout=PATIENCE)

    def send(self, fill: float, **options: Any) -> SyncReport:
        """Set all weights to this number, and send them."""
        filled(self.source, fill)
        report: SyncReport = self.sending.send(**options)
        return report

    def end(self) -> None:
        self.sending.close()
        self.receiving.shutdown()
        self.ours.close()
        self.theirs.close()


@contextlib.contextmanager
def beside(function: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run a function on another thread during the block. Its result is appended to the list; its error is raised."""
    result: list[Any] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            result.append(function())
        except BaseException as error:  # noqa: BLE001 - raised below
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield result
    finally:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    if raised:
        raise raised[0]


@pytest.fixture
def duo(scheme_class: Any) -> Iterator[Duo]:
    """A connected trainer and worker."""
    made = Duo(scheme_class)
    made.connect()
    yield made
    made.end()


__all__ = ["Duo", "Reader", "beside", "duo", "reader"]
