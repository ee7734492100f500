"""Workers that pass payloads on die or stop amid a payload, and their children still get it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from fleet import PATIENCE, Crew, Worker, WorkerSetup, filled, serve
from store_fleet import big, holds, meet, until

from weightsync import DistributedWeightSyncScheme, OutcomeKind, SyncReport, WeightSender
from weightsync.transports.store.heartbeat import Heartbeat
from weightsync.transports.store.stream import Stream

#: With a fan-out of 2 and five workers, the trainer sends to 0 and 2; 0 passes on to 1, and 2 to 3 and 4.
VICTIM, CHILDREN, OTHERS = 2, (3, 4), (0, 1)
PENDING = OutcomeKind.PENDING


def signals_itself_during_a_payload(setup: WorkerSetup, signum: int) -> None:
    """Make this process send itself a signal once it has read, and passed on, a part of a payload."""
    read, pieces = Stream.read_into, []

    def read_into(stream: Stream, room: memoryview) -> None:
        read(stream, room)
        pieces.append(len(room))
        if len(pieces) == 20:
            os.kill(os.getpid(), signum)

    Stream.read_into = read_into  # type: ignore[method-assign] # in the worker's process only


class Fleet:
    """A sender in this process with a fan-out of 2, and five workers that serve version 1 of a model of 64 MiB."""

    def __init__(self, crew: Crew, store: Any) -> None:
        self.store, self.source = store, big(1.0)
        self.scheme = DistributedWeightSyncScheme(fanout=2)
        self.scheme.init_on_sender("policy", store=store, num_workers=5, model=self.source)
        self.sender: WeightSender = self.scheme.get_sender()
        self.workers: list[Worker] = crew.start(None, 5)
        for index, worker in enumerate(self.workers):
            worker.do(meet, store.port, index + 1, big)
        for worker in self.workers:
            worker.tell(serve, 1)
        self.sender.await_workers(timeout=PATIENCE)
        assert self.send(1).ok
        self.answers(range(5))

    def send(self, version: int, timeout: float = PATIENCE) -> SyncReport:
        filled(self.source, float(version))
        return self.sender.send(timeout=timeout, on_failure="report")

    def send_past(self, victim: int, version: int, monkeypatch: pytest.MonkeyPatch) -> SyncReport:
        """Send a version. The victim, which has stopped, is lost only after all others have answered."""
        with monkeypatch.context() as patched:
            patched.setattr(Heartbeat, "_watch", lambda *_: None)  # no worker is lost since its heartbeat stops
            filled(self.source, float(version))
            self.sender.send_async()
            until(lambda: [out.kind for out in self.sender.poll().outcomes.values()].count(PENDING) < 2)
            assert self.sender.poll()[victim].kind is PENDING
        return self.sender.wait_async(timeout=PATIENCE, on_failure="report")

    def answers(self, workers: Any) -> None:
        for index in workers:
            self.workers[index].answer()

    def serve(self, version: int, workers: Any) -> None:
        for index in workers:
            self.workers[index].tell(serve, version)

    def values(self, workers: Any) -> list[set[float]]:
        return [self.workers[index].do(holds)[2] for index in workers]


@pytest.fixture
def fleet(crew: Crew, store: Any) -> Iterator[Fleet]:
    """A trainer and five workers that serve version 1."""
    made = Fleet(crew, store)
    yield made
    made.scheme.close()


def test_if_a_parent_is_killed_during_a_payload_only_that_parent_is_lost(fleet: Fleet) -> None:
    fleet.workers[VICTIM].do(signals_itself_during_a_payload, signal.SIGKILL)
    fleet.serve(2, range(5))
    report = fleet.send(2)

    assert {index: report[index].kind for index in range(5)} == {
        **dict.fromkeys(OTHERS + CHILDREN, OutcomeKind.APPLIED),
        VICTIM: OutcomeKind.LOST,
    }
    fleet.answers(OTHERS + CHILDREN)
    assert fleet.values(OTHERS + CHILDREN) == [{2.0}] * 4
    fleet.sender.remove_worker(VICTIM)
    fleet.serve(3, OTHERS + CHILDREN)
    assert fleet.send(3).ok
    fleet.answers(OTHERS + CHILDREN)


def test_if_a_parent_stops_during_a_payload_all_other_workers_apply_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "weightsync")
    fleet.workers[VICTIM].do(signals_itself_during_a_payload, signal.SIGSTOP)
    fleet.serve(2, range(5))
    report = fleet.send_past(VICTIM, 2, monkeypatch)

    for child in CHILDREN:
        assert f"worker {child} did not get the payload from worker {VICTIM}, which sent nothing" in caplog.text
    assert {report[index].kind for index in OTHERS + CHILDREN} == {OutcomeKind.APPLIED}
    assert report[VICTIM].kind is OutcomeKind.LOST  # since its heartbeat has stopped
    fleet.answers(OTHERS + CHILDREN)
    assert fleet.values(OTHERS + CHILDREN) == [{2.0}] * 4


def test_if_a_worker_without_children_stops_all_other_workers_apply_the_version(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.workers[CHILDREN[0]].stop()
    served = (*OTHERS, VICTIM, CHILDREN[1])
    fleet.serve(2, served)
    report = fleet.send_past(CHILDREN[0], 2, monkeypatch)

    assert {report[index].kind for index in served} == {OutcomeKind.APPLIED}
    assert report[CHILDREN[0]].kind is OutcomeKind.LOST
    fleet.answers(served)
