"""Access to a user's context, an object of any class whose attributes are optional."""

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
    """Return the context's attribute, or MISSING if it has none of that name."""
    try:
        return getattr(context, name)
    except AttributeError:
        return MISSING


def held(context: Any) -> Callable[[], Any]:
    """Return a function that returns the context, without keeping it alive.

    A context that does not support weak references is kept alive.

    Raises (the returned function):
        ConfigurationError: the context was garbage-collected.
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
            f"the context (a {kind}) was garbage-collected, because a scheme keeps only a weak reference to it. Keep "
            "it alive while weights are sent."
        )
    return context
