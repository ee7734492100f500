"""In a forked child every inherited sender, receiver and scheme counts as a copy."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    """Something that becomes a copy in a forked child."""

    def after_fork(self) -> None:
        """Forget links and obligations, without a word to anybody."""


_known: weakref.WeakSet[Forkable] = weakref.WeakSet()


def reset_after_fork(inherited: Forkable) -> None:
    """Call ``inherited.after_fork()`` in every child that is forked while it lives."""
    _known.add(inherited)


def _in_child() -> None:
    for inherited in list(_known):
        inherited.after_fork()


os.register_at_fork(after_in_child=_in_child)
