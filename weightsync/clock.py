"""Timeouts, deadlines, stopwatches and incarnations. This is the only module that reads a clock."""

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
#: A rendezvous may take this many times the default timeout, because a process that imports torch starts slowly.
START_FACTOR = 5
_DAY = 86400.0
#: Numbers up to this one need no conversion.
_LONGEST: Final = 1e15


class Clock:
    """The system clock. Tests replace it with `weightsync.testing.FakeClock`."""

    #: Seconds since an arbitrary point in time. The value never decreases.
    monotonic: Callable[[], float] = staticmethod(time.monotonic)

    def time_ns(self) -> int:
        """Nanoseconds since the epoch."""
        return time.time_ns()

    #: How many real seconds to sleep before checking again, given the seconds of this clock that remain: all of them.
    nap: Callable[[float], float] = staticmethod(float)


_clock = Clock()


@contextlib.contextmanager
def use_clock(clock: Clock) -> Iterator[None]:
    """Use another clock for all of weightsync in this process, inside the block."""
    global _clock  # noqa: PLW0603 - a process has one clock
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before


class Timeout(enum.Enum):
    """The default values of ``timeout=``."""

    #: `WEIGHTSYNC_TIMEOUT` in seconds if it is set, else 60.
    DEFAULT = "default"
    #: `START_FACTOR` times the default, because workers may still be starting.
    START = "start"


def seconds(timeout: float | Timeout | None) -> float | None:
    """Convert a ``timeout=`` argument to seconds; None means no limit.

    Raises:
        ConfigurationError: it is negative or not a number, in the argument or in the environment.
    """
    if timeout is None or ((type(timeout) is float or type(timeout) is int) and 0 <= timeout <= _LONGEST):
        return timeout
    default = isinstance(timeout, Timeout)
    try:
        value: object = os.environ[ENVIRONMENT] if default else timeout
    except KeyError:
        return SECONDS * START_FACTOR if timeout is Timeout.START else SECONDS
    number = float("nan")
    if (default or isinstance(value, SupportsFloat)) and not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = float(value)  # type: ignore[arg-type]
    if not number >= 0:
        source = f"the environment's {ENVIRONMENT}" if default else "timeout="
        raise ConfigurationError(
            f"{source} is {value!r}: give a number of seconds, 0 or more. To wait without limit: timeout=None, or "
            f"{ENVIRONMENT}=inf. Nothing has changed."
        )
    return number * START_FACTOR if timeout is Timeout.START else number


class Deadline:
    """A point in monotonic time, or never.

    Args:
        timeout: as for `seconds`.
    """

    def __init__(self, timeout: float | Timeout | None) -> None:
        allowed = seconds(timeout)
        self._at = None if allowed is None else _clock.monotonic() + allowed

    @property
    def remaining(self) -> float | None:
        """Seconds left, never below 0; pass it on as another call's ``timeout=``. None means no limit."""
        return None if self._at is None else max(0.0, self._at - _clock.monotonic())

    @property
    def nap(self) -> float | None:
        """Seconds to sleep before checking this deadline again, capped for poll(2); 0 once it has passed.

        None means no limit.
        """
        if self._at is None:
            return None
        return min(_clock.nap(max(0.0, self._at - _clock.monotonic())), _DAY)

    @property
    def passed(self) -> bool:
        """Whether the deadline has passed."""
        return self._at is not None and _clock.monotonic() >= self._at


def monotonic() -> float:
    """Seconds since an arbitrary point in time. The value never decreases."""
    return _clock.monotonic()


class Stopwatch:
    """Measures the seconds since it was created, or started again."""

    def __init__(self) -> None:
        #: When it was started last, in seconds of the clock.
        self.started = _clock.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since it was started last."""
        return _clock.monotonic() - self.started

    def restart(self) -> float:
        """Start again; returns the seconds until now."""
        before, self.started = self.started, _clock.monotonic()
        return self.started - before


def wall_time() -> float:
    """Seconds since the epoch."""
    return _clock.time_ns() / 1e9


#: The greatest fence that an incarnation, of 16 bytes, can be above.
MAX_FENCE: Final = (2**96 - 1 << 32) - 1


def new_incarnation(fence: int) -> int:
    """Make an incarnation above ``fence``: nanoseconds since the epoch, then 32 random bits to avoid ties."""
    return (max(_clock.time_ns(), (fence >> 32) + 1) << 32) | secrets.randbits(32)


#: Nanoseconds of the machine's monotonic clock, which all its processes share. Traces use real time even when a test
#: replaces the clock.
now_ns: Final[Callable[[], int]] = time.monotonic_ns


def clock_id() -> str:
    """Tells clocks of `now_ns` that may be compared from others: a machine's, since its start."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
