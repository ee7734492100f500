"""A shield records signals, wakes the thread that waits, and passes them to their handlers later."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from weightsync.engine import driver
from weightsync.engine.driver import Shield

NUMBERS = (signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def handled() -> Iterator[list[tuple[int, FrameType | None]]]:
    """Install signal handlers that record their arguments, until the block ends."""
    met: list[tuple[int, FrameType | None]] = []
    before = {number: signal.signal(number, lambda *call: met.append(call)) for number in NUMBERS}
    try:
        yield met
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_signals_in_a_shield_are_deferred_and_delivered_in_order_with_their_frames() -> None:
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


def test_a_signal_without_a_python_handler_keeps_its_disposition() -> None:
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    with Shield(lambda: None):
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_c_handler_of_a_signal_without_a_python_handler_is_left_installed(tmp_path: Path) -> None:
    with (tmp_path / "stack").open("w+") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
        try:
            for _ in range(2):  # in the second round, an earlier shield has ended
                with Shield(lambda: None):
                    signal.raise_signal(signal.SIGUSR1)
        finally:
            faulthandler.unregister(signal.SIGUSR1)
        assert file.seek(0) == 0
        assert file.read().count("Stack (most recent call first)") == 2


def test_a_shield_outside_the_main_thread_does_nothing() -> None:
    def shielded() -> bool:
        with Shield(lambda: None):
            return True

    with handled(), ThreadPoolExecutor(1) as beside:
        assert beside.submit(shielded).result() is True


def test_a_shield_that_fails_to_start_leaves_the_handlers_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    with handled():
        before = [signal.getsignal(number) for number in NUMBERS]
        monkeypatch.setattr(driver, "DEFERRED", (*NUMBERS, "no signal"))
        with pytest.raises(TypeError), Shield(lambda: None):
            raise AssertionError("the shield was started")
        assert before == [signal.getsignal(number) for number in NUMBERS]


class HandlerError(ValueError):
    """Raised by a user's signal handler: a ValueError, as a shield in another thread gets from `signal.signal`."""


@contextlib.contextmanager
def handler_raising_at(monkeypatch: pytest.MonkeyPatch, call: int) -> Iterator[None]:
    """Raise as a signal handler would, in this call (from 1) of those by which a shield sets handlers."""
    calls, real = count(1), signal.signal

    def striking(signum: int, handler: Any) -> Any:
        if next(calls) == call:
            raise HandlerError
        return real(signum, handler)

    with monkeypatch.context() as patched:
        patched.setattr(driver, "set_handler", striking)
        yield


@pytest.mark.parametrize("call", range(1, 2 * len(NUMBERS) + 1))
def test_a_handler_that_raises_while_a_shield_starts_or_ends_leaves_all_handlers_restored(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "DEFERRED", NUMBERS)
    with handled() as met:
        before = [signal.getsignal(number) for number in NUMBERS]
        with handler_raising_at(monkeypatch, call), pytest.raises(HandlerError), Shield(lambda: None):
            signal.raise_signal(signal.SIGUSR2)

        assert before == [signal.getsignal(number) for number in NUMBERS]
        assert [number for number, _ in met] == ([signal.SIGUSR2] if call > len(NUMBERS) else [])


def raise_all() -> None:
    for number in NUMBERS:
        signal.raise_signal(number)


def test_a_signal_after_one_whose_handler_raises_is_still_delivered() -> None:
    def raising(*_: object) -> None:
        raise HandlerError

    with handled() as met:
        signal.signal(signal.SIGUSR1, raising)
        with pytest.raises(HandlerError), Shield(lambda: None):
            raise_all()

        assert [number for number, _ in met] == [signal.SIGUSR2]


def test_handlers_that_a_handler_sets_apply_inside_the_shield_and_afterwards() -> None:
    with handled() as met:
        later = signal.getsignal(signal.SIGUSR1)
        taken: list[int] = []

        def first(signum: int, _frame: FrameType | None) -> None:
            taken.append(signum)
            signal.signal(signal.SIGUSR1, later)
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)

        signal.signal(signal.SIGUSR1, first)
        with Shield(lambda: None) as shield:
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR2)
            shield.deliver()
            signal.raise_signal(signal.SIGUSR1)
            assert (taken, met) == ([signal.SIGUSR1], [])  # the second SIGUSR1 is deferred, as the first one was
        signal.raise_signal(signal.SIGUSR1)

        assert (taken, [number for number, _ in met]) == ([signal.SIGUSR1], [signal.SIGUSR1] * 2)
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
