"""The serving lock: forwards share a model, a swap has it exclusively, and every holder releases it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillWaiting
from types import FrameType
from typing import Any

import pytest
from fleet import functions_called

from weightsync import ModelBusyError
from weightsync.clock import Deadline
from weightsync.engine import serving_lock
from weightsync.engine.serving_lock import ServingLock
from weightsync.testing.clock import FakeClock

PATIENCE = 30.0
#: Seconds of real time after which a call that has not returned counts as waiting.
STILL_WAITING_AFTER = 0.05


class SecondThread:
    """A second thread that makes the test's calls."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def begin(self, call: Callable[[], Any]) -> Future[Any]:
        return self._pool.submit(call)

    def does(self, call: Callable[[], Any]) -> Any:
        return self.begin(call).result(PATIENCE)

    def end(self) -> None:
        self._pool.shutdown()


@pytest.fixture
def beside() -> Iterator[SecondThread]:
    made = SecondThread()
    yield made
    made.end()


@pytest.fixture
def lock() -> ServingLock:
    return ServingLock()


def called(call: Callable[[], Any]) -> list[str]:
    """The names of the Python functions that are called during this call."""
    return [code.co_name for code in functions_called(call)]


@contextlib.contextmanager
def swapping(lock: ServingLock, timeout: float = 0.0) -> Iterator[bool]:
    """Hold the lock as a swap does, if it can be acquired within the timeout."""
    got = lock.begin_swap(timeout)
    try:
        yield got
    finally:
        if got:
            lock.end_swap()


def free(lock: ServingLock) -> bool:
    """Whether a swap could acquire the lock now."""
    with swapping(lock) as got:
        return got


def test_a_swap_with_timeout_zero_fails_until_all_nested_forwards_have_ended(
    lock: ServingLock, beside: SecondThread
) -> None:
    beside.does(lock.enter)
    beside.does(lock.enter)
    assert (free(lock), lock.serves_here(), beside.does(lock.serves_here)) == (False, False, True)
    beside.does(lock.leave)
    assert free(lock) is False
    beside.does(lock.leave)
    assert (free(lock), beside.does(lock.serves_here)) == (True, False)
    beside.does(lock.leave)  # without an enter, nothing ends
    assert free(lock) is True


def await_waiter(lock: ServingLock) -> None:
    """Wait until another thread waits for the lock."""
    while not lock._waiters:
        time.sleep(0.001)


def test_a_waiting_swap_proceeds_when_the_last_forward_ends(lock: ServingLock, beside: SecondThread) -> None:
    def swap() -> bool:
        with swapping(lock, PATIENCE) as got:
            return got

    lock.enter()
    waiting = beside.begin(swap)
    with pytest.raises(StillWaiting):
        waiting.result(STILL_WAITING_AFTER)
    lock.leave()
    assert waiting.result(PATIENCE) is True


def test_a_thread_that_serves_a_model_cannot_begin_a_swap(lock: ServingLock) -> None:
    lock.enter()
    assert free(lock) is False
    lock.leave()
    assert free(lock) is True


@pytest.mark.parametrize("hold", [swapping, lambda lock: lock.alone(Deadline(0), "ask")])
def test_a_forward_waits_for_a_thread_that_holds_the_model_exclusively(
    lock: ServingLock, beside: SecondThread, hold: Any
) -> None:
    with hold(lock):
        assert (free(lock), beside.does(lambda: free(lock))) == (False, False)
        serving = beside.begin(lock.enter)
        with pytest.raises(StillWaiting):
            serving.result(STILL_WAITING_AFTER)
        lock.enter()
        lock.leave()
    serving.result(PATIENCE)
    assert free(lock) is False
    beside.does(lock.leave)


