"""The options of public calls. Each may be given as the enum member or as its value."""

from __future__ import annotations

import enum
from typing import TypeVar

from weightsync.errors import ConfigurationError


class OnFailure(enum.Enum):
    """What a blocking call does when a worker fails."""

    #: Raise the exception that carries the report, once every other worker has been served.
    RAISE = "raise"
    #: Return the report.
    REPORT = "report"


class OnPending(enum.Enum):
    """What a send does while an earlier update is outstanding."""

    #: Raise StateError.
    RAISE = "raise"
    #: Wait for it first, within the same timeout, and raise its errors.
    WAIT = "wait"
    #: Abandon it and send the newer one.
    SUPERSEDE = "supersede"


class Verify(enum.Enum):
    """What a receiver checks before it applies a version."""

    #: Layout and length, and the digest of what travelled. Weights that lie in memory which trainer and worker share
    #: did not travel: their slot is verified, by the seal that the trainer has put in it.
    AUTO = "auto"
    #: Layout, length, and the digest, also of weights in shared memory.
    DIGEST = "digest"
    #: Layout and length, and the seal of a slot in shared memory.
    LAYOUT = "layout"


class OnStale(enum.Enum):
    """What a worker of a group does at a step for which its weights are too old."""

    #: Wait for a newer version.
    BLOCK = "block"
    #: Raise `StaleWeightsError`.
    RAISE = "raise"


class WireDtype(enum.Enum):
    """The floating dtype that weights are cast to before they are sent, if theirs is wider."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


Option = TypeVar("Option", bound=enum.Enum)


def option(kind: type[Option], value: Option | str) -> Option:
    """Convert an option, given as a member of ``kind`` or as its value, to the member.

    Raises:
        ConfigurationError: there is no such member.
    """
    if isinstance(value, kind):
        return value
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(repr(member.value) for member in kind)
        name = _ARGUMENTS.get(kind, kind.__name__)
        raise ConfigurationError(f"{name}={value!r} is unknown: choose one of {names}. Nothing has changed.") from None


def switch(value: bool, argument: str) -> bool:
    """Check the value of a boolean keyword. A string such as "no" would otherwise count as true.

    Raises:
        ConfigurationError: it is not a bool.
    """
    if not isinstance(value, bool):
        raise ConfigurationError(f"{argument}={value!r} is not a bool: pass True or False. Nothing has changed.")
    return value


_ARGUMENTS = {
    OnFailure: "on_failure",
    OnPending: "on_pending",
    Verify: "verify",
    OnStale: "on_stale",
    WireDtype: "wire_dtype",
}
