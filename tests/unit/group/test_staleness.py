"""`max_staleness`: no step begins with a version that is further behind. The rules are those of tla/Group.tla."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Iterator
from itertools import islice
from multiprocessing import heap
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import group_workers as workers
import pytest
from group_worlds import PIPES, RANKS, RAY, SHARED, WORLD, Make, await_results
from torch import nn

from weightsync import OnStale, SenderClosed, StaleWeightsError, WorkerGroup
from weightsync.group.channel import Held, Released
from weightsync.group.steps import Announced, Staleness, Steps
from weightsync.group.worker import Worker


class Receiver:
    """A receiver that serves the version that a test sets."""

    def __init__(self) -> None:
        self.version: int | None = 1
        self.model: object = None
        self.staged = 0
        self.serves_here = False
        self.waited = threading.Event()
        self.go = threading.Event()

    @contextlib.contextmanager
    def serving(self) -> Iterator[int | None]:
        self.version, self.staged = self.staged or self.version, 0
        yield self.version

    def receive(self, timeout: float) -> bool:
        self.waited.set()
        return self.go.wait(timeout)


OVER_TCP = [
    pytest.param("ranks", OnStale.RAISE, marks=RANKS.marks),
    pytest.param("ray", OnStale.BLOCK, marks=RAY.marks),
]


class Trainer:
    """A trainer that has stopped the group or not, and records the worker's messages."""

    def __init__(self, stopped: bool = False) -> None:
        self.stopped = stopped
        self.heard: list[Held | Released] = []

    def mention(self, word: Held | Released) -> None:
        self.heard.append(word)

    def flush(self) -> None:
        pass


def steps_of(
    receiver: Receiver, limit: int | None, on_stale: OnStale = OnStale.RAISE, trainer: Trainer | None = None
) -> tuple[Steps, Announced]:
    announced = Announced()
    return Steps(receiver, announced, Staleness(limit, on_stale), trainer or Trainer()), announced  # type: ignore[arg-type]


def test_a_step_begins_only_if_its_version_is_within_max_staleness() -> None:
    receiver = Receiver()
    steps, announced = steps_of(receiver, limit=2)
    announced.announce(3)
    steps.begin()
    announced.announce(4)
    with pytest.raises(StaleWeightsError, match="serves version 1, which is 3 behind") as caught:
        steps.begin()
    assert (caught.value.version, caught.value.behind, caught.value.limit) == (1, 3, 2)
    receiver.staged = 2
    steps.begin()  # the version that has arrived goes live first
    announced.announce(9)
    receiver.serves_here = True  # a forward inside of a step belongs to that step
    steps.begin()


def test_results_without_any_step_are_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    for begins in (True, False):
        steps, _ = steps_of(Receiver(), None)
        for _ in range(4):
            steps.versions()
            if begins:
                steps.acts()
    [warned] = [record.getMessage() for record in caplog.records]
    assert "A step is a call of worker.model itself" in warned


def test_results_that_are_put_inside_a_step_are_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    receiver = Receiver()
    steps, _ = steps_of(receiver, None)
    channel: Any = SimpleNamespace(put=lambda *_: None)
    job: Any = SimpleNamespace(index=0, restarts=0, scheme=None)
    worker = Worker(job, receiver, steps, channel)  # type: ignore[arg-type]

    worker.put(1)
    assert caplog.records == []
    receiver.serves_here = True
    worker.put(2)
    worker.put(3)

    [warned] = [record.getMessage() for record in caplog.records]
    assert "Call put() after the block" in warned


def test_a_blocked_worker_continues_once_a_version_within_the_limit_serves() -> None:
    receiver, trainer = Receiver(), Trainer()
    steps, announced = steps_of(receiver, 0, OnStale.BLOCK, trainer)
    steps.begin()
    announced.announce(2)
    thread = threading.Thread(target=steps.begin)
    thread.start()
    assert receiver.waited.wait(60)
    assert thread.is_alive()
    assert trainer.heard == [Held()]
    receiver.version = 2
    receiver.go.set()
    thread.join(60)
    assert not thread.is_alive()
    assert trainer.heard == [Held(), Released()]


def test_a_blocked_worker_raises_sender_closed_when_the_group_is_stopped() -> None:
    steps, announced = steps_of(Receiver(), 0, OnStale.BLOCK, Trainer(stopped=True))
    announced.announce(2)
    with pytest.raises(SenderClosed, match="stopped"):
        steps.begin()


def test_a_worker_whose_wait_is_ended_by_a_signal_handler_no_longer_counts_as_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: after that, the worker's `deadline` never counted again."""
    receiver, trainer = Receiver(), Trainer()
    steps, announced = steps_of(receiver, 0, OnStale.BLOCK, trainer)
    announced.announce(2)

    def alarmed(_: float) -> NoReturn:
        raise TimeoutError

    monkeypatch.setattr(receiver, "receive", alarmed)
    with pytest.raises(TimeoutError):
        steps.begin()

    assert trainer.heard == [Held(), Released()]