def test_alone_ignores_forwards_of_its_own_thread_and_cannot_be_nested(lock: ServingLock, beside: SecondThread) -> None:
    lock.enter()
    with lock.alone(Deadline(0), "outer"):
        with (
            pytest.raises(ModelBusyError, match=r"^inner\(\): this thread is applying weights"),
            lock.alone(Deadline(0), "inner"),
        ):
            raise AssertionError("alone() acquired the model twice")
        assert beside.does(lambda: free(lock)) is False
        lock.leave()
        assert beside.does(lambda: free(lock)) is False
    assert beside.does(lambda: free(lock)) is True


def test_alone_raises_at_its_deadline_and_leaves_the_lock_unchanged(lock: ServingLock, beside: SecondThread) -> None:
    beside.does(lock.enter)
    with (
        pytest.raises(ModelBusyError, match=r"^apply_weights\(\): other threads used the model until the timeout"),
        lock.alone(Deadline(0.01), "apply_weights"),
    ):
        raise AssertionError("alone() acquired the model")
    beside.does(lock.leave)

    with lock.alone(Deadline(PATIENCE), "apply_weights"):
        pass
    assert free(lock) is True


def test_alone_waits_for_a_swap_and_for_forwards_of_other_threads(lock: ServingLock, beside: SecondThread) -> None:
    def alone() -> bool:
        with lock.alone(Deadline(PATIENCE), "ask"):
            return True

    lock.enter()
    asking = beside.begin(alone)
    with pytest.raises(StillWaiting):
        asking.result(STILL_WAITING_AFTER)
    lock.leave()
    assert asking.result(PATIENCE) is True
    with swapping(lock) as got:
        assert got
        asking = beside.begin(alone)
        with pytest.raises(StillWaiting):
            asking.result(STILL_WAITING_AFTER)
    assert asking.result(PATIENCE) is True


def test_a_new_forward_lets_threads_waiting_to_change_the_model_go_first(
    lock: ServingLock, beside: SecondThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_lock, "PATIENCE", PATIENCE)
    monkeypatch.setattr(serving_lock, "_PERIOD", 10 * PATIENCE)
    third, order = SecondThread(), []

    def change() -> None:
        with lock.alone(Deadline(PATIENCE), "ask"):
            order.append("changed")

    def serve() -> None:
        lock.enter()
        order.append("served")
        lock.leave()

    lock.enter()
    changing = beside.begin(change)
    await_waiter(lock)
    serving = third.begin(serve)
    with pytest.raises(StillWaiting):
        serving.result(STILL_WAITING_AFTER)
    lock.enter()  # a forward within a forward does not wait
    lock.leave()
    lock.leave()

    for each in (changing, serving):
        each.result(PATIENCE)
    assert order == ["changed", "served"]
    third.end()


def test_a_forward_waits_only_for_a_time_for_threads_waiting_to_change_the_model(
    lock: ServingLock, beside: SecondThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_lock, "PATIENCE", 0.01)
    beside.does(lock.enter)
    third = SecondThread()
    lock.queue()
    third.does(lock.enter)
    lock.leave_queue()
    third.end()


