"""The shipped machines and the model that TLC checks have the same graph: the same nodes, the same labelled edges.

The search (see `graph_support`) calls the shipped `step`, with its guards, and does not read the table. So what TLC
checks of the model holds for the code too, within the same bounds. Without TLC, the graph of the code is compared with
its committed digest, which TLC's graph has as well.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from configurations import CONFIGURATIONS, LARGE, SMALL, committed, in_words
from graph_support import MODEL, as_committed, explored, printed, rows_taken
from machines import forget
from modelcheck.second.dump import Dumped
from modelcheck.second.labelling import disjuncts, labelling_module
from search import difference, search

from weightsync.model.text import Library
from weightsync.protocol import by_worker
from weightsync.protocol._actions import Action
from weightsync.protocol._tables import RECEIVER_ROWS, SENDER_ROWS, RefusalKind

OTHER_GRAPH = (
    "the shipped machines reach another graph than the one that is pinned. If a row, a guard or a message was changed "
    "on purpose: change tla/AckProtocol.tla likewise; `make protocol` pins the graphs and says what else must follow "
    "(spec/README.md, Changing the protocol). If not, weightsync/protocol/ has a fault: the tests with TLC name the "
    "first edge that differs."
)
names = pytest.mark.parametrize("name", SMALL)


@names
def test_the_code_has_the_committed_graph(name):
    assert as_committed(name, explored(name)[0]) == committed()[name], OTHER_GRAPH


def test_the_graph_is_the_same_if_workers_are_kept_in_a_tree(monkeypatch):
    monkeypatch.setattr(by_worker, "SMALL", 0)
    try:
        assert as_committed("one of two leaves", search(SMALL["one of two leaves"])) == committed()["one of two leaves"]
    finally:
        forget()


@pytest.mark.tlc
@names
def test_the_code_and_the_model_have_the_same_graph(name):
    dump = printed(name)
    assert dump.became is Dumped.WHOLE
    assert difference(explored(name)[0], dump.graph) == ""
    assert as_committed(name, dump.graph) == committed()[name]


@pytest.mark.tlc
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", LARGE)
def test_large_graphs_of_code_and_model_are_equal_and_have_the_committed_digest(name):
    with ThreadPoolExecutor(1) as beside:
        theirs = beside.submit(printed, name)
        graph = search(LARGE[name])
        assert as_committed(name, graph) == committed()[name]
        dump = theirs.result()
    assert dump.became is Dumped.WHOLE
    assert difference(graph, dump.graph) == ""


def test_exactly_the_configurations_have_a_committed_digest():
    assert {name: pinned["bounds"] for name, pinned in committed().items()} == {
        name: in_words(bounds) for name, bounds in CONFIGURATIONS.items()
    }


def test_every_feature_and_every_kind_of_link_is_in_some_small_graph():
    text = (MODEL / "AckProtocol.tla").read_text(encoding="utf-8")
    features = set(re.findall(r'"(\w+)"', text.split("AllFeatures == {")[1].split("\n}")[0]))
    assert set().union(*(bounds.features for bounds in SMALL.values())) == features
    assert set().union(*(bounds.links for bounds in SMALL.values())) == {"Reorders", "Duplicates", "Loses", "Lingers"}


def test_every_action_but_those_of_planted_faults_is_taken_in_some_small_graph():
    planted = {Action.SWAP_FIRST, Action.SWAP_HALF, Action.DROP_ANSWER, Action.SEND_AGAIN, Action.APPLY_CLOSED}
    actions = {action for _, action, _ in disjuncts(Library(MODEL), "MC")}
    assert {label[0] for name in SMALL for label in explored(name)[0].labels} == actions - planted


def test_every_row_is_taken_in_some_small_graph():
    """The model has the same graphs, so it takes these rows too. A row that no graph takes is not checked."""
    taken = set().union(*(rows_taken(name) for name in SMALL))
    idle = [
        f"{state.value}, {named.name}" for state, named in (*SENDER_ROWS, *RECEIVER_ROWS) if (state, named) not in taken
    ]
    assert idle == [], (
        "no action of the model takes these rows of spec/protocol.toml: give AckProtocol.tla one that does"
    )


def test_every_refusal_kind_is_sent_in_some_small_graph():
    labels = [label for name in SMALL for label in explored(name)[0].labels]
    sent = {str(label[-1]) for label in labels if label[0] in {Action.ANSWER_REFUSAL, Action.ANSWER_REJECTED}}
    assert sent == {kind.name for kind in RefusalKind}, (
        "a refusal kind of spec/protocol.toml that no action of the model sends: give AckProtocol.tla one that does"
    )


def test_every_disjunct_of_next_is_labelled():
    module = labelling_module(Library(MODEL), "MC")
    for action in (
        Action.CONNECT,
        Action.SEND_ASYNC_TO,
        Action.ANSWER_REJECTED,
        Action.LINK_DOWN,
        Action.STRAY,
        Action.APPLY_CLOSED,
    ):
        assert re.search(rf"{action}\((.*)\) /\\ action' = <<\"{action}\", \1>>", module)
