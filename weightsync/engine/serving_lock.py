"""The lock of a served model: forwards share it, a swap holds it alone."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

from weightsync.clock import Deadline
from weightsync.errors import ModelBusyError

#: Seconds that a forward waits for those under way, so that a staged version goes live, before it runs beside them.
#: Without a bound, a forward that waits for another forward of the same model in another thread would never end.
PATIENCE: Final = 1.0


class ServingLock:
    """Shared by the threads that serve a model, which may nest; a swap holds it alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._serving: defaultdict[int, list[FrameType | None]] = defaultdict(list)
        self._swapping: int | None = None

    def enter(self, frame: FrameType | None = None) -> None:
        """Begin to serve; waits for a swap to end.

        Args:
            frame: the call that serves. If it ends without `leave`, its entry no longer counts.
        """
        own = threading.get_ident()
        with self._changed:
            if own not in self._serving:
                self._changed.wait_for(lambda: self._swapping in (None, own))
            self._serving[own].append(frame)

    def leave(self) -> None:
        """End what this thread began last, if anything."""
        own = threading.get_ident()
        with self._changed:
            entries = self._serving.get(own)
            if entries:
                entries.pop()
                if not entries:
                    del self._serving[own]
                    self._changed.notify_all()

    def mine(self) -> bool:
        """Whether this thread serves the model."""
        return threading.get_ident() in self._serving

    @contextlib.contextmanager
    def swapping(self, timeout: float | None = 0.0) -> Iterator[bool]:
        """Hold the lock alone, if nobody serves the model within ``timeout`` seconds. Yields whether that is so.

        A thread that serves the model itself does not get it.
        """
        own, got = threading.get_ident(), False
        with self._changed:
            if self._swapping != own and own not in self._serving:
                got = self._changed.wait_for(self._free, timeout)
                if got:
                    self._swapping = own
        try:
            yield got
        finally:
            if got:
                self._end()

    @contextlib.contextmanager
    def alone(self, deadline: Deadline, asked: str) -> Iterator[None]:
        """Hold the lock alone, beside what this thread itself serves. Waits for all other threads.

        Args:
            deadline: how long to wait.
            asked: the public method that was called, for the error.

        Raises:
            ModelBusyError: other threads served the model until then.
        """
        own = threading.get_ident()
        with self._changed:
            outer = self._swapping == own
            if not outer:
                self._await_free(own, deadline, asked)
                self._swapping = own
        try:
            yield
        finally:
            if not outer:
                self._end()

    def _await_free(self, own: int, deadline: Deadline, asked: str) -> None:
        while not self._changed.wait_for(lambda: self._free(besides=own), deadline.nap):
            if deadline.passed:
                raise ModelBusyError(
                    f"{asked}(): other threads served the model until time was up (a forward, or a serving() block). "
                    "Nothing has changed; call it again, or give it a longer timeout=."
                )

    def _end(self) -> None:
        with self._changed:
            self._swapping = None
            self._changed.notify_all()

    def _free(self, besides: int | None = None) -> bool:
        if self._swapping is not None:
            return False
        for thread, entries in list(self._serving.items()):
            entries[:] = [frame for frame in entries if not _over(frame)]
            if not entries:
                del self._serving[thread]
        return all(thread == besides for thread in self._serving)


def _over(frame: FrameType | None) -> bool:
    """Whether a call has ended. torch skips our hook when a KeyboardInterrupt ends a forward."""
    if frame is None:
        return False
    try:
        frame.clear()
    except RuntimeError:
        return False  # it is still running
    return True


class Hook:
    """One of the two hooks of a guarded module. In a copy of the module they do nothing."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Inert, ()


class Inert:
    """A hook of a copied module: it does nothing."""

    def __call__(self, *_: Any) -> None:
        """Do nothing."""


def calling_frame() -> FrameType:
    """The frame of the call that runs the hook."""
    return sys._getframe(2)