def test_forwards_give_way_as_long_as_any_thread_waits_to_change_the_model(
    lock: ServingLock, beside: SecondThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    gave_way: list[int] = []
    monkeypatch.setattr(ServingLock, "patience", lambda lock: gave_way.append(lock._queued) or 0.0)

    def forward() -> list[int]:
        gave_way.clear()
        lock.enter()
        lock.leave()
        return list(gave_way)

    lock.queue()
    lock.queue()
    assert forward() == [2]
    lock.leave_queue()
    assert forward() == [1]
    beside.does(lock.enter)
    with pytest.raises(ModelBusyError), lock.alone(Deadline(0), "apply_weights"):
        pass
    beside.does(lock.leave)
    assert forward() == [1]
    lock.leave_queue()
    assert forward() == []


class Model:
    """A served model, in a slot or not. It records the ``alone`` argument of each `leave_host_slot`."""

    def __init__(self, in_slot: bool) -> None:
        self.in_slot = in_slot
        self.left: list[bool] = []

    def leave_host_slot(self, alone: bool) -> None:
        self.left.append(alone)


@pytest.mark.parametrize("in_slot", [True, False])
@pytest.mark.parametrize("who", ["nobody", "itself", "another"])
def test_a_fork_waits_for_forwards_of_other_threads_only_if_they_may_read_a_slot(
    who: str, in_slot: bool, lock: ServingLock, beside: SecondThread
) -> None:
    model: Any = Model(in_slot)
    if who == "itself":
        lock.enter()
    elif who == "another":
        beside.does(lock.enter)

    lock.enter_to_fork(0.0, None, model)

    assert model.left == [who != "another" or not in_slot]


def test_forwards_give_way_at_the_start_of_each_period_and_a_swap_starts_a_new_period(
    lock: ServingLock, beside: SecondThread
) -> None:
    with FakeClock() as clock:
        lock.queue()
        assert lock.patience() == pytest.approx(serving_lock.PATIENCE)
        clock.advance(1.5 * serving_lock.PATIENCE)
        assert lock.patience() == 0.0
        beside.does(lock.enter)  # as a long serving block that waits for forwards in other threads
        beside.does(lock.leave)
        lock.leave_queue()
        lock.queue()  # the same version goes on waiting
        assert lock.patience() == 0.0
        clock.advance(serving_lock._PERIOD - serving_lock.PATIENCE)
        assert lock.patience() == pytest.approx(serving_lock.PATIENCE / 2)
        assert free(lock)  # the version went live
        assert lock.patience() == pytest.approx(serving_lock.PATIENCE)
        lock.leave_queue()


def test_the_entry_of_a_forward_that_has_returned_is_ignored(lock: ServingLock, beside: SecondThread) -> None:
    def forward() -> FrameType:
        frame = sys._getframe()
        lock.enter(frame)
        assert beside.does(lambda: free(lock)) is False
        return frame

    ended = forward()

    assert beside.does(lambda: free(lock)) is True
    assert not lock.serves_here()
    del ended


def test_a_serving_thread_does_not_wait_for_itself_and_a_swap_times_out(
    lock: ServingLock, beside: SecondThread
) -> None:
    beside.does(lock.enter)
    assert lock.begin_swap(0.01) is False
    beside.does(lock.leave)
    beside.does(lock.enter)
    assert beside.does(lambda: lock.begin_swap(None)) is False
    beside.does(lock.leave)

    assert free(lock) is True


def test_a_swap_that_times_out_does_not_keep_another_swap_from_being_woken() -> None:
    lock, (first, second) = ServingLock(), (SecondThread(), SecondThread())

    def swap(timeout: float) -> bool:
        with swapping(lock, timeout) as alone:
            return alone

    lock.enter()
    waits = first.begin(lambda: swap(2 * PATIENCE))
    with pytest.raises(StillWaiting):
        waits.result(STILL_WAITING_AFTER)
    assert not second.does(lambda: swap(STILL_WAITING_AFTER))
    lock.leave()

    assert waits.result(PATIENCE)
    first.end()
    second.end()


def test_the_end_of_a_forward_notifies_only_while_another_thread_waits(lock: ServingLock, beside: SecondThread) -> None:
    lock.enter()
    assert "notify_all" not in called(lock.leave)

    lock.enter()
    waits = beside.begin(lambda: lock.begin_swap(PATIENCE))
    await_waiter(lock)
    assert "notify_all" in called(lock.leave)
    assert waits.result(PATIENCE)
    lock.end_swap()

    lock.enter()
    assert "notify_all" not in called(lock.leave)


@pytest.mark.parametrize("timeout", [serving_lock.PATIENCE, 0.5, None])
def test_a_swap_waits_for_its_timeout_and_not_at_all_with_timeout_zero(
    lock: ServingLock, beside: SecondThread, timeout: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float | None] = []
    monkeypatch.setattr(lock._changed, "wait_for", lambda met, timeout: waited.append(timeout))
    beside.does(lock.enter)
    assert (free(lock), lock.begin_swap(0.0), waited) == (False, False, [])
    assert not lock.begin_swap(timeout)

    assert waited == [timeout]
