"""A group that is used by several threads: one call at a time, and any thread may close the group."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import group_workers as workers
import pytest
from group_worlds import Make

from weightsync import ResultTimeoutError, StateError
from weightsync.group.calls import Calls, ClosedMeanwhile, in_one_thread
from weightsync.protocol._tables import State


class Group:
    """A group whose methods call the function that they are given."""

    def __init__(self) -> None:
        self._calls = Calls()
        self._state = State.READY

    @in_one_thread("send")
    def send(self, work: Callable[[], object] = lambda: None) -> object:
        return work()

    @in_one_thread("results")
    def take(self, work: Callable[[], object] = lambda: None) -> object:
        return work()

    def close(self) -> None:
        self._state = State.CLOSED
        self._calls.end_others()


class Busy:
    """A call of `Group.take` in another thread, which ends when the test says how."""

    def __init__(self, group: Group) -> None:
        self._entered, self._go_on = threading.Event(), Future[Callable[[], object]]()
        self._threads = ThreadPoolExecutor(1, "taker")
        self.taken = self._threads.submit(group.take, self._work)
        assert self._entered.wait(60)

    def _work(self) -> object:
        self._entered.set()
        return self._go_on.result(60)()

    def end(self, how: Callable[[], object]) -> None:
        self._go_on.set_result(how)
        self._threads.shutdown()


def fail(error: BaseException) -> object:
    raise error


def test_a_call_of_a_second_thread_is_refused_and_does_not_disturb_the_first() -> None:
    group = Group()
    busy = Busy(group)

    with pytest.raises(StateError, match=r"send\(\): thread 'taker_0' is in results\(\) of this group") as caught:
        group.send()
    busy.end(lambda: "taken")

    assert caught.value.allowed == ("close",)
    assert (busy.taken.result(60), group.send(lambda: "sent")) == ("taken", "sent")


@pytest.mark.parametrize("error", [ValueError("a pole fell"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_after_a_call_that_raised_another_thread_may_call(error: BaseException) -> None:
    group = Group()
    with pytest.raises(type(error)):
        group.send(lambda: fail(error))

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(group.send, lambda: "sent").result(60) == "sent"


def test_a_thread_may_nest_calls_as_a_signal_handler_does() -> None:
    group, sent = Group(), list[object]()
    before = signal.signal(signal.SIGUSR1, lambda *_: sent.append(group.send(lambda: "sent")))
    try:
        taken = group.take(lambda: (signal.raise_signal(signal.SIGUSR1), "taken")[1])
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert (sent, taken) == (["sent"], "taken")


def test_a_call_whose_group_another_thread_closes_raises_state_error_whatever_fails_in_it() -> None:
    for error in (ClosedMeanwhile(), ValueError("a file descriptor cannot be negative")):
        group = Group()
        busy = Busy(group)
        closing = threading.Thread(target=group.close)
        closing.start()
        while not (call := next(iter(group._calls.under_way))).closed_by:
            closing.join(0.001)
        busy.end(lambda error=error: fail(error))  # type: ignore[misc]
        closing.join(60)

        assert call.over.is_set()
        with pytest.raises(StateError, match=r"results\(\): the group has ended its workers"):
            busy.taken.result(60)


def test_a_users_error_is_raised_unchanged_if_the_same_thread_has_closed_the_group() -> None:
    group = Group()

    def close_and_fail() -> None:
        group.close()
        raise ValueError("a pole fell")

    with pytest.raises(ValueError, match="a pole fell"):
        group.send(close_and_fail)


def test_a_group_can_be_closed_while_another_thread_waits_for_results(make: Make) -> None:
    with make(workers.put_nothing) as group, ThreadPoolExecutor(1, "taker") as threads:
        waiting = threads.submit(next, group.results())
        while not group._calls.under_way and not waiting.done():
            time.sleep(0.001)
        with pytest.raises(StateError, match="thread 'taker_0' is in results"):
            group.send()
        group.close()

        with pytest.raises(StateError, match=r"results\(\): the group has ended its workers"):
            waiting.result(60)
        assert not group.processes


def test_the_trainer_sleeps_while_it_waits_for_results(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(workers.put_nothing) as group:
        looks, look = [], group._members.pump
        monkeypatch.setattr(group._members, "pump", lambda: looks.append(look()))
        with pytest.raises(ResultTimeoutError):
            next(group.results(timeout=0.3))
        group.close(timeout=0)

    assert len(looks) < 30
