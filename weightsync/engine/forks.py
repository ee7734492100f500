"""Forks of a process that serves models: between two versions, with no model in a slot.

A trainer fills a slot again once this process has acked a newer version, of which a forked child knows nothing.
"""

from __future__ import annotations

import os
import threading
from typing import Final, Protocol
from weakref import WeakValueDictionary, ref

from weightsync.clock import Deadline
from weightsync.transports.process import PerProcess

#: Seconds that a fork waits for swaps, and for forwards in a slot, to end. One that waits for a fork in another thread
#: never would.
FORK_PATIENCE: Final = 10.0


class Fork:
    """A fork that is under way in one thread, which alone keeps this."""


class Served(Protocol):
    """A model that versions are applied to."""

    def begin_fork(self, seconds: float | None, fork: ref[Fork]) -> None:
        """Let no version go live until `end_fork`, and have the model leave its slot on the host."""

    def end_fork(self, fork: ref[Fork]) -> None:
        """In the parent: go on."""


class _Forks(PerProcess):
    """Calls the models that this process serves before and after each fork."""

    def _begin(self) -> None:
        #: By their ids. Read and written without a lock: a signal's handler may fork in the thread that holds one.
        self._served: WeakValueDictionary[int, Served] = WeakValueDictionary()
        #: The fork of each thread that forks.
        self._forking = threading.local()

    def add(self, served: Served) -> None:
        """Call this model before and after each fork from now on, so that no version goes live during one."""
        self._served[id(served)] = served

    def _live_models(self) -> list[Served]:
        return [served for kept in self._served.valuerefs() if (served := kept()) is not None]

    def before(self) -> None:
        """Wait for swaps to end, and begin none until `after`."""
        self._forking.fork, deadline = Fork(), Deadline(FORK_PATIENCE)
        for served in self._live_models():
            served.begin_fork(deadline.remaining, ref(self._forking.fork))

    def after(self) -> None:
        """In the parent: go on."""
        for served in self._live_models():
            served.end_fork(ref(self._forking.fork))


forks: Final = _Forks()
os.register_at_fork(before=forks.before, after_in_parent=forks.after)
