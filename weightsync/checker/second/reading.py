"""TLC's printed lines, read into a graph while it prints them."""

from __future__ import annotations

from typing import cast

from weightsync.checker.second.graph import Graph, Label
from weightsync.checker.second.labelling import BETWEEN, FROM, STEP
from weightsync.checker.second.values import Value, parse
from weightsync.checker.second.words import Node

_FROM, _STEP = f'"{FROM}{BETWEEN}', f'"{STEP}{BETWEEN}'


class _Pool:
    """The values of one variable: each text is parsed once, and equal values are one object with one number."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self._by_text: dict[str, int] = {}
        self._by_value: dict[Value, int] = {}

    def number(self, text: str) -> int:
        number = self._by_text.get(text)
        if number is None:
            value = parse(text)
            number = self._by_text[text] = self._by_value.setdefault(value, len(self.values))
            if number == len(self.values):
                self.values.append(value)
        return number


class GraphReader:
    """Reads lines into a graph.

    Attributes:
        graph: what has been read so far.
        printed: the steps printed; one that two messages of the same words allow is printed twice.
    """

    def __init__(self) -> None:
        self.graph = Graph()
        self.printed = 0
        self._pools = tuple(_Pool() for _ in Node._fields)
        self._nodes: dict[tuple[int, ...], int] = {}
        self._labels: dict[str, int] = {}
        self._from: tuple[int, ...] = ()

    def feed(self, line: str) -> None:
        """Take one line in; one that tells of no node or step is not ours."""
        if line.startswith(_STEP):
            _, label, *texts = _parts(line)
            pools = zip(self._pools, texts, self._from, strict=True)
            after = tuple(pool.number(text) if text else before for pool, text, before in pools)
            self.printed += 1
            self.graph.edges[self._nodes[self._from], self._label(label), self._node(after)] = None
        elif line.startswith(_FROM):
            _, *texts = _parts(line)
            self._from = tuple(pool.number(text) for pool, text in zip(self._pools, texts, strict=True))
            self._node(self._from)

    def _node(self, key: tuple[int, ...]) -> int:
        number = self._nodes.get(key)
        if number is None:
            number = self._nodes[key] = len(self._nodes)
            values = [pool.values[each] for pool, each in zip(self._pools, key, strict=True)]
            self.graph.nodes.append(Node._make(values))
        return number

    def _label(self, text: str) -> int:
        number = self._labels.get(text)
        if number is None:
            number = self._labels[text] = len(self._labels)
            self.graph.labels.append(cast(Label, parse(text)))
        return number


def _parts(line: str) -> list[str]:
    return line.rstrip()[1:-1].replace('\\"', '"').split(BETWEEN)
