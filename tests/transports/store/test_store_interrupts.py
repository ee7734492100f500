"""Interrupts, and calls from other threads, while a side starts: no thread is left that nobody can end."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn

from weightsync import DistributedWeightSyncScheme, StateError
from weightsync.schemes import distributed
from weightsync.transports.store.blocking_threads import _running

PATIENCE = 15.0


def init_sender(scheme: DistributedWeightSyncScheme, store: Any) -> None:
    scheme.init_on_sender("policy", store=store, num_workers=1, model=nn.Linear(4, 4))


def init_worker(scheme: DistributedWeightSyncScheme, store: Any) -> None:
    scheme.init_on_worker("policy", store=store, rank=1, model=nn.Linear(4, 4))


@pytest.fixture(autouse=True)
def _pythons_interrupt() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def all_threads_end() -> Callable[[], bool]:
    """A check that all threads of links, listeners and heartbeats that start from now on end."""
    others = set(_running._owners_by_thread())

    def all_end() -> bool:
        for thread in set(_running._owners_by_thread()) - others:
            thread.join(PATIENCE)
        return _running._owners_by_thread().keys() <= others

    return all_end


@pytest.mark.parametrize(
    ("begin", "which"), [*((init_sender, which) for which in (2, 4)), *((init_worker, which) for which in (1, 3))]
)
def test_an_interrupt_during_init_leaves_no_thread_and_init_can_be_repeated(
    store: Any,
    monkeypatch: pytest.MonkeyPatch,
    all_threads_end: Callable[[], bool],
    begin: Callable[[DistributedWeightSyncScheme, Any], None],
    which: int,
) -> None:
    started, start = iter(range(1, 100)), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if next(started) == which:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    scheme = DistributedWeightSyncScheme()
    with pytest.raises(KeyboardInterrupt):
        begin(scheme, store)
    monkeypatch.undo()
    begin(scheme, store)
    scheme.close()
    gc.collect()

    assert all_threads_end()


def test_a_receiver_closed_during_registration_leaves_no_listening_thread(
    store: Any, monkeypatch: pytest.MonkeyPatch, all_threads_end: Callable[[], bool]
) -> None:
    scheme, listen = DistributedWeightSyncScheme(), distributed.listen
    init_worker(scheme, store)

    def close_meanwhile(*arguments: Any) -> Any:
        scheme.close()
        return listen(*arguments)

    monkeypatch.setattr(distributed, "listen", close_meanwhile)
    with pytest.raises(StateError, match="this receiver is closed for good"):
        scheme.get_receiver().register_worker_transport((store, 1))

    assert all_threads_end()
