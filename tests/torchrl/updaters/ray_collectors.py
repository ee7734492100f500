"""Remote collectors for tests: Ray actors without weightsync."""

from __future__ import annotations

import os
import threading
from typing import Any

from unpicklable import NotUnpickled


class RemoteCollector:
    """Keeps the weights that it is given, raises, or hangs. It has two threads, so that `behave` reaches a hung one."""

    def __init__(self) -> None:
        self.given: list[Any] = []
        self.go_on = threading.Event()
        self.turn = threading.Lock()
        self.behave("take")

    def behave(self, how: str) -> None:
        """Set the behaviour: "take", "raise", "raise with parts" or "hang" (until the behaviour is set again)."""
        self.how = how
        if how == "hang":
            self.go_on.clear()
        else:
            self.go_on.set()

    # The name of this argument has changed between releases of TorchRL.
    def update_policy_weights_(self, policy_weights: Any) -> str:
        if self.how == "raise":
            # Even this error must not be taken for a failed connection.
            raise ConnectionResetError("not for me")
        if self.how == "raise with parts":
            raise NotUnpickled("not for me", 2)
        with self.turn:  # a call that hung earlier keeps its place before later ones
            assert self.go_on.wait(60)
            self.given.append(policy_weights)
        return "whatever it returns"

    def seen(self) -> list[float]:
        """The first value of each push."""
        return [float(next(iter(weights.values(True, True))).flatten()[0]) for weights in self.given]

    def last(self) -> Any:
        return self.given.pop()

    def pid(self) -> int:
        return os.getpid()
