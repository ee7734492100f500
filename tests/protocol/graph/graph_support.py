"""Helpers of the tests of the graphs; each graph is searched once.

The graph of a configuration has the states that the shipped machines reach within its bounds as nodes, and the actions
of the model as labelled edges. The modules of this folder:

- `configurations` names the bounds of each graph, and keeps the committed digests (digests.json).
- `network` defines a node's world: the values of the shipped pure halves, and the messages between them.
- `machines` takes steps of the shipped pure halves in that world.
- `senders` and `receivers` list the actions that may happen in a world, under the names of AckProtocol.tla.
- `search` explores all worlds breadth-first, and compares and digests graphs.
- `refusing` states the required answer of a machine to any event, as spec/README.md has it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from configurations import CONFIGURATIONS, LARGE, SMALL, committed, in_words
from machines import ROWS_TAKEN
from modelcheck.second import Dump, Graph, GraphRun
from modelcheck.second.dump import Model
from network import World
from search import digest, explore
from skipping import require_tlc

from weightsync.model.process import Size

MODEL = Path(__file__).parents[3] / "tla"
_MOST = 400_000
#: The graph with more nodes than all other small ones together. Every run compares it with its digest; that it is safe
#: and what its machines refuse is checked only in `make verify`.
LARGEST = "two workers, two versions, a crash"
ASKED = [pytest.param(name, marks=[pytest.mark.slow] if name == LARGEST else []) for name in SMALL]


@cache
def explored(name: str) -> tuple[Graph, list[World]]:
    """The graph that the shipped code reaches, and its worlds. Only for small graphs, and for unpatched code."""
    found = explore(CONFIGURATIONS[name])
    _rows[name] = frozenset(ROWS_TAKEN)
    return found


_rows: dict[str, frozenset[object]] = {}


def rows_taken(name: str) -> frozenset[object]:
    """The rows that the shipped code takes in a graph, as (state, input)."""
    explored(name)
    return _rows[name]


def printed(name: str) -> Dump:
    """The graph that TLC reaches."""
    size = Size.LARGE if name in LARGE else Size.SMALL
    return GraphRun(require_tlc("THE GRAPH"), Model(MODEL, "MC", CONFIGURATIONS[name].constants), size, _MOST).run()


def as_committed(name: str, graph: Graph) -> dict[str, object]:
    """The committed entry of this name, but with the bounds and the digest of the given graph."""
    pinned = committed()[name]
    return pinned | {"bounds": in_words(CONFIGURATIONS[name])} | digest(graph)