def test_a_signal_handler_may_put_a_result_while_its_thread_puts_one() -> None:
    steps, handled, once = steps_of(Receiver(), None)[0], list[tuple[int, ...]](), iter([True])
    steps.acts()

    class Struck(list[int]):
        def __iter__(self) -> Iterator[int]:
            assert steps._lock.acquire(blocking=False), "the handler would wait for its own thread forever"
            steps._lock.release()
            signal.raise_signal(signal.SIGUSR1)
            return super().__iter__()

    before = signal.signal(signal.SIGUSR1, lambda *_: next(once, False) and handled.append(steps.versions()))
    steps._versions = Struck(steps._versions)
    try:
        assert (steps.versions(), handled) == ((1,), [(1,)])
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_older_announcement_does_not_lower_the_announced_version() -> None:
    _, announced = steps_of(Receiver(), None)
    announced.announce(3)
    announced.announce(2)
    assert announced.version == 3


def test_a_group_works_without_dev_shm(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some containers have no /dev/shm, or one that cannot be written to."""

    def none(*_: Any) -> str:
        raise FileNotFoundError("/dev/shm")

    monkeypatch.setattr(heap.BufferWrapper, "_heap", heap.Heap())  # a heap without free memory
    monkeypatch.setattr(heap.Arena, "_choose_dir", none)
    with make(workers.hold_a_step_and_catch_up, capacity=1, max_staleness=0) as group:
        group.wait_async()
        await_results(group)
        for _ in range(6):
            group.send_async()
        assert [result.value for result in group.results()] == ["holding", "released", 7]


def test_the_memory_of_an_announcement_is_freed_with_it() -> None:
    gc.collect()  # groups of other tests have announcements too
    before = _open_announcements()
    announced = Announced()
    assert _open_announcements() == before + 2  # the memory's own, and that of its mapping
    del announced
    gc.collect()
    assert _open_announcements() == before


def _open_announcements() -> int:
    """The number of descriptors of announcements in this process."""
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread may have closed it
            found += "weightsync-group" in os.readlink(path)
    return found


@pytest.mark.parametrize("limit", [0, None])
@pytest.mark.parametrize("make_over", [SHARED, PIPES, RANKS, RAY], indirect=True)
def test_the_newest_version_is_delivered_while_the_trainer_only_takes_results(
    make_over: Make, limit: int | None
) -> None:
    """The last versions wait in the trainer, behind two that are unanswered while the worker is inside of a step."""
    with make_over(workers.hold_a_step_and_catch_up, capacity=1, max_staleness=limit) as group:
        group.wait_async()
        await_results(group)
        for _ in range(6):
            group.send_async()
        said, results = list(islice(group.results(), 2)), [result.value for result in group.results()]

    assert [result.value for result in said] == ["holding", "released"]
    assert results == [7] if limit == 0 else results == sorted(results)  # results end once the last version serves


def test_a_version_larger_than_the_pipe_is_sent_while_the_trainer_only_takes_results(
    forkserver: ForkServerContext,
) -> None:
    """The version does not fit into a pipe, so the worker reads while the trainer writes."""
    model = nn.Linear(1 << 11, 1 << 10)
    options: Any = {"scheme": "process", "capacity": 1, "max_staleness": 0, "ctx": forkserver}
    with WorkerGroup(workers.hold_a_step_and_catch_up, model, 1, **options) as group:
        group.wait_async()
        await_results(group)
        for _ in range(6):
            group.send_async()
        assert [result.value for result in group.results()] == ["holding", "released", 7]


@pytest.mark.parametrize(
    ("make_over", "on_stale"), [(SHARED, each) for each in OnStale] + OVER_TCP, indirect=["make_over"]
)
def test_a_worker_begins_no_step_with_a_version_beyond_max_staleness(make_over: Make, on_stale: OnStale) -> None:
    """The worker holds version 1 in a step while version 2 is dispatched, which it can serve only after that step."""
    with make_over(workers.hold_a_step, capacity=1, max_staleness=0, on_stale=on_stale) as group:
        group.wait_async()
        await_results(group)  # the worker stays in its step until that result is taken
        group.send_async()
        results = [result.value for result in group.results()]

    refused = [] if on_stale is OnStale.BLOCK else [(1, 1, "stale", 1, 0)]  # unless version 2 had arrived by then
    assert results[:2] == ["holding", "released"]
    assert results[2] in [(1, 2, "stepped"), *refused]


@pytest.mark.parametrize("make_over", [RANKS], indirect=True)
def test_a_group_that_has_ended_leaves_no_hooks_on_a_ranks_model(
    make_over: Make, request: pytest.FixtureRequest
) -> None:
    """Such hooks would compare, at each forward, the model's version with the last one that the group announced."""
    with make_over(workers.act_twice, max_staleness=0) as group:
        assert [result.value for result in group.results()] == [1.0, 1.0]
    assert request.node.stash[WORLD].codes() == [0]
