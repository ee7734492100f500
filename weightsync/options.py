"""The options of public calls. Each may be given as the enum member or as its value."""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterable
from numbers import Real
from typing import Any, NoReturn

from weightsync.errors import ConfigurationError


class _OptionType(enum.EnumMeta):
    """The type of an option's class."""

    def __call__(cls, value: Any, *args: Any, **kwargs: Any) -> Any:
        """The member with this value. A value without a hash is none: `Enum` would compare it with ``==``.

        A numpy array compares element by element, so that its comparison may raise, or find a member.
        """
        if type(value).__hash__ is None:
            cls._missing_(value)  # type: ignore[attr-defined]
        return super().__call__(value, *args, **kwargs)


class Option(enum.Enum, metaclass=_OptionType):
    """An option: ``Kind(value)`` takes a member or its value, and raises ConfigurationError for anything else."""

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        names = ", ".join(repr(member.value) for member in cls)
        name = _ARGUMENTS.get(cls.__name__, cls.__name__)
        raise ConfigurationError(f"{name}={value!r} is unknown: choose one of {names}. Nothing has changed.")


class OnFailure(Option):
    """What a blocking call does when a worker fails."""

    #: Raise the exception that carries the report, once every worker has its outcome.
    RAISE = "raise"
    #: Return the report. Only if another thread gave the update up during the wait, `SyncError` is raised all the same.
    REPORT = "report"


class OnPending(Option):
    """What a send does if an earlier update is still outstanding."""

    #: Raise StateError.
    RAISE = "raise"
    #: Wait for the earlier update first, within the same timeout, and raise its errors.
    WAIT = "wait"
    #: Abandon the earlier update and send the newer one.
    SUPERSEDE = "supersede"


class Verify(Option):
    """What a receiver checks before it applies a version."""

    #: Layout and length. Then the digest of weights that travelled; or, for weights in memory that trainer and worker
    #: share, the seal that the trainer has put into that memory.
    AUTO = "auto"
    #: As AUTO, and also the digest of weights in shared memory.
    DIGEST = "digest"
    #: Layout and length, and the seal of shared memory, but no digest.
    LAYOUT = "layout"

    def compares(self, shared: bool) -> bool:
        """Whether the digest of weights is compared.

        Args:
            shared: whether they lie in memory that trainer and worker share.
        """
        return self is Verify.DIGEST or (self is Verify.AUTO and not shared)


class OnStale(Option):
    """What a worker of a group does when its weights are too old to begin a step (``max_staleness``)."""

    #: Wait for a newer version.
    BLOCK = "block"
    #: Raise `StaleWeightsError`.
    RAISE = "raise"


class WireDtype(Option):
    """The floating dtype that weights are cast to before they are sent, if theirs is wider."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def switch(value: bool, argument: str) -> bool:
    """Check the value of a boolean keyword. A string such as "no" would otherwise count as true.

    Raises:
        ConfigurationError: it is not a bool.
    """
    if not isinstance(value, bool):
        raise ConfigurationError(f"{argument}={value!r} is not a bool: pass True or False. Nothing has changed.")
    return value


def whole_number(value: Any) -> int | None:
    """The value as an int of 0 or more; None: it is not one. Numpy's integers are, and bools are not."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
    return number if number >= 0 else None


def is_number(value: object) -> bool:
    """Whether this is a real number; numpy's are, and bools are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def items_of(value: object) -> list[Any] | None:
    """The items of a list or of any other iterable; None: the value has none, or is text.

    An array or tensor without dimensions is `Iterable` by its type, but has none.
    """
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        return None
    try:
        items = iter(value)
    except TypeError:
        return None
    return list(items)


_ARGUMENTS = {
    "Backend": "backend",
    "OnFailure": "on_failure",
    "OnPending": "on_pending",
    "OnStale": "on_stale",
    "SGLangPause": "pause",
    "TensorTransport": "tensor_transport",
    "VLLMPause": "pause",
    "Verify": "verify",
    "WireDtype": "wire_dtype",
}
