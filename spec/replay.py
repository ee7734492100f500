"""Renders the paths that `weightsync.testing` replays over transports, from the model's graph.

The graph is that of `tests/protocol/graph`: the shipped pure halves over a model network, which has exactly the nodes
and labelled edges of TLC's graph of `tla/AckProtocol.tla`. The *role projections* of the graph (the steps of a sender,
or of a receiver) are covered by paths: in each configuration every edge of both roles, and in the smallest
configuration every edge of the graph. With ``--check`` nothing is written and the file is compared.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))

from modelcheck.second import Bounds  # noqa: E402
from replaygen.cover import cover  # noqa: E402
from replaygen.graph import NEEDS, Label, Step, graph_of, machines  # noqa: E402

TARGET = ROOT / "weightsync" / "testing" / "replay.json"

#: The configurations that the conformance kit can drive, with graphs small enough to walk in seconds.
CONFIGURATIONS: Final = {
    "one version": Bounds(1, 1, 1, 1, 1, frozenset({"async", "deadline", "interrupt", "abandon", "refuse"})),
    "two versions": Bounds(1, 1, 2, 1, 1, frozenset({"async", "deadline", "interrupt", "abandon", "refuse"})),
    "two workers": Bounds(1, 2, 1, 1, 1, frozenset({"subset", "async"})),
    "crashes": Bounds(1, 1, 2, 2, 1, frozenset({"crash", "async"})),
    "losses": Bounds(1, 1, 1, 2, 1, frozenset({"wrong", "break", "refuse", "async"})),
    "ends": Bounds(1, 1, 1, 2, 1, frozenset({"remove", "bye", "close", "abandon", "broken", "async"})),
    "copies": Bounds(2, 1, 1, 1, 2, frozenset({"copy", "refuse"})),
    "successors": Bounds(2, 1, 1, 1, 2, frozenset({"copy", "close", "death"})),
    "reordered": Bounds(1, 1, 2, 1, 1, frozenset({"refuse", "abandon", "async"}), frozenset({"Reorders"})),
    "duplicated": Bounds(1, 1, 2, 1, 1, frozenset({"refuse", "deadline"}), frozenset({"Reorders", "Duplicates"})),
    "lost": Bounds(1, 1, 1, 1, 1, frozenset({"deadline"}), frozenset({"Reorders", "Duplicates", "Loses"})),
}
#: The configuration whose every edge is covered, not only those of the role projections.
WHOLE: Final = "one version"


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(value)
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


# ------------------------------------------------------------------------------------------------- the file


class Table:
    """Numbers distinct values."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        """Return the number of a value, which is added if it is new."""
        if value not in self._numbers:
            self._numbers[value] = len(self.values)
            self.values.append(value)
        return self._numbers[value]


def rendered() -> str:
    """Render the file."""
    senders, receivers, labels = Table(), Table(), Table()
    found = {name: _configuration(name, bounds, senders, receivers, labels) for name, bounds in CONFIGURATIONS.items()}
    tables = {"labels": labels.values, "senders": senders.values, "receivers": receivers.values, "needs": ["", *NEEDS]}
    lines = [f'"{name}": [\n{_rows(_plain(values))}\n]' for name, values in tables.items()]
    lines += [f'"{name}": {{\n{_configured(value)}\n}}' for name, value in {"configurations": found}.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _rows(values: Iterable[Any]) -> str:
    return ",\n".join(json.dumps(value, separators=(",", ":")) for value in values)


def _configured(found: dict[str, dict[str, Any]]) -> str:
    return ",\n".join(f'"{name}": {{\n{",".join(_members(value))}\n}}' for name, value in found.items())


def _members(value: dict[str, Any]) -> Iterator[str]:
    for name, member in value.items():
        body = f"[\n{_rows(member)}\n]" if isinstance(member, list) else json.dumps(member)
        yield f'"{name}": {body}\n'


def _configuration(name: str, bounds: Bounds, senders: Table, receivers: Table, labels: Table) -> dict[str, Any]:
    graph = graph_of(bounds)
    tables = {"sender": senders, "receiver": receivers}
    edges: dict[str, set[tuple[int, int, int]]] = {"sender": set(), "receiver": set()}

    def numbered(role: tuple[str, Any, Label, Any]) -> tuple[int, int, int]:
        which, before, label, after = role
        return tables[which].number(before), labels.number(_hashable(label)), tables[which].number(after)

    def row(step: Step) -> list[Any]:
        own, others = machines(step.to.world)
        edge = [] if step.role is None else list(numbered(step.role))
        need = ["", *NEEDS].index(step.needs)
        return [
            labels.number(_hashable(step.label)), need, list(map(senders.number, own)),
            list(map(receivers.number, others)), edge,
        ]  # fmt: skip

    paths = [[row(step) for step in path] for path in cover(graph, name == WHOLE)]
    for steps in graph.steps.values():
        for step in steps:
            if step.role is not None:
                edges[step.role[0]].add(numbered(step.role))
    return {
        "senders": bounds.senders,
        "workers": bounds.workers,
        "links": sorted(bounds.links),
        "sender edges": sorted(edges["sender"]),
        "receiver edges": sorted(edges["receiver"]),
        "paths": paths,
    }


def _hashable(value: Any) -> Any:
    return tuple(sorted(value)) if isinstance(value, frozenset) else (
        tuple(map(_hashable, value)) if isinstance(value, tuple | list) else value
    )  # fmt: skip


if __name__ == "__main__":
    text = rendered()
    if "--check" in sys.argv:
        sys.exit(0 if TARGET.read_text(encoding="utf-8") == text else f"{TARGET.name} is not what the graph gives")
    TARGET.write_text(text, encoding="utf-8")
