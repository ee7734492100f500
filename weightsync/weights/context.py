"""What schemes read of a user's context, an object of any class: the one place where attributes are optional."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable
from typing import Any, Final

from weightsync.errors import ConfigurationError


class Missing(enum.Enum):
    """The value of an attribute that a context does not have."""

    MISSING = "missing"


MISSING: Final = Missing.MISSING


def optional(context: Any, name: str) -> Any:
    """The context's attribute, or MISSING."""
    try:
        return getattr(context, name)
    except AttributeError:
        return MISSING


def held(context: Any) -> Callable[[], Any]:
    """A function that gives the context while it lives, without keeping it alive.

    A context that cannot be referenced weakly is kept.

    Raises (the function):
        ConfigurationError: the context was collected.
    """
    if context is None:
        return lambda: None
    try:
        reference = weakref.ref(context)
    except TypeError:
        return lambda: context
    kind = type(context).__name__
    return lambda: _alive(reference(), kind)


def _alive(context: Any, kind: str) -> Any:
    if context is None:
        raise ConfigurationError(
            f"the context (a {kind}) was collected: a scheme holds it weakly. Keep it alive while weights are sent."
        )
    return context
