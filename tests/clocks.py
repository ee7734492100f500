"""Fake clocks that pass a long deadline while a test waits for it, so that neither the test nor a slow machine does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from weightsync.testing import FakeClock

#: Real seconds after which the clock moves. By then the call under test usually waits.
SOON = 0.03
#: Real seconds after which the clock moves again, for a call that computed its deadline only after the first move.
AGAIN = 5.0


@contextlib.contextmanager
def advancing_clock(seconds: float) -> Iterator[FakeClock]:
    """Stop the clock inside the block, but soon advance it by this many seconds; on a slow machine repeatedly."""
    over = threading.Event()

    def move() -> None:
        pause = SOON
        while not over.wait(pause):
            clock.advance(seconds)
            pause = AGAIN

    with FakeClock() as clock:
        mover = threading.Thread(target=move)
        mover.start()
        try:
            yield clock
        finally:
            over.set()
            mover.join()


@contextlib.contextmanager
def advance_a_minute_once(met: Callable[[], bool]) -> Iterator[None]:
    """Stop the clock inside the block until the condition is met, and then advance it by a little over a minute."""
    over = threading.Event()

    def advance() -> None:
        while not met():
            if over.wait(0.001):
                return
        clock.advance(61.0)

    with FakeClock() as clock:
        thread = threading.Thread(target=advance)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
