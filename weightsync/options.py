"""What a caller may choose by keyword; each option may be given as its name."""

from __future__ import annotations

import enum
from typing import TypeVar

from weightsync.errors import ConfigurationError


class OnFailure(enum.Enum):
    """What a blocking call does when a worker failed."""

    #: Raise the exception that carries the report, after all others have been served.
    RAISE = "raise"
    #: Return the report.
    REPORT = "report"


class OnPending(enum.Enum):
    """What a send does when an update is outstanding."""

    #: StateError.
    RAISE = "raise"
    #: Wait for it first, within the same timeout; what it raises is raised.
    WAIT = "wait"
    #: Abandon it and send the newer one.
    SUPERSEDE = "supersede"


class Verify(enum.Enum):
    """What a receiver compares before it applies a version; layout and length always."""

    #: The xxh3-128 digest of all that arrived, too.
    DIGEST = "digest"
    #: Nothing else.
    LAYOUT = "layout"


Option = TypeVar("Option", bound=enum.Enum)


def option(kind: type[Option], value: Option | str) -> Option:
    """The member of ``kind`` that ``value`` is or names.

    Raises:
        ConfigurationError: it names none.
    """
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(repr(member.value) for member in kind)
        name = _ARGUMENTS.get(kind, kind.__name__)
        raise ConfigurationError(f"{name}= is {value!r}, which is none of {names}. Nothing has changed.") from None


def switch(value: bool, argument: str) -> bool:
    """The value of a keyword that is on or off.

    Raises:
        ConfigurationError: it is neither: "no" would count as on.
    """
    if not isinstance(value, bool):
        raise ConfigurationError(f"{argument}= is {value!r}: give True or False. Nothing has changed.")
    return value


_ARGUMENTS = {OnFailure: "on_failure", OnPending: "on_pending", Verify: "verify"}
