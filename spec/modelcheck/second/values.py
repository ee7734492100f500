"""Parses values that TLC prints: sets, tuples, functions, records, strings and numbers."""

from __future__ import annotations

import re
from typing import TypeAlias

from modelcheck.second.words import RECORDS
from weightsync.errors import ConfigurationError

#: A value of the model. Records are the named tuples of `words`.
Value: TypeAlias = "bool | int | str | frozenset[Value] | tuple[Value, ...]"

_TOKEN = re.compile(r'"[^"]*"|\|->|:>|@@|<<|>>|[\[\]{}(),]|-?\d+|\w+')
_BY_FIELDS = {frozenset(record._fields): record for record in RECORDS}


def parse(text: str) -> Value:
    """Parse one printed value.

    Raises:
        ConfigurationError: a record has unknown fields, since the model has changed and its second reading has not.
    """
    value, _ = _value(_TOKEN.findall(text), 0)
    return value


def _value(tokens: list[str], at: int) -> tuple[Value, int]:
    """The value at a place in the tokens, and the place after it."""
    token = tokens[at]
    if token == "<<":
        items, at = _items(tokens, at + 1, ">>")
        return tuple(items), at
    if token == "{":
        items, at = _items(tokens, at + 1, "}")
        return frozenset(items), at
    if token == "[":
        return _record(tokens, at + 1)
    if token == "(":
        return _function(tokens, at + 1)
    if token[0] == '"':
        return token[1:-1], at + 1
    if token in ("TRUE", "FALSE"):
        return token == "TRUE", at + 1
    return int(token), at + 1


def _items(tokens: list[str], at: int, end: str) -> tuple[list[Value], int]:
    items = []
    while tokens[at] != end:
        if tokens[at] == ",":
            at += 1
        value, at = _value(tokens, at)
        items.append(value)
    return items, at + 1


def _record(tokens: list[str], at: int) -> tuple[Value, int]:
    fields = {}
    while tokens[at] != "]":
        if tokens[at] == ",":
            at += 1
        name = tokens[at]
        fields[name], at = _value(tokens, at + 2)
    record = _BY_FIELDS.get(frozenset(fields))
    if record is None:
        raise ConfigurationError(
            f"The model has a record of {', '.join(sorted(fields))}, which its second reading does not know: "
            "spec/modelcheck/second/words.py must follow AckProtocol.tla."
        )
    return record._make(fields[name] for name in record._fields), at + 1


def _function(tokens: list[str], at: int) -> tuple[Value, int]:
    """A function ``(1 :> x @@ 2 :> y)`` over 1..n, as a tuple."""
    found: dict[Value, Value] = {}
    while tokens[at] != ")":
        if tokens[at] == "@@":
            at += 1
        argument, at = _value(tokens, at)
        found[argument], at = _value(tokens, at + 1)
    if set(found) != set(range(1, len(found) + 1)):
        raise ConfigurationError(f"The model has a function over {list(found)}, not over 1..n.")
    return tuple(found[place] for place in range(1, len(found) + 1)), at + 1
