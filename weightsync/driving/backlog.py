"""How far a link may run ahead of its worker: a worker that does not read costs no more than two versions."""

from __future__ import annotations

from typing import Final

#: Updates that a link may carry unanswered: one that is being applied, one behind it.
MAX_UNANSWERED: Final = 2


class Backlog:
    """The versions that one link carries unanswered, and the newest that waits behind them.

    A version that waits and is overtaken is never sent. It was abandoned before the newer one was dispatched, so
    nobody is owed an answer for it.
    """

    def __init__(self) -> None:
        self._unanswered: set[int] = set()
        self._waiting = 0

    @property
    def waits(self) -> bool:
        """Whether a version waits here."""
        return bool(self._waiting)

    def admit(self, version: int) -> bool:
        """Whether a version may leave now; otherwise it waits, in place of an older one."""
        if len(self._unanswered) >= MAX_UNANSWERED:
            self._waiting = version
            return False
        self._unanswered.add(version)
        return True

    def answered(self, version: int) -> int:
        """The worker has answered for a version, and so for all before it; the version to be admitted now, or 0."""
        self._unanswered = {unanswered for unanswered in self._unanswered if unanswered > version}
        if len(self._unanswered) >= MAX_UNANSWERED:
            return 0
        waiting, self._waiting = self._waiting, 0
        return waiting
