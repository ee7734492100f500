"""Decodes the values of the protocol in a trace."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any


def decoded(kind: Any, told: Any) -> Any:
    """The value of type ``kind`` that ``told`` encodes.

    Raises:
        ValueError: it encodes no such value.
    """
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return _one_of(typing.get_args(kind), told)
    if origin is tuple:
        return _tuple(typing.get_args(kind)[0], told)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(typing.get_args(kind)[1], told)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _record(kind, told)
    return _scalar(kind, told)


def _scalar(kind: Any, told: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        if told not in kind.__members__:
            raise ValueError(f"{told!r} is not a {kind.__name__}")
        return kind[told]
    if kind is bytes and isinstance(told, str):
        return bytes.fromhex(told)
    if kind is float and type(told) in (int, float):
        return told
    if kind in (int, str, bool) and type(told) is kind:
        return told
    raise ValueError(f"{told!r} encodes no {getattr(kind, '__name__', kind)}")


def _one_of(kinds: tuple[Any, ...], told: Any) -> Any:
    if told is None and types.NoneType in kinds:
        return None
    rest = [kind for kind in kinds if kind is not types.NoneType]
    if len(rest) == 1:
        return decoded(rest[0], told)
    named = told.get("is") if isinstance(told, dict) else None
    for kind in rest:
        if kind.__name__ == named:
            return decoded(kind, told)
    raise ValueError(f"{named!r} is none of {', '.join(kind.__name__ for kind in rest)}")


def _tuple(kind: Any, told: Any) -> tuple[Any, ...]:
    """Decode a tuple; all tuples of events and messages have one element type and any length."""
    if not isinstance(told, list):
        raise ValueError(f"{told!r} is not a list")
    return tuple(decoded(kind, each) for each in told)


def _mapping(kind: Any, told: Any) -> dict[int, Any]:
    if not isinstance(told, dict):
        raise ValueError(f"{told!r} is not a mapping")
    return {int(key): decoded(kind, each) for key, each in told.items()}


def _record(kind: type, told: Any) -> Any:
    if not isinstance(told, dict) or told.get("is") != kind.__name__:
        raise ValueError(f"{told!r} is not a {kind.__name__}")
    hints = _hints(kind)
    unknown = set(told) - set(hints) - {"is"}
    if unknown:
        raise ValueError(f"a {kind.__name__} has no {', '.join(sorted(unknown))}")
    try:
        return kind(**{name: decoded(hints[name], each) for name, each in told.items() if name != "is"})
    except TypeError as error:
        raise ValueError(f"a {kind.__name__} is incomplete: {error}") from error


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)
