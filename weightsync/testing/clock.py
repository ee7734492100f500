"""`FakeClock`: time that moves only when a test tells it to."""

from __future__ import annotations

import contextlib
import threading
from typing import Self

from weightsync import clock
from weightsync.clock import Clock

#: The machine's seconds after which a wait looks at the clock again.
LOOK = 0.005


class FakeClock(Clock):
    """Inside ``with FakeClock() as clock:`` the time of this process's senders and receivers stands still.

    Their deadlines, the seconds in their reports and their incarnations are told by it. A call that waits for a
    deadline returns or raises within milliseconds once `advance` has passed it, and not before::

        with FakeClock() as clock:
            threading.Timer(0.1, clock.advance, [60]).start()
            with pytest.raises(AckTimeoutError):
                sender.send(timeout=60)

    It begins at the machine's own time, and each incarnation is a nanosecond later than the one before. It does not
    move other processes (a worker of its own has its own time), nor what sleeps or counts by itself: the operating
    system, torch, Ray, the heartbeat and the looks of distributed links, how long a forward waits for another one.
    A deadline that outlives the block is the machine's again, as far ahead as the clock was.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._advanced = 0.0
        self._incarnations = 0
        self._started = super().monotonic(), super().time_ns()
        self._told = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._started = super().monotonic(), super().time_ns()
        self._told.enter_context(clock.told_by(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._told.close()

    def advance(self, seconds: float) -> None:
        """Let time pass, at once; from any thread.

        Raises:
            ValueError: the seconds are negative, or no number; no time has passed.
        """
        if not seconds >= 0:
            raise ValueError(f"time does not go back: {seconds!r} seconds")
        with self._lock:
            self._advanced += seconds

    def monotonic(self) -> float:
        """Seconds, which only `advance` adds to."""
        return self._started[0] + self._advanced

    def time_ns(self) -> int:
        """Nanoseconds since the epoch: `advance`'s, and one for each time that it is asked."""
        with self._lock:
            self._incarnations += 1
            return self._started[1] + round(self._advanced * 1e9) + self._incarnations

    def nap(self, left: float) -> float:
        """A few milliseconds of the machine's, however much is left of this clock's."""
        return min(left, LOOK)
