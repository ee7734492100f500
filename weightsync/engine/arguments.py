"""Checks of arguments that several calls take: workers' ids, numbers, the model's name, the multiprocessing context."""

from __future__ import annotations

import multiprocessing.context
import traceback
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, Final

from weightsync.clock import MAX_FENCE
from weightsync.errors import ConfigurationError
from weightsync.options import whole_number
from weightsync.protocol.codec import MAX_NAME_NBYTES

#: More workers than any trainer has. A larger number is a mistake, and would take all memory.
MAX_WORKERS: Final = 2**20


def require_worker_id(worker_id: Any, argument: str = "worker_id") -> int:
    """The worker's id as an int; numpy's integers are accepted.

    Raises ConfigurationError: it is not an int of 0 or more.
    """
    number = whole_number(worker_id)
    if number is None:
        raise ConfigurationError(
            f"{argument}= is {worker_id!r}: a worker's id is an int of 0 or more. Nothing has changed."
        )
    return number


def worker_ids_of(worker_ids: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """The ids that a send's ``worker_ids`` names; None: all.

    Raises:
        ConfigurationError: one of them is not an id.
    """
    if worker_ids is None:
        return None
    is_collection = isinstance(worker_ids, Iterable) and not isinstance(worker_ids, str | bytes)
    single: Iterable[Any] = (worker_ids,)
    try:
        ids = iter(worker_ids if is_collection else single)  # type: ignore[arg-type]
    except TypeError:  # a tensor or an array without dimensions is Iterable by its type
        ids = iter(single)
    return tuple(require_worker_id(worker_id, "worker_ids") for worker_id in ids)


def require_whole(value: Any, argument: str, what: str) -> int:
    """The value as an int of 0 or more; numpy's integers are accepted.

    Raises ConfigurationError: it is not an int of 0 or more.
    """
    number = whole_number(value)
    if number is None:
        raise ConfigurationError(f"{argument}= is {value!r}: give {what} as an int, 0 or more. Nothing has changed.")
    return number


def require_count(value: Any) -> int:
    """The value of ``num_workers`` as an int.

    Raises ConfigurationError: it is not an int of 0 or more, or more than `MAX_WORKERS`.
    """
    count = require_whole(value, "num_workers", "the number of workers")
    if count > MAX_WORKERS:
        raise ConfigurationError(f"num_workers= is {count}: there are at most {MAX_WORKERS}. Nothing has changed.")
    return count


def require_fence(value: Any, what: str = "the incarnation to rise above") -> int:
    """The value as an incarnation that a new one can be above.

    Raises ConfigurationError: it is not an int of 0 or more, or no incarnation is above it.
    """
    fence = require_whole(value, "fence", what)
    if fence > MAX_FENCE:
        raise ConfigurationError(
            f"fence= is {fence}: it is so large that no incarnation is above it. Nothing has changed."
        )
    return fence


def expected_number(value: Any) -> int | None:
    """The value of ``expected_workers`` as an int; None if none was given.

    Raises ConfigurationError: it is not a number of workers.
    """
    return None if value is None else require_whole(value, "expected_workers", "the number of workers")


def require_context(value: Any) -> None:
    """Check that ``ctx=`` makes pipes and processes. Raises ConfigurationError: it is not a multiprocessing context."""
    kinds = multiprocessing.context.BaseContext | ModuleType
    if not isinstance(value, kinds) or not callable(getattr(value, "Pipe", None)):
        raise ConfigurationError(
            f"ctx= is {value!r}: give a multiprocessing context, such as multiprocessing.get_context('fork'). "
            "Nothing was started."
        )


def require_name(value: Any) -> str:
    """The name of a model, checked: a str that a message can carry, not empty. Raises ConfigurationError: it is not."""
    if not isinstance(value, str) or not value:
        raise ConfigurationError(
            f"model_id= is {value!r}: give the model's name, a str, the same in the trainer and the worker. "
            "Nothing has changed."
        )
    try:
        fits = len(value.encode()) <= MAX_NAME_NBYTES
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise ConfigurationError(
            f"model_id= is {value[:40]!r}, of {len(value)} characters: give a name that UTF-8 encodes in at most "
            f"{MAX_NAME_NBYTES} bytes. Nothing has changed."
        )
    return value


def reason_and_trace(error: Any) -> tuple[str, str]:
    """An exception's type and text, and its traceback. Raises ConfigurationError: it is not an exception."""
    if not isinstance(error, BaseException):
        raise ConfigurationError(
            f"error= is {error!r}: give an exception, such as RuntimeError(...). Nothing was closed."
        )
    return "".join(traceback.format_exception_only(error)).strip(), "".join(traceback.format_exception(error))
