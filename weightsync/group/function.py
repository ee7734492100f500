"""What a worker runs, and what makes its model: functions that cannot do that are refused before anything starts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from weightsync.errors import ConfigurationError


def require_run(run: object) -> Any:
    """The function that each worker runs.

    Raises:
        ConfigurationError: it cannot be called with a worker, or calling it would run nothing.
    """
    if not callable(run):
        raise ConfigurationError(f"run= is {run!r}: give the function that each worker runs. {_NOTHING_STARTED}")
    _refuse_remote("run", run)
    kind = _deferred_kind(run)
    if kind is not None:
        raise ConfigurationError(
            f"run= is {name_of(run)}, {kind}: a call of it does not run its body. {_REMEDIES[kind]} {_NOTHING_STARTED}"
        )
    reason = _signature_error(run, object())
    if reason:
        raise ConfigurationError(
            f"run= is {name_of(run)}, which cannot be called with a worker and nothing else ({reason}): define it as "
            f"`def {_plain_name(run)}(worker: Worker)`, and bind what else it needs by functools.partial. "
            f"{_NOTHING_STARTED}"
        )
    return run


def require_ran(run: object, returned: object) -> None:
    """Check in the worker that the call has run the function.

    Raises:
        ConfigurationError: it returned a coroutine or a generator, whose body has not run.
    """
    for kind, is_one in _RESULT_KINDS.items():
        if is_one(returned):
            if inspect.iscoroutine(returned):
                returned.close()  # else Python warns that nobody awaited it
            raise ConfigurationError(
                f"run= ({name_of(run)}) returned what {kind} makes, whose body has not run. {_REMEDIES[kind]}"
            )


def require_make_model(make_model: object) -> Any:
    """The function that makes a worker's model.

    Raises:
        ConfigurationError: it is not a function, or needs arguments.
    """
    remedy = f"give a function that takes no argument and returns a new nn.Module. {_NOTHING_STARTED}"
    if isinstance(make_model, nn.Module):
        raise ConfigurationError(f"make_model= is a model ({type(make_model).__name__}): {remedy}")
    if not callable(make_model):
        raise ConfigurationError(f"make_model= is {make_model!r}: {remedy}")
    _refuse_remote("make_model", make_model)
    kind = _deferred_kind(make_model)
    if kind is not None:
        raise ConfigurationError(f"make_model= is {name_of(make_model)}, {kind}: {remedy}")
    reason = _signature_error(make_model)
    if reason:
        raise ConfigurationError(
            f"make_model= is {name_of(make_model)}, which cannot be called without arguments ({reason}): bind them by "
            f"functools.partial. {_NOTHING_STARTED}"
        )
    return make_model


def require_made(make_model: object, made: object) -> nn.Module:
    """What `make_model` has made, in the worker. Raises ConfigurationError: it is not a model."""
    if not isinstance(made, nn.Module):
        raise ConfigurationError(
            f"make_model= ({name_of(make_model)}) returned {made!r}: it has to return an nn.Module."
        )
    return made


def name_of(function: object) -> str:
    """A function as messages name it: ``act()``."""
    return f"{_plain_name(function)}()"


def _plain_name(function: object) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


_NOTHING_STARTED = "Nothing was started."
_ASYNC, _ASYNC_GENERATOR, _GENERATOR = "an async function", "an async generator function", "a generator function"
_REMEDIES = {
    _ASYNC: "Give a plain function that runs it: `def run(worker): asyncio.run(act(worker))`.",
    _ASYNC_GENERATOR: "Give a plain function, and put() what it would yield.",
    _GENERATOR: "Give a plain function, and worker.put(item) in place of `yield item`.",
}
_FUNCTION_KINDS: dict[str, Callable[[Any], bool]] = {
    _ASYNC: inspect.iscoroutinefunction,
    _ASYNC_GENERATOR: inspect.isasyncgenfunction,
    _GENERATOR: inspect.isgeneratorfunction,
}
_RESULT_KINDS: dict[str, Callable[[Any], bool]] = {
    _ASYNC: inspect.iscoroutine,
    _ASYNC_GENERATOR: inspect.isasyncgen,
    _GENERATOR: inspect.isgenerator,
}
#: What `ray.remote` makes of a function and of a class. Names, since Ray may be absent, or just being imported.
_REMOTE = {("ray.remote_function", "RemoteFunction"), ("ray.actor", "ActorClass")}


def _refuse_remote(argument: str, function: object) -> None:
    """Raise ConfigurationError: `ray.remote` decorates it."""
    if any((each.__module__, each.__name__) in _REMOTE for each in type(function).__mro__):
        raise ConfigurationError(
            f"{argument}= is decorated by ray.remote, so it cannot be called: give the function itself. "
            f'`WorkerGroup(..., scheme="ray")` runs it in actors. {_NOTHING_STARTED}'
        )


def _deferred_kind(function: Callable[..., object]) -> str | None:
    """The kind of a function whose body does not run when it is called; None: it is a plain function."""
    called: tuple[Any, Any] = (function, None if inspect.isclass(function) else type(function).__call__)
    return next((kind for kind, is_one in _FUNCTION_KINDS.items() if any(map(is_one, called))), None)


def _signature_error(function: Callable[..., object], *arguments: object) -> str:
    """Why it cannot be called with these arguments; empty: it can, or this is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin
        return ""
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return str(error)
    return ""
