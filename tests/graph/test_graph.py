"""The shipped machines and the model that TLC checks are one graph: the same nodes, the same labelled edges.

The search calls the shipped `step`, its naming of inputs included, not the table. What the pages of the protocol say is
checked by TLC of the model; so it holds of the code, within the same bounds.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from configurations import CONFIGURATIONS, committed, config, digest
from missing import java_and_tlc
from search import difference, graph_of, labelling_module, run_tlc, search

from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending

MODEL = Path(__file__).parents[2] / "tla"
names = pytest.mark.parametrize("name", CONFIGURATIONS)


@names
def test_the_code_has_the_committed_graph(name):
    assert digest(search(CONFIGURATIONS[name])) == committed()[name]


@pytest.mark.tlc
@names
def test_the_code_and_the_model_have_the_same_graph(name, tmp_path):
    tools = java_and_tlc("THE MODEL'S GRAPH AGAINST THE CODE'S")
    output = run_tlc(tools.java, tools.jar, MODEL, config(CONFIGURATIONS[name]), tmp_path)
    graph, labels = graph_of(output)
    assert all(labels), "an edge that no action explains"
    assert difference(search(CONFIGURATIONS[name]), graph) == ""
    distinct = re.findall(r"(\d+) distinct states found", output)[-1]
    assert len(graph[0]) == int(distinct)


def test_every_feature_of_the_model_is_in_some_graph():
    text = (MODEL / "AckProtocol.tla").read_text(encoding="utf-8")
    features = set(re.findall(r'"(\w+)"', text.split("AllFeatures == {")[1].split("\n}")[0]))
    assert set().union(*(bounds.features for bounds in CONFIGURATIONS.values())) == features


def test_every_disjunct_of_next_is_labelled():
    text = (MODEL / "AckProtocol.tla").read_text(encoding="utf-8")
    module = labelling_module(text)
    for action in ("Connect", "SendAsyncTo", "AnswerRejected", "LinkDown", "Stray", "ApplyClosed"):
        assert f'"{action}"' in module


# --------------------------------------------------------------------------------------- faults that must show


def _anything_is_current(monkeypatch):
    monkeypatch.setattr(sending, "_current", lambda data, worker, link: worker in data.roll)


def _refusals_are_forgotten(monkeypatch):
    before = receiving._advance

    def forgetting(named, data, event):
        after, effects = before(named, data, event)
        return (replace(after, decided=data.decided) if isinstance(event, receiving.Refused) else after), effects

    monkeypatch.setattr(receiving, "_advance", forgetting)


def _a_wait_never_finds_it_settled(monkeypatch):
    before = sending.name
    settled = sending.SenderInput.WAIT_SETTLED
    monkeypatch.setattr(
        sending, "name", lambda *args: sending.SenderInput.WAIT if before(*args) is settled else before(*args)
    )


def _the_fence_falls_with_the_link(monkeypatch):
    before = receiving._advance

    def falling(named, data, event):
        after, effects = before(named, data, event)
        return (replace(after, fence=0) if isinstance(event, receiving.LinkDown) else after), effects

    monkeypatch.setattr(receiving, "_advance", falling)


def _a_joiner_gets_nothing(monkeypatch):
    before = sending._join

    def lazy(data, worker, link):
        after, effects = before(data, worker, link)
        return after, tuple(sending.Greet(e.worker, e.link, 0) for e in effects if isinstance(e, sending.Greet))

    monkeypatch.setattr(sending, "_join", lazy)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (_anything_is_current, "lingering"),
        (_refusals_are_forgotten, "losses"),
        (_a_wait_never_finds_it_settled, "two versions"),
        (_the_fence_falls_with_the_link, "successors"),
        (_a_joiner_gets_nothing, "crashes"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__.strip("_"),
)
def test_a_fault_in_a_pure_half_changes_the_graph(monkeypatch, fault, name):
    fault(monkeypatch)
    try:
        found = digest(search(CONFIGURATIONS[name]))
    except Exception:  # noqa: BLE001 - a machine in pieces is found out too
        return
    assert found != committed()[name]
