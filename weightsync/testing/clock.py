"""`FakeClock`: time that moves only when a test advances it."""

from __future__ import annotations

import contextlib
import threading
from typing import Self

from weightsync import clock
from weightsync.clock import Clock

#: Real seconds after which a wait checks the clock again.
LOOK = 0.005


class FakeClock(Clock):
    """Inside ``with FakeClock() as clock:`` time stands still for this process's senders and receivers.

    It sets their deadlines, the seconds in their reports and their incarnations. A call that waits for a deadline
    returns or raises within milliseconds once `advance` has passed it, and not before::

        with FakeClock() as clock:
            threading.Timer(0.1, clock.advance, [60]).start()
            with pytest.raises(AckTimeoutError):
                sender.send(timeout=60)

    The clock starts at the machine's time, and each incarnation is a nanosecond later than the one before. It does
    not affect other processes (a worker process has its own time), nor anything that sleeps or measures time by
    itself: the operating system, torch, Ray, the heartbeat and polling of distributed links, and how long one forward
    waits for another. A deadline that is still running when the block ends continues on the machine's clock, as far
    ahead as the fake clock was.

    The end of a `WorkerGroup` waits by this clock too: a worker that does not return holds it until the clock has been
    advanced by its timeout, from another thread. ``close(timeout=0)`` waits for no worker.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._advanced = 0.0
        self._incarnations = 0
        self._started = super().monotonic(), super().time_ns()
        self._installed = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._started = super().monotonic(), super().time_ns()
        self._installed.enter_context(clock.use_clock(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._installed.close()

    def advance(self, seconds: float) -> None:
        """Advance the time at once. May be called from any thread.

        Raises:
            ValueError: the seconds are negative or not a number; the time is unchanged.
        """
        if not seconds >= 0:
            raise ValueError(f"time does not go back: {seconds!r} seconds")
        with self._lock:
            self._advanced += seconds

    def monotonic(self) -> float:
        """Seconds that only `advance` adds to."""
        return self._started[0] + self._advanced

    def time_ns(self) -> int:
        """Nanoseconds since the epoch; each call adds one."""
        with self._lock:
            self._incarnations += 1
            return self._started[1] + round(self._advanced * 1e9) + self._incarnations

    def nap(self, left: float) -> float:
        """A few real milliseconds, however much time is left on this clock."""
        return min(left, LOOK)
