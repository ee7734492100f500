"""`FakeClock`: deadlines pass only when a test moves the clock. What the clock affects, and what it does not."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillWaiting

import pytest
from clocks import advancing_clock
from fleet import PATIENCE, Pair

from weightsync import AckTimeoutError, State
from weightsync import clock as timing
from weightsync.clock import Deadline, Stopwatch, new_incarnation, wall_time
from weightsync.testing import FakeClock

#: Seconds of real time after which a call that has not returned counts as waiting.
WAITING_SECONDS = 0.1


def await_answers(pair: Pair) -> None:
    """Wait until the sender waits for answers: from then on its deadline counts."""
    while pair.sender.state is not State.AWAITING_ACK:
        time.sleep(0.001)


def test_a_send_waits_a_minute_by_default_and_not_longer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(timing.ENVIRONMENT, raising=False)
    with FakeClock() as clock, ThreadPoolExecutor(1) as beside:
        sending = beside.submit(pair.sender.send)
        await_answers(pair)
        clock.advance(59.9)
        with pytest.raises(StillWaiting):
            sending.result(WAITING_SECONDS)
        assert pair.sender.state is State.AWAITING_ACK
        clock.advance(0.1)
        with pytest.raises(AckTimeoutError):
            sending.result(PATIENCE)

    assert pair.sender.state is State.PENDING_ASYNC


def test_a_receiver_may_wait_for_hours(pair: Pair) -> None:
    with advancing_clock(7200):
        assert pair.receiver.receive(timeout=7200) is False


def test_a_receive_without_a_timeout_outlasts_any_advance_of_the_clock(pair: Pair) -> None:
    with FakeClock() as clock, ThreadPoolExecutor(1) as beside:
        receiving = beside.submit(pair.receiver.receive, None)
        clock.advance(1e9)
        with pytest.raises(StillWaiting):
            receiving.result(WAITING_SECONDS)
        pair.sender.send_async()

        assert receiving.result(PATIENCE) is True


def test_an_answer_ends_a_wait_while_the_clock_stands_still(pair: Pair) -> None:
    with FakeClock(), ThreadPoolExecutor(1) as beside:
        sending = beside.submit(pair.sender.send, timeout=1.0)
        while not pair.receiver.receive(timeout=0):
            time.sleep(0.001)
        report = sending.result(PATIENCE)

    assert report.ok
    assert (report.pack_s, report.transfer_s, report.apply_s) == (0.0, 0.0, 0.0)


def test_a_send_that_waits_for_an_outstanding_update_has_a_single_deadline(pair: Pair) -> None:
    pair.sender.send_async()
    with FakeClock() as clock, ThreadPoolExecutor(1) as beside:
        sending = beside.submit(pair.sender.send, on_pending="wait", timeout=30)
        await_answers(pair)
        clock.advance(30)
        with pytest.raises(AckTimeoutError):
            sending.result(PATIENCE)
    assert pair.sender.version == 1


def test_the_fake_clock_starts_at_the_machines_time_and_stands_still() -> None:
    before, since_the_epoch = time.monotonic(), time.time()
    with FakeClock() as clock:
        assert since_the_epoch <= wall_time() <= time.time()
        deadline, stopwatch = Deadline(10), Stopwatch()
        time.sleep(0.02)
        assert (deadline.remaining, stopwatch.seconds, deadline.passed) == (10, 0.0, False)
        clock.advance(10.5)
        assert (deadline.remaining, stopwatch.seconds, deadline.passed) == (0.0, pytest.approx(10.5), True)
        assert clock.monotonic() >= before
    assert 0 < (Deadline(10).remaining or 0) <= 10


def test_incarnations_ascend_while_the_clock_stands_still() -> None:
    with FakeClock() as clock:
        taken = [new_incarnation(0) for _ in range(100)]
        clock.advance(1)
        later = new_incarnation(0)

    assert taken == sorted(set(taken))
    assert (later - taken[-1]) >> 32 == pytest.approx(10**9, abs=10)


@pytest.mark.parametrize("seconds", [-1e-9, float("nan")])
def test_advance_refuses_to_move_the_clock_back(seconds: float) -> None:
    with FakeClock() as clock:
        at = clock.monotonic()
        with pytest.raises(ValueError, match="does not go back"):
            clock.advance(seconds)
        assert clock.monotonic() == at


def test_the_outer_clock_resumes_when_the_inner_one_ends() -> None:
    with FakeClock() as outer:
        with FakeClock() as inner:
            stopwatch = Stopwatch()
            inner.advance(5)
            assert stopwatch.seconds == pytest.approx(5)
        stopwatch = Stopwatch()
        outer.advance(2)
        assert stopwatch.seconds == pytest.approx(2)


def test_concurrent_advances_of_several_threads_add_up() -> None:
    with FakeClock() as clock:
        begun = clock.monotonic()
        threads = [threading.Thread(target=lambda: [clock.advance(1) for _ in range(1000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert clock.monotonic() - begun == pytest.approx(4000)
