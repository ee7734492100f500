"""What a forked child inherits is its parent's: it is let go of, without a trace in the parent."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Forgettable(Protocol):
    """Holds something of the operating system that a forked child must not touch."""

    def forget(self) -> None:
        """In a forked child: close this process's copies of descriptors, and nothing of the parent's."""


_inherited: WeakSet[Forgettable] = WeakSet()


def forget_after_fork(holder: Forgettable) -> None:
    """Have ``holder.forget()`` called in every child forked from this process."""
    _inherited.add(holder)


def _forget_all() -> None:
    holders = list(_inherited)
    _inherited.clear()
    for holder in holders:
        holder.forget()


os.register_at_fork(after_in_child=_forget_all)
