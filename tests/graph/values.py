"""TLC's printed values as Python's: sets, tuples and functions, records, strings, numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_TOKEN = re.compile(r'"[^"]*"|\|->|:>|@@|<<|>>|[\[\]{}(),]|-?\d+|\w+')


def edges_in(output: str) -> Iterator[tuple[frozenset[Any], Any, Any]]:
    """Every printed edge: labels, the value of `vars` before and after."""
    cache: dict[tuple[str, ...], Any] = {}
    tokens = _TOKEN.findall(output)
    starts = [i for i, token in enumerate(tokens) if token == '"EDGE"']
    for at in starts:
        position = at + 2
        labels, position = _spanned(tokens, position, cache)
        before, position = _spanned(tokens, position + 1, cache)
        after, position = _spanned(tokens, position + 1, cache)
        yield labels, before, after


def _spanned(tokens: list[str], start: int, cache: dict[tuple[str, ...], Any]) -> tuple[Any, int]:
    """The value that starts there, parsed once for each text, and the place behind it."""
    depth, end = 0, start
    while True:
        token = tokens[end]
        depth += token in ("<<", "[", "{", "(")
        depth -= token in (">>", "]", "}", ")")
        end += 1
        if depth == 0:
            break
    key = tuple(tokens[start:end])
    if key not in cache:
        cache[key], _ = parse(tokens, start)
    return cache[key], end


def parse(tokens: list[str], at: int) -> tuple[Any, int]:
    """One value and the place behind it."""
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
    if token.startswith('"'):
        return token[1:-1], at + 1
    if token in ("TRUE", "FALSE"):
        return token == "TRUE", at + 1
    return int(token), at + 1


def _items(tokens: list[str], at: int, end: str) -> tuple[list[Any], int]:
    items = []
    while tokens[at] != end:
        if tokens[at] == ",":
            at += 1
        value, at = parse(tokens, at)
        items.append(value)
    return items, at + 1


def _record(tokens: list[str], at: int) -> tuple[Any, int]:
    fields = []
    while tokens[at] != "]":
        if tokens[at] == ",":
            at += 1
        name = tokens[at]
        value, at = parse(tokens, at + 2)
        fields.append((name, value))
    return frozenset(fields), at + 1


def _function(tokens: list[str], at: int) -> tuple[Any, int]:
    """``(1 :> x @@ 2 :> y)``, over numbers from 1: a tuple."""
    found = {}
    while tokens[at] != ")":
        if tokens[at] == "@@":
            at += 1
        argument, at = parse(tokens, at)
        value, at = parse(tokens, at + 1)
        found[argument] = value
    assert sorted(found) == list(range(1, len(found) + 1))
    return tuple(found[argument] for argument in sorted(found)), at + 1
