"""The kit replays the model's graph: its paths are current, take every edge, and find drivers that differ."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from local_links import local_pair
from msgspec.structs import replace

from weightsync import StateError
from weightsync.engine.sender_driver import SenderDriver
from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending
from weightsync.protocol._tables import Delivery
from weightsync.testing import Ends, Nonconforming, Rule, check_transport
from weightsync.testing.replay_data import graphs

ROOT = Path(__file__).parents[3]
GRAPHS = [f"the graph of {name}" for name in graphs().configurations]


def connect(delivery: Delivery = Delivery.ORDERED) -> Any:
    def over(model_id: str) -> Ends:
        first, second = local_pair(delivery)
        return Ends(first, second, cut=first.network.cut)

    return over


def test_the_committed_paths_equal_those_rendered_from_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """`spec/replay.py` renders the paths from the same search that is compared with TLC's graph."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "spec"), *sys.path])
    spec = importlib.util.spec_from_file_location("spec_replay", ROOT / "spec" / "replay.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    assert module.rendered() == module.TARGET.read_text(encoding="utf-8")


@pytest.mark.parametrize("configuration", graphs().configurations.values(), ids=lambda each: each.name)
def test_the_replayed_paths_take_every_edge_of_both_roles(configuration: Any) -> None:
    taken = {step.edge for path in configuration.paths for step in path if step.edge is not None}

    assert taken == configuration.edges
    assert {edge.role for edge in taken} == {"sender", "receiver"}


def test_the_result_lists_edges_reached_and_edges_not_reached_with_the_reason() -> None:
    whole = check_transport(connect(), only=["the graph of losses"], patience=5.0)
    assert whole.unreached == {}
    assert all(taken == of > 0 for taken, of in whole.covered.values())

    declared = {"a cut with an update outstanding": "nothing can be cut", "a cut": "nothing can be cut"}
    part = check_transport(
        lambda model_id: Ends(*local_pair()), unreachable=declared, only=["the graph of losses"], patience=5.0
    )
    assert set(part.unreached.values()) == {"nothing can be cut"}
    assert 0 < part.covered["receiver"][0] < part.covered["receiver"][1]
    assert f"{len(part.unreached)} edges were not reached: nothing can be cut" in str(part)


def test_a_graph_is_replayed_only_over_links_with_its_delivery() -> None:
    found = check_transport(connect(), only=["the graph of duplicated"], patience=5.0)
    assert "links of delivery ORDERED do not" in found.beside["the graph of duplicated"]

    found = check_transport(connect(Delivery.BEST_EFFORT), only=GRAPHS, patience=5.0)
    assert found.passed == ("the graph of lost",)


# ------------------------------------------------------------------------------------- drivers that differ


def _a_broken_model_says_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "_fail", lambda data, link, *_: (receiving.Leave(link),))


def _a_lost_worker_is_no_longer_a_member(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sending._lose_link

    def forgetting(data: Any, worker: int, *rest: Any) -> Any:
        after, effects = before(data, worker, *rest)
        return replace(after, workers={w: e for w, e in after.workers.items() if w != worker}), effects

    monkeypatch.setattr(sending, "_lose_link", forgetting)


def _a_wait_for_nothing_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = SenderDriver.take

    def lenient(self: Any, event: Any) -> Any:
        nothing = isinstance(event, sending.Wait) and self.data.outstanding is None
        return None if nothing else before(self, event)

    monkeypatch.setattr(SenderDriver, "take", lenient)


def _a_refused_send_uses_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = SenderDriver.dispatch

    def wasteful(self: Any, event: Any, packed: Any) -> int:
        try:
            return before(self, event, packed)
        except StateError:
            self.data = replace(self.data, version=self.data.version + 1)
            raise

    monkeypatch.setattr(SenderDriver, "dispatch", wasteful)


@pytest.mark.parametrize(
    ("fault", "graph", "rule"),
    [
        (_a_broken_model_says_goodbye, "ends", Rule.ARRIVES),
        (_a_lost_worker_is_no_longer_a_member, "losses", Rule.STATE),
        (_a_wait_for_nothing_is_ignored, "one version", Rule.STATE),
        (_a_refused_send_uses_a_version, "one version", Rule.STATE),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)).strip("_"),
)
def test_the_replay_finds_a_fault_in_a_driver(
    monkeypatch: pytest.MonkeyPatch, fault: Any, graph: str, rule: Rule
) -> None:
    fault(monkeypatch)
    with pytest.raises(Nonconforming) as refused:
        check_transport(connect(), only=[f"the graph of {graph}"], patience=2.0)

    assert refused.value.rules == {rule}
