"""A fake clock that passes a long deadline while this thread waits for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from weightsync.testing import FakeClock

#: Real seconds after which the clock moves. By then the call under test usually waits.
SOON = 0.03
#: Real seconds after which the clock moves again, for a call that computed its deadline only after the first move.
AGAIN = 5.0


@contextlib.contextmanager
def hours(seconds: float) -> Iterator[FakeClock]:
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
