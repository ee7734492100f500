"""Hours that take no time: a clock that passes a deadline while this thread waits for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from weightsync.testing import FakeClock

#: The machine's seconds after which the clock moves: by then the call usually waits.
SOON = 0.03
#: The machine's seconds after which it moves again, for a call that took its deadline only after the clock had moved.
AGAIN = 5.0


@contextlib.contextmanager
def hours(seconds: float) -> Iterator[FakeClock]:
    """Inside the block time stands still, but soon that many seconds pass at once; on a slow machine, repeatedly."""
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
