"""A worker that is stopped for longer than its heartbeat allows, and the death of the store.

tests/transports/strikes has other deaths, stops and cuts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from fleet import PATIENCE, Crew, Worker, WorkerSetup, filled, large, receive, serve, serve_until_gone
from store_fleet import big, holds, meet, open_store, reach, receive_next_version

from weightsync import DistributedWeightSyncScheme, TransportError, WeightSender, WorkerLostError
from weightsync.clock import Deadline
from weightsync.protocol.report import OutcomeKind
from weightsync.transports.store.listener import _listeners


class Trainer:
    """A sender in this process, and two worker processes, of a model larger than the buffers of a socket."""

    def __init__(self, crew: Crew, store: Any) -> None:
        self.store = store
        self.source = big(1.0)
        self.scheme = DistributedWeightSyncScheme()
        self.scheme.init_on_sender("policy", store=store, num_workers=2, model=self.source)
        self.sender: WeightSender = self.scheme.get_sender()
        self.workers: list[Worker] = crew.start(None, 2)
        for index, worker in enumerate(self.workers):
            worker.do(meet, store.port, index + 1, big)
        self.send(1)

    def send(self, version: int) -> None:
        """Send a version to both workers, and wait until they have applied it."""
        for worker in self.workers:
            worker.tell(serve, version)
        assert self.sender.send(filled(self.source, float(version)), timeout=PATIENCE).ok
        for worker in self.workers:
            worker.answer()


@pytest.fixture
def two(crew: Crew, store: Any) -> Iterator[Trainer]:
    """A trainer with two workers that serve version 1 of a model of 64 MiB."""
    made = Trainer(crew, store)
    yield made
    made.scheme.close()


def test_a_stopped_worker_is_reported_lost_then_sees_its_link_closed_and_rejoins(two: Trainer) -> None:
    filled(two.source, 2.0)
    stopped, other = two.workers
    stopped.stop()
    other.tell(serve, 2)
    report = two.sender.send(timeout=PATIENCE, on_failure="report")

    assert OutcomeKind.LOST is report.outcomes[0].kind
    other.answer()

    stopped.resume()
    with pytest.raises(TransportError):
        stopped.do(receive)
    # Fault 9: half of version 2 has arrived, and none of it is visible.
    assert ("uninitialized", 1, {1.0}) == stopped.do(holds)

    stopped.tell(receive_next_version)
    two.sender.add_worker(0, (two.store, 1))
    assert 2 == stopped.answer()
    assert {2.0} == stopped.do(holds)[2]
    two.send(3)
    assert [{3.0}, {3.0}] == [worker.do(holds)[2] for worker in two.workers]


def send_repeatedly(sender: WeightSender) -> None:
    while True:
        sender.send(timeout=PATIENCE)
        time.sleep(0.2)


def test_when_the_store_dies_sender_and_receiver_lose_their_link(crew: Crew) -> None:
    host, worker = crew.start(None, 2)
    port = host.do(open_store)
    scheme = DistributedWeightSyncScheme()
    scheme.init_on_sender("policy", store=reach(port), num_workers=1, model=large(1.0))
    worker.do(meet, port, 1)
    with scheme:
        worker.tell(serve, 1)
        scheme.get_sender().send(timeout=PATIENCE)
        worker.answer()
        worker.tell(serve_until_gone)
        host.kill()

        with pytest.raises(WorkerLostError):
            send_repeatedly(scheme.get_sender())
        assert "no sender any more" in worker.answer()


def wait_until_the_listener_is_connected(_: WorkerSetup) -> None:
    """Wait until this worker's listener is connected, since the death of a store during the dialling shows later."""
    waited = Deadline(PATIENCE)
    while not any(each._client for each in _listeners._listeners):
        assert not waited.passed, "the worker's listener has no connection"
        time.sleep(0.01)


def test_a_listener_without_links_detects_the_death_of_the_store(crew: Crew) -> None:
    host, worker = crew.start(None, 2)
    worker.do(meet, host.do(open_store), 1)
    worker.do(wait_until_the_listener_is_connected)
    worker.tell(serve_until_gone)
    host.kill()

    assert "store" in worker.answer()
