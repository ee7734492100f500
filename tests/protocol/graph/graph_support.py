"""What the tests of the graphs share: each graph is made once."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from configurations import CONFIGURATIONS, LARGE, SMALL, committed, in_words
from machines import ROWS_TAKEN
from missing import java_and_tlc
from modelcheck.second import Dump, Graph, GraphRun
from modelcheck.second.dump import Model
from network import World
from search import digest, explore

from weightsync.model.process import Size

MODEL = Path(__file__).parents[3] / "tla"
_MOST = 400_000
#: Of more nodes than all others together. Its graph is compared in every run; what is known of the committed graph,
#: that it is safe and what its machines refuse, is asked again in `make verify`.
LARGEST = "two workers, two versions, a crash"
ASKED = [pytest.param(name, marks=[pytest.mark.slow] if name == LARGEST else []) for name in SMALL]


@cache
def explored(name: str) -> tuple[Graph, list[World]]:
    """What the shipped code reaches. Only of small ones, and not while the code is changed."""
    found = explore(CONFIGURATIONS[name])
    _rows[name] = frozenset(ROWS_TAKEN)
    return found


_rows: dict[str, frozenset[object]] = {}


def rows_taken(name: str) -> frozenset[object]:
    """The rows that the shipped code takes in it, by state and input."""
    explored(name)
    return _rows[name]


def printed(name: str) -> Dump:
    """What TLC reaches."""
    size = Size.LARGE if name in LARGE else Size.SMALL
    return GraphRun(java_and_tlc("THE GRAPH"), Model(MODEL, "MC", CONFIGURATIONS[name].constants), size, _MOST).run()


def as_committed(name: str, graph: Graph) -> dict[str, object]:
    """What would be committed of a graph of that name, beside what is."""
    pinned = committed()[name]
    return pinned | {"bounds": in_words(CONFIGURATIONS[name])} | digest(graph)
