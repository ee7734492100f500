"""Having another library take our classes as subclasses of its own, without importing it."""

from __future__ import annotations

import sys


def introduce(module: str, base: str, ours: type) -> None:
    """Register ``ours`` as a virtual subclass of an abstract class of another library, if that is imported.

    Args:
        module: the module that defines the abstract class. Not imported here.
        base: the name of the abstract class.
        ours: our class.
    """
    if module not in sys.modules:
        return
    theirs = vars(sys.modules[module]).get(base)
    if theirs is not None:  # None while the module is being imported
        theirs.register(ours)
