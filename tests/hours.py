"""Hours that take no time: a clock that passes a deadline while this thread waits for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from weightsync.testing import FakeClock

#: The machine's seconds after which the clock moves: whoever is to wait by then does.
SOON = 0.03


@contextlib.contextmanager
def hours(seconds: float) -> Iterator[FakeClock]:
    """Inside the block time stands still, but that once, soon, that many seconds pass."""
    with FakeClock() as clock:
        timer = threading.Timer(SOON, clock.advance, [seconds])
        timer.start()
        try:
            yield clock
        finally:
            timer.join()
