"""Deaths, stops and cuts, of workers, trainer, store and network: each is told within 5 s, and nothing is torn."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fleet import PATIENCE, Crew, Worker, constants, large, receive, serve, serve_until_gone
from store_fleet import Network, big, holds, lead, meet, open_store, start_sending, wait_until_met

from weightsync import DistributedWeightSyncScheme, TransportError, WeightSender, WorkerLostError
from weightsync.protocol.report import OutcomeKind

#: Seconds within which a death is noticed; and what a busy test machine may add.
NOTICED = 5.0
GRACE = 5.0


class Trainer:
    """A sender in this process, and its workers in theirs."""

    def __init__(self, crew: Crew, store: Any, workers: int = 1, make: Any = large) -> None:
        self.store = store
        self.source = make(1.0)
        self.scheme = DistributedWeightSyncScheme()
        self.scheme.init_on_sender("policy", store=store, num_workers=workers, model=self.source)
        self.sender: WeightSender = self.scheme.get_sender()
        self.workers: list[Worker] = crew.start(None, workers)
        for index, worker in enumerate(self.workers):
            worker.do(meet, store.port, index + 1, make)
        self.send(1)

    @property
    def worker(self) -> Worker:
        return self.workers[0]

    def send(self, version: int) -> None:
        """A whole send to all."""
        for worker in self.workers:
            worker.tell(serve, version)
        assert self.sender.send(timeout=PATIENCE).ok
        for worker in self.workers:
            worker.answer()

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for parameter in self.source.parameters():
                parameter.fill_(value)


@pytest.fixture
def trained(crew: Crew, store: Any) -> Iterator[Trainer]:
    """One worker that serves version 1."""
    made = Trainer(crew, store)
    yield made
    made.scheme.close()


@pytest.fixture
def two(crew: Crew, store: Any) -> Iterator[Trainer]:
    """Two workers that serve version 1 of a model of 64 MiB."""
    made = Trainer(crew, store, 2, big)
    yield made
    made.scheme.close()


def test_a_worker_killed_while_idle_is_noticed_by_the_next_call(trained: Trainer) -> None:
    trained.worker.kill()
    started = time.monotonic()

    with pytest.raises(WorkerLostError, match=r"dead|heartbeat"):
        trained.sender.send(timeout=PATIENCE)
    assert NOTICED + GRACE > time.monotonic() - started


def test_a_worker_killed_in_the_middle_of_a_send_is_lost_and_the_other_is_served(two: Trainer) -> None:
    two.fill(2.0)
    two.workers[0].stop()
    two.workers[1].tell(serve, 2)
    two.sender.send_async()
    two.workers[1].answer()
    two.workers[0].kill()
    started = time.monotonic()
    report = two.sender.wait_async(timeout=PATIENCE, on_failure="report")

    assert [OutcomeKind.LOST, OutcomeKind.APPLIED] == [report.outcomes[index].kind for index in (0, 1)]
    assert NOTICED + GRACE > time.monotonic() - started
    assert {2.0} == two.workers[1].do(holds)[2]


def test_a_stopped_worker_is_lost_wrongly_sees_its_link_closed_and_comes_back(two: Trainer) -> None:
    two.fill(2.0)
    stopped, other = two.workers
    stopped.stop()
    other.tell(serve, 2)
    started = time.monotonic()
    report = two.sender.send(timeout=PATIENCE, on_failure="report")

    assert OutcomeKind.LOST is report.outcomes[0].kind
    assert NOTICED + GRACE > time.monotonic() - started
    other.answer()

    stopped.resume()
    with pytest.raises(TransportError):
        stopped.do(receive)
    # Fault 9: half of version 2 has arrived there, and nothing of it shows.
    assert ("uninitialized", 1, {1.0}) == stopped.do(holds)

    stopped.tell(wait_until_met)
    two.sender.add_worker(0, (two.store, 1))
    assert 2 == stopped.answer()
    assert {2.0} == stopped.do(holds)[2]
    two.fill(3.0)
    two.send(3)
    assert [{3.0}, {3.0}] == [worker.do(holds)[2] for worker in two.workers]


def test_a_new_process_takes_a_lost_workers_place(crew: Crew, trained: Trainer) -> None:
    trained.worker.kill()
    trained.sender.send(timeout=PATIENCE, on_failure="report") if trained.sender.poll() else None
    (again,) = crew.start(None)
    again.do(meet, trained.store.port, 1)
    with contextlib.suppress(WorkerLostError):
        trained.sender.send(timeout=0)
    trained.sender.add_worker(0, (trained.store, 1))
    trained.workers = [again]

    again.tell(serve, 1)
    assert 1 <= again.answer()
    trained.fill(5.0)
    again.tell(wait_until_met)
    assert trained.sender.send(timeout=PATIENCE, on_pending="supersede").ok
    again.answer()
    assert {5.0} == again.do(holds)[2]


@pytest.mark.parametrize("how", ["cut", "fall_silent"])
def test_a_network_that_fails_ends_both_ends_waits(crew: Crew, store: Any, how: str) -> None:
    network = Network(store.port)
    scheme = DistributedWeightSyncScheme()
    scheme.init_on_sender("policy", store=store, num_workers=1, model=large(1.0))
    (worker,) = crew.start(None)
    worker.do(meet, network.port, 1)
    with scheme:
        worker.tell(serve, 1)
        scheme.get_sender().send(timeout=PATIENCE)
        worker.answer()
        worker.tell(serve_until_gone)
        getattr(network, how)()
        started = time.monotonic()

        # The link's own connection does not pass through that network: sends go on until somebody misses the store.
        with pytest.raises(WorkerLostError):
            sends_on(scheme.get_sender())
        assert NOTICED + GRACE > time.monotonic() - started
        assert "no sender any more" in worker.answer()
        assert NOTICED + GRACE > time.monotonic() - started
    worker.end()
    network.cut()


def sends_on(sender: WeightSender) -> None:
    while True:
        sender.send(timeout=PATIENCE)
        time.sleep(0.2)


def test_a_trainer_killed_ends_its_workers_waits(crew: Crew, store: Any) -> None:
    leader, worker = crew.start(None, 2)
    leader.do(lead, store.port, 1)
    worker.do(meet, store.port, 1)
    leader.do(start_sending)
    worker.do(serve, 1)
    worker.tell(serve_until_gone)
    leader.kill()
    started = time.monotonic()

    assert "version 1" in worker.answer()
    assert NOTICED + GRACE > time.monotonic() - started
    assert {1.0} == worker.do(holds)[2]


def test_a_trainer_killed_in_the_middle_of_a_send_leaves_the_old_version_whole(crew: Crew, store: Any) -> None:
    leader, worker = crew.start(None, 2)
    leader.do(lead, store.port, 1, big)
    worker.do(meet, store.port, 1, big)
    leader.do(start_sending)
    worker.do(serve, 1)
    leader.do(_settle)
    worker.stop()
    leader.do(_send_again, 2.0)
    leader.kill()
    worker.resume()

    assert "version 1" in worker.do(serve_until_gone)
    assert {1.0} == worker.do(holds)[2]


def _settle(setup: Any) -> None:
    assert setup.kept["sender"].wait_async(timeout=PATIENCE).ok


def _send_again(setup: Any, fill: float) -> None:
    with torch.no_grad():
        setup.model.weight.fill_(fill)
    setup.kept["sender"].send_async()


def test_the_death_of_the_store_ends_everything(crew: Crew) -> None:
    host, worker = crew.start(None, 2)
    port = host.do(open_store)
    scheme = DistributedWeightSyncScheme()
    scheme.init_on_sender("policy", store=_reached(port), num_workers=1, model=large(1.0))
    worker.do(meet, port, 1)
    with scheme:
        worker.tell(serve, 1)
        scheme.get_sender().send(timeout=PATIENCE)
        worker.answer()
        worker.tell(serve_until_gone)
        host.kill()
        started = time.monotonic()

        with pytest.raises(WorkerLostError):
            sends_on(scheme.get_sender())
        assert "no sender any more" in worker.answer()
        assert NOTICED + GRACE > time.monotonic() - started


def test_a_listener_without_any_link_hears_of_the_stores_death(crew: Crew) -> None:
    host, worker = crew.start(None, 2)
    worker.do(meet, host.do(open_store), 1)
    worker.tell(serve_until_gone)
    time.sleep(0.5)  # it listens by now: a store that dies while it is dialled is given up later
    host.kill()

    assert "store" in worker.answer()


def test_close_does_not_wait_for_a_worker_that_takes_nothing(two: Trainer) -> None:
    two.fill(2.0)
    for worker in two.workers:
        worker.stop()
    two.sender.send_async()
    time.sleep(0.2)
    started = time.monotonic()
    two.scheme.close()

    assert 1.0 > time.monotonic() - started
    for worker in two.workers:
        worker.resume()
        assert "sender" in worker.do(serve_until_gone)
        assert worker.do(holds)[2] in ({1.0}, {2.0})  # the version was given up, or is whole


def _reached(port: int) -> Any:
    from store_fleet import reach  # noqa: PLC0415

    return reach(port)


def test_a_send_of_small_weights_to_a_dead_worker_is_reported(trained: Trainer) -> None:
    trained.worker.kill()
    report = None
    until = time.monotonic() + NOTICED + GRACE
    while time.monotonic() < until and report is None:
        with contextlib.suppress(WorkerLostError):
            report = trained.sender.send(timeout=PATIENCE, on_failure="report")
    assert report is None or OutcomeKind.LOST is report.outcomes[0].kind
    assert constants(trained.source) == {1.0}
