"""What a link's writing thread has still to write."""

from __future__ import annotations

import itertools
from collections import deque

from weightsync.transports.distributed.letters import Letter


class Outgoing:
    """Letters in the order in which they leave. All its methods are called under the lock of its exchange."""

    def __init__(self) -> None:
        self._queue: deque[Letter] = deque()
        self._writing = False
        self._awaited = False
        #: Whether a letter was given up: nobody may be told that all have left.
        self.cut_short = False

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, letter: Letter) -> None:
        """One more letter."""
        self._queue.append(letter)

    def take(self) -> Letter:
        """The next letter, which is being written until `written`."""
        self._writing = True
        return self._queue.popleft()

    def written(self) -> bool:
        """The letter taken last has left; whether somebody waits for that, and all have."""
        self._writing = False
        return self._awaited and not self._queue

    def empty(self) -> bool:
        """Whether all letters have left; if not, `written` says so once they have."""
        self._awaited = bool(self._queue) or self._writing
        return not self._awaited

    def shorten(self) -> None:
        """Give up the first letter that the peer has to take from us, and all behind it, which would overtake it.

        Those before it get bytes of their own: nobody waits for them.
        """
        leaving = [each.alone() for each in itertools.takewhile(lambda letter: not letter.needs_the_peer, self._queue)]
        self.cut_short |= self._writing or len(leaving) < len(self._queue)
        self._let_go()
        self._queue.extend(leaving)

    def drop(self) -> None:
        """Give up all that has not left."""
        self.cut_short |= self._writing or bool(self._queue)
        self._let_go()

    def _let_go(self) -> None:
        for letter in self._queue:
            letter.done()
        self._queue.clear()
