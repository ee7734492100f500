"""The configurations whose graphs are compared, and their committed digests.

`python tests/graph/configurations.py` searches again and writes the digests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash
from network import Bounds
from search import Graph, search

DIGESTS = Path(__file__).with_name("digests.json")

_LINKS = ("Reorders", "Duplicates", "Loses", "Lingers")

#: Small enough for every run; together they have every feature of the model.
CONFIGURATIONS = {
    "two workers": Bounds(1, 2, 1, 1, 1, frozenset({"subset"})),
    "two versions": Bounds(1, 1, 2, 1, 1, frozenset({"async", "deadline", "interrupt", "abandon", "refuse"})),
    "crashes": Bounds(1, 1, 2, 2, 1, frozenset({"crash", "async"})),
    "losses": Bounds(1, 1, 2, 2, 1, frozenset({"wrong", "break", "refuse"})),
    "ends": Bounds(1, 1, 1, 2, 1, frozenset({"remove", "bye", "close", "abandon", "broken", "async"})),
    "lingering": Bounds(1, 1, 2, 2, 1, frozenset({"wrong", "async"}), frozenset({"Lingers"})),
    "cut off": Bounds(1, 1, 1, 2, 1, frozenset({"crash", "wrong", "cut", "bye", "refuse"}), frozenset({"Lingers"})),
    "reordered": Bounds(1, 1, 2, 1, 1, frozenset({"refuse", "abandon", "async"}), frozenset({"Reorders"})),
    "duplicated": Bounds(1, 1, 2, 1, 1, frozenset({"refuse", "deadline"}), frozenset({"Reorders", "Duplicates"})),
    "lost": Bounds(1, 1, 2, 1, 1, frozenset({"deadline"}), frozenset({"Reorders", "Duplicates", "Loses"})),
    "copies": Bounds(2, 1, 1, 1, 2, frozenset({"copy", "refuse", "stray"})),
    "successors": Bounds(2, 1, 1, 1, 2, frozenset({"copy", "misfit", "close", "death"})),
}


def config(bounds: Bounds) -> str:
    """The configuration as TLC reads it."""
    return "\n".join(
        [
            "SPECIFICATION Safe",
            "CHECK_DEADLOCK FALSE",
            "CONSTANTS",
            f"  Senders = {_set(range(1, bounds.senders + 1))}",
            f"  Workers = {_set(range(1, bounds.workers + 1))}",
            f"  MaxVersion = {bounds.max_version}",
            f"  MaxLink = {bounds.max_link}",
            f"  MaxClock = {bounds.max_clock}",
            *(f"  {name} = {str(name in bounds.links).upper()}" for name in _LINKS),
            f"  Features = {_set(json.dumps(feature) for feature in sorted(bounds.features))}",
            "  Without = {}",
            "  Unfair = {}",
            "ACTION_CONSTRAINT Edge",
            "",
        ]
    )


def _set(members: Any) -> str:
    return f"{{{', '.join(map(str, members))}}}"


def digest(graph: Graph) -> dict[str, Any]:
    """What is committed of a graph: its size, and a digest that depends on nothing but its nodes and edges."""
    nodes, edges = graph
    names = {node: _text(node) for node in nodes}
    lines = sorted(f"{names[before]} {_text(label)} {names[after]}" for before, label, after in edges)
    return {
        "nodes": len(nodes),
        "edges": len(edges),
        "digest": xxhash.xxh3_128_hexdigest("\n".join([*sorted(names.values()), *lines]).encode()),
    }


def _text(value: Any) -> str:
    if isinstance(value, frozenset):
        return "{" + ",".join(sorted(map(_text, value))) + "}"
    return "(" + ",".join(map(_text, value)) + ")" if isinstance(value, tuple) else repr(value)


def committed() -> dict[str, Any]:
    """The committed digests, by configuration."""
    return dict(json.loads(DIGESTS.read_text(encoding="utf-8")))


if __name__ == "__main__":
    found = {name: digest(search(bounds)) for name, bounds in CONFIGURATIONS.items()}
    DIGESTS.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
