"""Several senders use one link one after another: the shipped halves have the graph of `tla/Shared.tla`.

So what TLC checks there holds for the code too: a takeover over the same link, messages that an older sender still
sends, and refusals that name another version.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from graph_support import MODEL
from modelcheck.second import Bounds, Graph, GraphRun
from modelcheck.second.dump import Dumped, Model
from search import difference, search
from skipping import require_tlc

from weightsync.model import Manifest

NAMES = ["SharedTakeover", "SharedEnds", "SharedAgain"]
names = pytest.mark.parametrize("name", NAMES)


def bounds_of(name: str) -> Bounds:
    return Bounds.read(Manifest.read(MODEL).select([name])[0].config.constants)


@cache
def searched(name: str) -> Graph:
    bounds = bounds_of(name)
    return search(replace(bounds, features=bounds.features | {"shared"}))


@names
def test_the_graph_of_the_shipped_halves_has_the_pinned_size_and_depth(name):
    graph = searched(name)
    [configuration] = Manifest.read(MODEL).select([name])

    assert (len(graph.nodes), graph.depth) == (configuration.pinned.distinct, configuration.pinned.depth)


@pytest.mark.tlc
@names
def test_the_shipped_halves_and_the_model_have_the_same_graph(name):
    model = Model(MODEL, "Shared", {**bounds_of(name).constants, "Careless": []}, "SharedNext")
    dump = GraphRun(require_tlc("THE GRAPH"), model).run()

    assert dump.became is Dumped.WHOLE
    assert difference(searched(name), dump.graph) == ""
