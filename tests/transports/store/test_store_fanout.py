"""Payloads that travel down a tree of workers over torch.distributed: who sends what to whom, and what is applied."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from fleet import PATIENCE, constants, filled, large
from torch import nn

from weightsync import DistributedWeightSyncScheme, WeightReceiver, WeightSender
from weightsync.transports.store import fetching
from weightsync.transports.store.stream import Stream

NBYTES = sum(each.nbytes for each in large().state_dict().values())


class Fleet:
    """A sender with a fan-out, and workers in this process, each with its own thread."""

    def __init__(self, store: Any, workers: int, **options: Any) -> None:
        self.source = large(1.0)
        self.models: list[nn.Module] = [large(0.0) for _ in range(workers)]
        self.scheme = DistributedWeightSyncScheme(**{"fanout": 2, **options})
        self.scheme.init_on_sender("policy", store=store, num_workers=workers, model=self.source)
        self.sender: WeightSender = self.scheme.get_sender()
        self.schemes = [DistributedWeightSyncScheme() for _ in range(workers)]
        for index, (scheme, destination) in enumerate(zip(self.schemes, self.models, strict=True)):
            scheme.init_on_worker("policy", store=store, rank=index + 1, model=destination)
        self.receivers: list[WeightReceiver] = [scheme.get_receiver() for scheme in self.schemes]
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._serve, args=(each,)) for each in self.receivers]
        for thread in self._threads:
            thread.start()
        self.sender.await_workers(timeout=PATIENCE)

    def _serve(self, receiver: WeightReceiver) -> None:
        while not self._over.is_set():
            receiver.receive(timeout=0.05)

    def send(self, value: float, **options: Any) -> Any:
        filled(self.source, value)
        return self.sender.send(timeout=PATIENCE, **options)

    def values(self) -> list[set[float]]:
        return [constants(model) for model in self.models]

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE)
        self.scheme.close()
        for scheme in self.schemes:
            scheme.close()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many bytes of payload went over links, and how many over connections between workers."""
    counted: Counter[str] = Counter()
    write, fetch = Stream._write_piece, fetching._fill

    def write_piece(stream: Stream, piece: memoryview, go_on: Any) -> None:
        counted["links"] += len(piece)
        write(stream, piece, go_on)

    monkeypatch.setattr(Stream, "_write_piece", write_piece)
    return counted


def test_the_trainer_sends_a_payload_to_two_of_eight_workers_and_all_apply_it(
    store: Any, sent: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "SILENCE", PATIENCE)
    fleet = Fleet(store, 8)
    try:
        for version in (1, 2, 3):
            sent.clear()
            assert fleet.send(float(version)).ok
            assert fleet.values() == [{float(version)}] * 8
            assert sent["links"] == 2 * NBYTES
    finally:
        fleet.close()
