"""The links of this process to one worker: the goodbye of one waits for the handshake of those created after it.

Calls of different links may overtake each other. Without this order, a worker that is added again could see the end of
its old link before it knows the new one, and leave.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Final
from weakref import WeakValueDictionary

from weightsync.transports.process import PerProcess

#: Done once a link's worker has answered on it, or never will.
Met = Future[None]


class _Unmet(PerProcess):
    """The links on which no answer has come yet, by worker, in the order in which they were created.

    A link that was dropped before it carried a call is none of them: no handshake will ever go over it.
    """

    def _begin(self) -> None:
        self._numbers = itertools.count()
        self._links: WeakValueDictionary[tuple[Hashable, int], Met] = WeakValueDictionary()

    def add(self, worker: Hashable, met: Met) -> int:
        """Add a link; returns its number."""
        with self._lock:
            number = next(self._numbers)
            self._links[worker, number] = met
            return number

    def after(self, worker: Hashable, number: int) -> list[Met]:
        """Those of a worker that were created after a link."""
        with self._lock:
            return [met for (whose, other), met in self._links.items() if whose == worker and other > number]

    def drop(self, worker: Hashable, number: int) -> Met | None:
        """Take a link out; None if that was done before."""
        with self._lock:
            return self._links.pop((worker, number), None)


_unmet: Final = _Unmet()


class LinkPosition:
    """A link's place among the links to its worker.

    Args:
        worker: identifies the worker and the model; None: the link has no order.
    """

    def __init__(self, worker: Hashable | None) -> None:
        self._worker = worker
        self._met = Met()
        self._number = -1 if worker is None else _unmet.add(worker, self._met)

    def met(self) -> None:
        """The worker has answered on this link, or never will."""
        met = None if self._worker is None else _unmet.drop(self._worker, self._number)
        if met is not None:
            met.set_result(None)

    @property
    def later(self) -> Sequence[Met]:
        """The links that were created after this one, and on which the worker has not answered yet."""
        return [] if self._worker is None else _unmet.after(self._worker, self._number)


def when_all_answered(links: Sequence[Met], say: Callable[[], None]) -> None:
    """Call ``say`` once the worker has answered on all these links, in the thread that learns of it last."""
    if links:
        links[0].add_done_callback(lambda _: when_all_answered(links[1:], say))
    else:
        say()
