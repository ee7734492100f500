"""Remote collectors for tests: Ray actors that know nothing of weightsync."""

from __future__ import annotations

import os
import threading
from typing import Any


class TwoParts(Exception):
    """An exception that can be pickled, and not unpickled: that would call it with one argument."""

    def __init__(self, reason: str, part: int) -> None:
        super().__init__(reason)
        self.part = part


class RemoteCollector:
    """Keeps what it is given, raises or hangs. Has two threads, so that its mode can be set while it is busy."""

    def __init__(self) -> None:
        self.given: list[Any] = []
        self.go_on = threading.Event()
        self.turn = threading.Lock()
        self.behave("take")

    def behave(self, how: str) -> None:
        """From now on: "take", "raise", "raise with parts" or "hang" (until it is set again)."""
        self.how = how
        if how == "hang":
            self.go_on.clear()
        else:
            self.go_on.set()

    # The reference calls this by an argument's name that has changed over time.
    def update_policy_weights_(self, policy_weights: Any) -> str:
        if self.how == "raise":
            # Even this does not look as if the connection had failed.
            raise ConnectionResetError("not for me")
        if self.how == "raise with parts":
            raise TwoParts("not for me", 2)
        with self.turn:  # one that hung before comes first, also once it goes on
            assert self.go_on.wait(60)
            self.given.append(policy_weights)
        return "whatever it returns"

    def seen(self) -> list[float]:
        """A value of each push."""
        return [float(next(iter(weights.values(True, True))).flatten()[0]) for weights in self.given]

    def last(self) -> Any:
        return self.given.pop()

    def pid(self) -> int:
        return os.getpid()
