"""A signal inside a shield is recorded, wakes who waits, and is handed to its handler later."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import pytest

from weightsync.engine import driver
from weightsync.engine.driver import Shield

NUMBERS = (signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def handled() -> Iterator[list[tuple[int, FrameType | None]]]:
    """Signals have a handler that notes what it is given, until the block ends."""
    met: list[tuple[int, FrameType | None]] = []
    before = {number: signal.signal(number, lambda *call: met.append(call)) for number in NUMBERS}
    try:
        yield met
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_signals_wait_inside_and_are_handed_over_in_order_with_their_frames() -> None:
    woken: list[int] = []
    with handled() as met:
        handler = signal.getsignal(signal.SIGUSR1)
        with Shield(lambda: woken.append(len(woken))) as shield:
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR2)
            assert (met, woken) == ([], [0, 1])
            shield.deliver()
            assert [number for number, _ in met] == list(NUMBERS)
            signal.raise_signal(signal.SIGUSR1)
            assert len(met) == 2
        assert [number for number, _ in met] == [*NUMBERS, signal.SIGUSR1]
        assert all(isinstance(frame, FrameType) for _, frame in met)
        assert signal.getsignal(signal.SIGUSR1) is handler


def test_a_signal_without_a_handler_of_pythons_keeps_its_meaning() -> None:
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    with Shield(lambda: None):
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_in_another_thread_it_does_nothing() -> None:
    def shielded() -> bool:
        with Shield(lambda: None):
            return True

    with handled(), ThreadPoolExecutor(1) as beside:
        assert beside.submit(shielded).result() is True


def test_a_shield_that_cannot_be_raised_leaves_the_handlers_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    with handled():
        before = [signal.getsignal(number) for number in NUMBERS]
        monkeypatch.setattr(driver, "DEFERRED", (*NUMBERS, "no signal"))
        with pytest.raises(TypeError), Shield(lambda: None):
            raise AssertionError("it was raised")
        assert before == [signal.getsignal(number) for number in NUMBERS]
