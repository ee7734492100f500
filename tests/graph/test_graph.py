"""The shipped machines and the model that TLC checks are one graph: the same nodes, the same labelled edges.

The search calls the shipped `step`, its naming of inputs included, not the table. What the pages of the protocol say is
checked by TLC of the model; so it holds of the code, within the same bounds.
"""

from __future__ import annotations

import re

import pytest
from configurations import CONFIGURATIONS, SMALL, committed
from graph_support import MODEL, each, explored, printed
from search import difference, digest

from weightsync.checker.second.dump import Dumped
from weightsync.checker.second.labelling import disjuncts, labelling_module
from weightsync.checker.text import Library


@each(CONFIGURATIONS)
def test_the_code_has_the_committed_graph(name):
    assert digest(explored(name)[0]) == committed()[name]


@pytest.mark.tlc
@each(CONFIGURATIONS)
def test_the_code_and_the_model_have_the_same_graph(name):
    dump = printed(name)
    assert dump.became is Dumped.WHOLE
    assert difference(explored(name)[0], dump.graph) == ""
    assert digest(dump.graph) == committed()[name]


def test_no_digest_is_committed_of_a_configuration_that_is_gone():
    assert list(committed()) == list(CONFIGURATIONS)


def test_every_feature_and_every_kind_of_link_is_in_some_small_graph():
    text = (MODEL / "AckProtocol.tla").read_text(encoding="utf-8")
    features = set(re.findall(r'"(\w+)"', text.split("AllFeatures == {")[1].split("\n}")[0]))
    assert set().union(*(bounds.features for bounds in SMALL.values())) == features
    assert set().union(*(bounds.links for bounds in SMALL.values())) == {"Reorders", "Duplicates", "Loses", "Lingers"}


def test_every_action_that_no_revert_plants_is_taken_in_some_small_graph():
    planted = {"SwapFirst", "SwapHalf", "DropAnswer", "SendAgain", "ApplyClosed"}
    actions = {action for _, action, _ in disjuncts(Library(MODEL), "MC")}
    assert {label[0] for name in SMALL for label in explored(name)[0].labels} == actions - planted


def test_every_disjunct_of_next_is_labelled():
    module = labelling_module(Library(MODEL), "MC")
    for action in ("Connect", "SendAsyncTo", "AnswerRejected", "LinkDown", "Stray", "ApplyClosed"):
        assert re.search(rf"{action}\((.*)\) /\\ action' = <<\"{action}\", \1>>", module)
