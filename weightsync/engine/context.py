"""The user's context: the object on which models, pipes and collectors are found."""

from __future__ import annotations

import enum
import weakref
from typing import Any, Final

from weightsync.errors import ConfigurationError


class Context:
    """The user's object on which models are found, or None. It is referenced weakly, if it can be."""

    def __init__(self, context: Any = None) -> None:
        self.set(context)

    def set(self, context: Any) -> None:
        """Use another object from now on, or none."""
        # One assignment: another thread may be asking.
        try:
            self._held: tuple[weakref.ref[Any] | None, Any] = weakref.ref(context), type(context).__name__
        except TypeError:  # None, or an object that cannot be referenced weakly
            self._held = None, context

    def __call__(self) -> Any:
        """The object, or None. Raises ConfigurationError: it was garbage-collected."""
        reference, kept = self._held
        if reference is None:
            return kept
        context = reference()
        if context is None:
            raise ConfigurationError(
                f"the context (a {kept}) was garbage-collected, because a scheme keeps only a weak reference to "
                "it. Keep it alive while weights are sent."
            )
        return context


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
