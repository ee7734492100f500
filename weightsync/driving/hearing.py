"""When each worker was last heard from, and since when it is connected."""

from __future__ import annotations

from weightsync.timing import Stopwatch


class Hearing:
    """What a sender remembers of when its workers spoke."""

    def __init__(self) -> None:
        self._last: dict[int, Stopwatch] = {}
        self._first: dict[int, Stopwatch] = {}

    def heard(self, worker: int, link: int) -> None:
        """A worker has just said something over a link."""
        now = self._last[worker] = Stopwatch()
        self._first.setdefault(link, now)

    def forget(self, worker: int) -> None:
        """A worker has left the roll."""
        self._last.pop(worker, None)

    def silent_for(self, worker: int) -> float | None:
        """Seconds since a worker was last heard from, over whichever link; None: it never was."""
        last = self._last.get(worker)
        return None if last is None else last.seconds

    def connected_after(self, link: int, since: Stopwatch) -> float:
        """Seconds from ``since`` until the first message over a link; until now, if there has been none."""
        first = self._first.get(link)
        return since.seconds if first is None else max(0.0, since.seconds - first.seconds)

    def closed(self, link: int) -> None:
        """A link is closed."""
        self._first.pop(link, None)
