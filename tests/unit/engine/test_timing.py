"""Timeouts, deadlines, stopwatches, and the clock that they read."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy
import pytest

from weightsync import ConfigurationError
from weightsync import clock as timing
from weightsync.clock import Clock, Deadline, Stopwatch, Timeout, new_incarnation, seconds, use_clock


class Stopped(Clock):
    """A clock that stands still until a test moves it."""

    def __init__(self, now: float) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(self.now)


@pytest.mark.parametrize(
    "timeout",
    [-1, -0.001, float("nan"), "10", True, False, b"1", [1], numpy.array([1.0, 2.0]), pytest.param(10**400, id="vast")],
    ids=repr,
)
def test_a_timeout_that_is_no_number_of_seconds_is_refused(timeout: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^timeout= is .*: give a number of seconds, 0 or more"):
        seconds(timeout)


@pytest.mark.parametrize("message", ["soon", "", "-1", "nan", "None"])
def test_an_invalid_timeout_in_the_environment_is_refused(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_TIMEOUT", message)

    with pytest.raises(
        ConfigurationError, match=rf"^the environment's WEIGHTSYNC_TIMEOUT is '{message}'.*_TIMEOUT=inf"
    ):
        seconds(Timeout.DEFAULT)


def test_an_infinite_timeout_in_the_environment_waits_without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_TIMEOUT", "inf")
    with use_clock(Stopped(100.0)):
        never = Deadline(Timeout.DEFAULT)
        assert (never.passed, never.nap) == (False, 86400.0)


def test_a_timeout_is_the_callers_else_the_environments_else_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_TIMEOUT", "0.5")
    assert (seconds(Timeout.DEFAULT), seconds(Timeout.START), seconds(7), seconds(0), seconds(None)) == (
        0.5,
        2.5,
        7.0,
        0.0,
        None,
    )
    monkeypatch.delenv("WEIGHTSYNC_TIMEOUT")
    assert (seconds(Timeout.DEFAULT), seconds(Timeout.START)) == (60.0, 300.0)


def test_a_deadline_has_the_remaining_time_and_the_time_until_the_next_check() -> None:
    clock = Stopped(100.0)
    with use_clock(clock):
        soon, far, never, stopwatch = Deadline(10), Deadline(3 * 86400), Deadline(None), Stopwatch()
        assert (soon.remaining, soon.nap, soon.passed) == (10.0, 10.0, False)
        assert (far.remaining, far.nap) == (3 * 86400.0, 86400.0)
        clock.now = 109.5
        assert (soon.remaining, soon.passed, stopwatch.seconds) == (0.5, False, 9.5)
        clock.now = 110.0
        assert (soon.remaining, soon.passed) == (0.0, True)
        clock.now = 200.0
        assert (soon.remaining, soon.nap, soon.passed) == (0.0, 0.0, True)
        assert (never.remaining, never.nap, never.passed) == (None, None, False)


def test_a_restarted_stopwatch_measures_from_its_restart() -> None:
    clock = Stopped(100.0)
    with use_clock(clock):
        stopwatch = Stopwatch()
        clock.now = 103.0
        assert (stopwatch.restart(), stopwatch.started, stopwatch.seconds) == (3.0, 103.0, 0.0)
        clock.now = 108.0
        assert (stopwatch.seconds, stopwatch.restart(), stopwatch.seconds) == (5.0, 5.0, 0.0)


def test_the_previous_clock_is_restored_after_the_block() -> None:
    shipped, outer, inner = timing._clock, Stopped(1.0), Stopped(2.0)
    with use_clock(outer):
        with contextlib.suppress(KeyError), use_clock(inner):
            assert timing._clock is inner
            raise KeyError
        assert timing._clock is outer
    assert timing._clock is shipped


def test_an_incarnation_starts_with_the_time_or_the_next_above_the_fence_and_is_unique() -> None:
    with use_clock(Stopped(5_000)):
        assert {new_incarnation(0) >> 32, new_incarnation(4_999 << 32) >> 32} == {5_000}
        assert {new_incarnation(5_000 << 32) >> 32, new_incarnation((6_000 << 32) | 0xFFFFFFFF) >> 32} == {5_001, 6_001}
        assert len({new_incarnation(0) for _ in range(8)}) == 8
        assert max(new_incarnation(0) & 0xFFFFFFFF for _ in range(64)) >= 2**31


def test_the_clock_id_is_the_boot_id_of_the_machine() -> None:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as message:
        assert timing.clock_id() == message.read().strip()
