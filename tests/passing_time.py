"""Time that passes when a test says so, for deadlines that a busy machine must not decide."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from weightsync.testing import FakeClock


@contextlib.contextmanager
def a_minute_passes_once(met: Callable[[], bool]) -> Iterator[None]:
    """Inside the block time stands still until the condition is met; then a bit over a minute passes at once."""
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
