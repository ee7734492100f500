"""TorchRL's own keys in the store: written as hints for loops that wait on them, never read."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import Final

from weightsync.messages import Ack, Message, Update

#: TorchRL's words.
HINT: Final = "update_weights"
ACKED: Final = "updated"


class Mode(enum.Enum):
    """Which updates and acks are told in TorchRL's keys."""

    ALL = "all"
    NONE = "none"
    #: All but the next.
    AFTER_NEXT = "after the next"


class Hints:
    """The hints of one side. First weights are not told: a loop would take them for an update."""

    def __init__(self) -> None:
        self._mode = Mode.ALL

    def of(self, message: Message, rank: int) -> tuple[str, str] | None:
        """The key and the value that tell of a message to or from the worker of that rank; None: nothing is told."""
        if not isinstance(message, Update | Ack):
            return None
        mode, self._mode = self._mode, Mode.ALL if self._mode is Mode.AFTER_NEXT else self._mode
        if mode is not Mode.ALL:
            return None
        return (f"NODE_{rank}_in", HINT) if isinstance(message, Update) else (f"NODE_{rank}_out", ACKED)

    @contextlib.contextmanager
    def withheld(self) -> Iterator[None]:
        """Tell nothing of what is sent inside the block."""
        self._mode = Mode.NONE
        try:
            yield
        finally:
            self._mode = Mode.ALL

    def withhold_next(self) -> None:
        """Tell nothing of the next update or ack."""
        self._mode = Mode.AFTER_NEXT

    def tell(self) -> None:
        """Tell of everything."""
        self._mode = Mode.ALL
