"""The only module that reads a clock: timeouts at the API, deadlines inside, seconds in reports, incarnations."""

from __future__ import annotations

import contextlib
import enum
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, SupportsFloat

from weightsync.errors import ConfigurationError

ENVIRONMENT = "WEIGHTSYNC_TIMEOUT"
SECONDS = 60.0
#: How many times the default timeout a rendez-vous may take: a process that imports torch takes long to start.
START_FACTOR = 5
_DAY = 86400.0


class Clock:
    """The machine's clock. `weightsync.testing.FakeClock` is another, for tests."""

    def monotonic(self) -> float:
        """Seconds since some moment; never goes back."""
        return time.monotonic()

    def time_ns(self) -> int:
        """Nanoseconds since the epoch."""
        return time.time_ns()

    def nap(self, left: float) -> float:
        """How many of the machine's seconds may be slept, with ``left`` of this clock's to go, before another look."""
        return left


_clock = Clock()


@contextlib.contextmanager
def told_by(clock: Clock) -> Iterator[None]:
    """Inside the block all time of this process's weightsync is another clock's."""
    global _clock  # noqa: PLW0603 - there is one time in a process
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before


class Timeout(enum.Enum):
    """The value of ``timeout=`` that stands for the default."""

    #: `WEIGHTSYNC_TIMEOUT` in seconds if that is set, else 60.
    DEFAULT = "default"
    #: `START_FACTOR` times that: workers may still be starting.
    START = "start"


def seconds(timeout: float | Timeout | None) -> float | None:
    """The seconds that a ``timeout=`` argument means; None: for ever.

    Raises:
        ConfigurationError: it is negative or not a number, in the argument or in the environment.
    """
    if timeout is None:
        return None
    default = isinstance(timeout, Timeout)
    value: object = os.environ.get(ENVIRONMENT, SECONDS) if default else timeout
    number = float("nan")
    if (default or isinstance(value, SupportsFloat)) and not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError):
            number = float(value)  # type: ignore[arg-type]
    if not number >= 0:
        source = f"the environment's {ENVIRONMENT}" if default else "timeout="
        raise ConfigurationError(
            f"{source} is {value!r}: give a number of seconds, 0 or more (None waits for ever). Nothing has changed."
        )
    return number * START_FACTOR if timeout is Timeout.START else number


class Deadline:
    """A point in monotonic time, or never.

    Args:
        timeout: as `seconds` takes it.
    """

    def __init__(self, timeout: float | Timeout | None) -> None:
        allowed = seconds(timeout)
        self._at = None if allowed is None else _clock.monotonic() + allowed

    @property
    def remaining(self) -> float | None:
        """Seconds left, never below 0, to be handed on as another's ``timeout=``; None: for ever."""
        return None if self._at is None else max(0.0, self._at - _clock.monotonic())

    @property
    def nap(self) -> float | None:
        """Seconds to sleep before this deadline is looked at again; None: for ever. At most what poll(2) can count."""
        left = self.remaining
        return None if left is None else min(_clock.nap(left), _DAY)

    @property
    def passed(self) -> bool:
        """Whether time is up."""
        return self._at is not None and _clock.monotonic() >= self._at


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._started = _clock.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since it was made."""
        return _clock.monotonic() - self._started


def new_incarnation(fence: int) -> int:
    """An incarnation above ``fence``: nanoseconds since the epoch, then 32 random bits against ties."""
    return (max(_clock.time_ns(), (fence >> 32) + 1) << 32) | secrets.randbits(32)


#: Nanoseconds of this machine's monotonic clock, the same one in all its processes. Traces keep real time, whatever
#: clock a test puts in here later.
now_ns: Final[Callable[[], int]] = time.monotonic_ns


def clock_id() -> str:
    """Tells clocks of `now_ns` that may be compared from others: a machine's, since its start."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
