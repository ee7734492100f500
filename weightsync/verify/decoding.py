"""Decodes the values of the protocol in a trace."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any


def decoded(kind: Any, recorded: Any) -> Any:
    """The value of type ``kind`` that ``recorded`` encodes. Raises ValueError: it encodes no such value."""
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return _one_of(typing.get_args(kind), recorded)
    if origin is tuple:
        return _tuple(typing.get_args(kind)[0], recorded)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(typing.get_args(kind)[1], recorded)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _record(kind, recorded)
    return _scalar(kind, recorded)


def _scalar(kind: Any, recorded: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        if recorded not in kind.__members__:
            raise ValueError(f"{recorded!r} is not a {kind.__name__}")
        return kind[recorded]
    if kind is bytes and isinstance(recorded, str):
        return bytes.fromhex(recorded)
    if kind is float and type(recorded) in (int, float):
        return recorded
    if kind in (int, str, bool) and type(recorded) is kind:
        return recorded
    raise ValueError(f"{recorded!r} encodes no {getattr(kind, '__name__', kind)}")


def _one_of(kinds: tuple[Any, ...], recorded: Any) -> Any:
    if recorded is None and types.NoneType in kinds:
        return None
    rest = [kind for kind in kinds if kind is not types.NoneType]
    if len(rest) == 1:
        return decoded(rest[0], recorded)
    named = recorded.get("is") if isinstance(recorded, dict) else None
    for kind in rest:
        if kind.__name__ == named:
            return decoded(kind, recorded)
    raise ValueError(f"{named!r} is none of {', '.join(kind.__name__ for kind in rest)}")


def _tuple(kind: Any, recorded: Any) -> tuple[Any, ...]:
    """Decode a tuple; all tuples of events and messages have one element type and any length."""
    if not isinstance(recorded, list):
        raise ValueError(f"{recorded!r} is not a list")
    return tuple(decoded(kind, each) for each in recorded)


def _mapping(kind: Any, recorded: Any) -> dict[int, Any]:
    if not isinstance(recorded, dict):
        raise ValueError(f"{recorded!r} is not a mapping")
    return {int(key): decoded(kind, each) for key, each in recorded.items()}


def _record(kind: type, recorded: Any) -> Any:
    if not isinstance(recorded, dict) or recorded.get("is") != kind.__name__:
        raise ValueError(f"{recorded!r} is not a {kind.__name__}")
    hints = _hints(kind)
    unknown = set(recorded) - set(hints) - {"is"}
    if unknown:
        raise ValueError(f"a {kind.__name__} has no {', '.join(sorted(unknown))}")
    try:
        return kind(**{name: decoded(hints[name], each) for name, each in recorded.items() if name != "is"})
    except TypeError as error:
        raise ValueError(f"a {kind.__name__} is incomplete: {error}") from error


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)
