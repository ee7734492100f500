"""Defers signals while something must not be interrupted: a dispatch to all targets, a swap."""

from __future__ import annotations

import signal

# The functions of `signal` convert each number to an enum, which is most of what a shield would cost.
from _signal import getsignal  # type: ignore[import-not-found]
from _signal import signal as set_handler
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

#: Signals whose Python handlers may raise at any point.
DEFERRED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGALRM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class Shield:
    """Records signals instead of handling them; `deliver` and the end of the block call their handlers.

    Python runs signal handlers in the main thread only, so in any other thread this does nothing. Signals that
    have no Python handler (ignored, or the default action) act as usual.

    Args:
        wake: called when a signal is recorded, so that a blocking wait inside the block returns.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._previous: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._recorded: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> Self:
        try:
            for signum in DEFERRED:
                handler = getsignal(signum)
                if callable(handler):
                    self._previous[signum] = handler
                    set_handler(signum, self._record)
        except ValueError:  # another thread than the main one
            self._previous.clear()
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
        if self._recorded:
            self.deliver()

    def deliver(self) -> None:
        """Call the handlers of the signals recorded so far. What a handler raises is raised here."""
        while self._recorded:
            signum, frame = self._recorded.pop(0)
            self._previous[signum](signum, frame)

    def _record(self, signum: int, frame: FrameType | None) -> None:
        self._recorded.append((signum, frame))
        self._wake()

    def _restore(self) -> None:
        for signum, handler in self._previous.items():
            set_handler(signum, handler)
