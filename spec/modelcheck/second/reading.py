"""Builds a graph from the lines that TLC prints, while it prints them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from modelcheck.second.graph import Graph, Label
from modelcheck.second.labelling import FROM, STEP
from modelcheck.second.values import Value, parse
from modelcheck.second.words import Node
from weightsync.errors import ConfigurationError

_PLACES = {name: place for place, name in enumerate(Node._fields)}


@dataclass(frozen=True, slots=True)
class _Said:
    """A printed line: a variable has a value."""

    place: int
    number: int


@dataclass(frozen=True, slots=True)
class _StepEnd:
    """A printed line: the values since the last end are the changes of this action."""

    label: int


class _NodeEnd:
    """A printed line: the values since the last end are a node, at which the next steps begin."""


class GraphReader:
    """Builds a graph from lines. Each text is parsed once, and equal values share one object and one number.

    Attributes:
        graph: the graph read so far.
        printed: the number of steps printed. TLC prints a step twice that two equal messages allow.
    """

    def __init__(self) -> None:
        self.graph = Graph()
        self.printed = 0
        self._lines: dict[str, _Said | _StepEnd | _NodeEnd] = {}
        self._values: list[list[Value]] = [[] for _ in Node._fields]
        self._numbers: list[dict[Value, int]] = [{} for _ in Node._fields]
        self._nodes: dict[tuple[int, ...], int] = {}
        self._labels: dict[Value, int] = {}
        self._from: tuple[int, ...] = ()
        self._said: list[_Said] = []

    def feed(self, line: str) -> None:
        """Take one printed line.

        Raises:
            ConfigurationError: the line has an unknown value, or a node lacks a variable.
        """
        meaning = self._lines.get(line)
        if meaning is None:
            meaning = self._lines[line] = self._read(line)
        if isinstance(meaning, _Said):
            self._said.append(meaning)
        else:
            self._end(meaning)

    def _read(self, line: str) -> _Said | _StepEnd | _NodeEnd:
        name, value = cast("tuple[str, Value]", parse(line.strip()[1:-1].replace('\\"', '"')))
        if name == FROM:
            return _NodeEnd()
        if name == STEP:
            number = self._labels.setdefault(value, len(self._labels))
            if number == len(self.graph.labels):
                self.graph.labels.append(cast(Label, value))
            return _StepEnd(number)
        place = _PLACES[name]
        values, numbers = self._values[place], self._numbers[place]
        number = numbers.setdefault(value, len(values))
        if number == len(values):
            values.append(value)
        return _Said(place, number)

    def _end(self, end: _StepEnd | _NodeEnd) -> None:
        said, self._said = self._said, []
        if isinstance(end, _NodeEnd):
            if [each.place for each in said] != list(range(len(Node._fields))):
                raise ConfigurationError(f"TLC printed a node of {len(said)} variables, not of {len(Node._fields)}.")
            self._from = tuple(each.number for each in said)
            self._node(self._from)
            return
        after = list(self._from)
        for each in said:
            after[each.place] = each.number
        self.printed += 1
        self.graph.edges[self._nodes[self._from], end.label, self._node(tuple(after))] = None

    def _node(self, key: tuple[int, ...]) -> int:
        number = self._nodes.get(key)
        if number is None:
            number = self._nodes[key] = len(self._nodes)
            values = [values[each] for values, each in zip(self._values, key, strict=True)]
            self.graph.nodes.append(Node._make(values))
        return number
