"""A fake clock that a test's condition advances, so that a slow machine does not make a deadline pass."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from weightsync.testing import FakeClock


@contextlib.contextmanager
def a_minute_passes_once(met: Callable[[], bool]) -> Iterator[None]:
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
