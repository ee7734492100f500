"""A store that answers slowly, or not at all, loses no worker and delays no other connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from torch import nn
from torch.distributed import TCPStore

from weightsync import DistributedWeightSyncScheme, OutcomeKind
from weightsync.clock import Deadline, Stopwatch
from weightsync.transports.store import blocking_threads, heartbeat, link_threads
from weightsync.transports.store import store as stores
from weightsync.transports.store.store import Client

#: Seconds. Only a failing test waits this long.
PATIENCE = 30.0


def test_heartbeats_continue_while_a_slow_store_is_asked_about_many_links(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One beat for each round of questions would be too few with 60 links at 0.1 s each."""
    monkeypatch.setattr(heartbeat, "PERIOD", 0.05)
    monkeypatch.setattr(heartbeat, "_SILENCE_SECONDS", 2.0)
    lost: list[str] = []
    slow = heartbeat.Callbacks(lost.append, lost.append, lambda *_: time.sleep(0.1))
    members = [heartbeat.join(store, slow) for _ in range(60)]  # a round takes 6 s
    client, waited = Client(store), Deadline(PATIENCE)
    beats = set()
    while len(beats) < 20 and not waited.passed:
        beats.add(client.peek(f"weightsync/heartbeat/{heartbeat.process_name()}"))
        time.sleep(0.05)

    assert not waited.passed  # with one beat for each round, twenty would take two minutes
    assert not lost
    for member in members:
        member.leave()
    client.close()


@pytest.fixture
def store_answers(store: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event until which `store` answers no new connection, while torch waits without a limit."""
    goes_on, real = threading.Event(), stores._new_connection

    def connected(asked: Any, base: Any) -> Any:
        if base.port == store.port:
            goes_on.wait(PATIENCE)
        return real(asked, base)

    monkeypatch.setattr(stores, "_new_connection", connected)
    monkeypatch.setattr(blocking_threads, "_running", blocking_threads._Running())
    yield goes_on
    goes_on.set()
    blocking_threads._running.end()


def test_an_unresponsive_store_does_not_delay_connections_to_another_store(
    store: Any, store_answers: threading.Event
) -> None:
    other = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    with DistributedWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", store=store, num_workers=2, model=nn.Linear(2, 2))
        client = Client(other)
        assert not store_answers.is_set()
        client.close()


def test_a_send_over_an_unresponsive_store_reports_it_and_later_its_workers_are_lost(
    store: Any, store_answers: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "_DIAL_SECONDS", 3.0)
    with DistributedWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", store=store, num_workers=2, model=nn.Linear(2, 2))
        sender = scheme.get_sender()
        early = sender.send(timeout=0, on_failure="report")
        late = sender.wait_async(timeout=PATIENCE, on_failure="report")
        assert not store_answers.is_set()

    assert "the store has not answered this process so far" in early[0].reason
    assert {worker: late[worker].kind for worker in late} == {0: OutcomeKind.LOST, 1: OutcomeKind.LOST}
    assert "is lost with the store: the store has not answered for 3 s" in late[0].reason


def test_a_process_with_an_unresponsive_store_ends_without_waiting_for_each_thread_of_each_link(
    store: Any, store_answers: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end must not wait for each thread of each link, one after another."""
    monkeypatch.setattr(blocking_threads, "_PATIENCE", 0.2)
    monkeypatch.setattr(link_threads, "_LINGER", PATIENCE)
    waits, join = list[float | None](), threading.Thread.join

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        waits.append(timeout)
        join(thread, timeout)

    with DistributedWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", store=store, num_workers=10, model=nn.Linear(2, 2))
        scheme.get_sender().send_async()
    monkeypatch.setattr(threading.Thread, "join", joined)
    waited = Stopwatch()
    blocking_threads._running.end()

    monkeypatch.setattr(link_threads, "_LINGER", 0.0)  # the links reach the store once the event is set

    assert sum(timeout != 0.0 for timeout in waits) <= 2 * blocking_threads._MAX_HUNG
    assert waited.seconds < PATIENCE
    assert not store_answers.is_set()
