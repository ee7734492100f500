"""An exception that is lost on its way from one process to another."""

from __future__ import annotations


class NotUnpickled(Exception):
    """An exception that can be pickled but not unpickled, since unpickling calls it with one argument."""

    def __init__(self, reason: str, part: int) -> None:
        super().__init__(reason)
        self.part = part
