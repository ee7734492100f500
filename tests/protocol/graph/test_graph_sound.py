"""The second checker verifies the guarantees on the graph of the shipped code, in Python alone, without TLC.

The graph equals that of TLC (see `test_graph`). Where TLC is installed, both checkers check the model
(`check --second all`).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from configurations import SMALL
from graph_support import ASKED, explored
from modelcheck.second import Question, examine
from modelcheck.second.books import BOOK_STEPS, BOOKS
from modelcheck.second.deliveries import DELIVERIES
from modelcheck.second.invariants import INVARIANTS
from modelcheck.second.liveness import ENDINGS
from modelcheck.second.steps import STEPS
from msgspec.structs import replace as changed
from search import search

from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending
from weightsync.protocol._tables import GUARANTEES, SenderInput, State

SAFETY = (*INVARIANTS, *BOOKS, *STEPS, *BOOK_STEPS, *DELIVERIES, "RefinesWeightSync")
#: Not checked with stray answers: one comes after later messages of an ordered link, or is on a link that has ended.
NOT_CHECKED_WITH_STRAY_ANSWERS = {"NothingOvertakes", "LinksEndWhole"}
#: What must end without a clock, for each configuration. Not where messages are lost or stray, since their reader then
#: waits forever; nor where answers are cut from links that may, but need not, be given up. In "ends" a sender may close
#: while a joiner catches up, and the joiner's answer is then owed forever.
ENDS_WITHOUT_A_CLOCK = {
    name: [ending for ending in ENDINGS if not (name == "ends" and ending == "JoinersAnswer")]
    for name in SMALL
    if name not in {"lost", "copies", "cut off"}
}


def violated(graph, bounds, specification, names):
    return [each.name for each in examine(graph, Question(bounds, specification, tuple(names)))]


@pytest.mark.parametrize("name", ASKED)
def test_the_graph_of_the_code_satisfies_all_safety_properties(name):
    names = [
        each for each in SAFETY if "stray" not in SMALL[name].features or each not in NOT_CHECKED_WITH_STRAY_ANSWERS
    ]
    assert violated(explored(name)[0], SMALL[name], "Safe", names) == []


@pytest.mark.parametrize("name", [each for each in ASKED if each.values[0] in ENDS_WITHOUT_A_CLOCK])
def test_the_graph_of_the_code_satisfies_the_liveness_properties_without_a_clock(name):
    assert violated(explored(name)[0], SMALL[name], "ByTheWorld", ENDS_WITHOUT_A_CLOCK[name]) == []


@pytest.mark.parametrize("name", [name for name in SMALL if "deadline" in SMALL[name].features])
def test_every_send_of_the_code_ends_if_deadlines_pass(name):
    assert violated(explored(name)[0], SMALL[name], "ByTheClock", ["EverySendEnds"]) == []


@pytest.mark.parametrize("name", ["lost", "copies"])
def test_without_a_clock_a_send_may_never_end_if_messages_are_lost_or_stray(name):
    assert violated(explored(name)[0], SMALL[name], "ByTheWorld", ["EverySendEnds"]) == ["EverySendEnds"]


@pytest.mark.parametrize("conjunct", ["Reads", "Applied", "Answered", "Hears", "Notice"])
def test_each_fairness_condition_is_needed_for_every_send_to_end(conjunct):
    unfair = replace(SMALL["crashes"], unfair=frozenset({conjunct}))
    assert violated(explored("crashes")[0], unfair, "ByTheWorld", ["EverySendEnds"]) == ["EverySendEnds"]


def test_the_second_checker_has_a_property_for_each_guarantee():
    assert {guarantee.name for guarantee in GUARANTEES.values()} <= {*SAFETY, *ENDINGS}


# -------------------------------------------------------------------------------- faults that must be found


def _wait_never_settled(monkeypatch):
    before = sending.name
    change = {SenderInput.WAIT_SETTLED: SenderInput.WAIT}
    monkeypatch.setattr(sending, "name", lambda *args: change.get(before(*args), before(*args)))


def _patched(half, function, change):
    def plant(monkeypatch):
        before = getattr(half, function)
        monkeypatch.setattr(half, function, lambda *args: change(before, *args))

    return plant


def _fence_falls(advance, named, data, event):
    after, effects = advance(named, data, event)
    return (changed(after, fence=0) if isinstance(event, receiving.LinkDown) else after), effects


def _refusals_forgotten(advance, named, data, event):
    after, effects = advance(named, data, event)
    return (changed(after, decided=data.decided) if isinstance(event, receiving.Refused) else after), effects


def _served_though_refused(advance, named, data, event):
    after, effects = advance(named, data, event)
    return (changed(after, served=data.pending) if isinstance(event, receiving.Refused) else after), effects


def _acked_though_not_served(advance, named, data, event):
    after, effects = advance(named, data, event)
    return (changed(after, served=data.served) if isinstance(event, receiving.Applied) else after), effects


def _version_used_again(advance, named, data, event):
    after, effects = advance(named, data, event)
    return (changed(after, version=data.version - 1) if isinstance(event, sending.Abandon) else after), effects


def _joiner_gets_nothing(join, data, worker, link):
    after, effects = join(data, worker, link)
    return after, tuple(changed(each, due=0) if isinstance(each, sending.Greet) else each for each in effects)


def _dispatched_to_all_workers(dispatch, data, targets):
    after, _ = dispatch(data, targets)
    every = [sending.Dispatch(w, e.link, after.version) for w, e in data.workers.items() if e.link_state.name != "LOST"]
    return after, tuple(every)


def _lost_counts_as_abandoned(lost, entry):
    return changed(lost(entry), kind=sending.OutcomeKind.ABANDONED)


def _close_keeps_the_update_outstanding(advance, named, data, event):
    after, effects = advance(named, data, event)
    return (changed(after, outstanding=data.outstanding) if isinstance(event, sending.Close) else after), effects


FAULTS = {
    "EverySendEnds": (_wait_never_settled, "two versions"),
    "ServingIsMonotone": (_patched(receiving, "_advance", _fence_falls), "successors"),
    "RefusalKeepsServing": (_patched(receiving, "_advance", _refusals_forgotten), "duplicated"),
    "ServedChangesByApplied": (_patched(receiving, "_advance", _served_though_refused), "losses"),
    "AckedMeansServed": (_patched(receiving, "_advance", _acked_though_not_served), "two versions"),
    "AckNamesItsVersion": (_patched(sending, "_advance", _version_used_again), "two versions"),
    "LateJoinerCatchesUp": (_patched(sending, "_join", _joiner_gets_nothing), "crashes"),
    "OnlyTargetsChange": (_patched(sending, "_dispatch", _dispatched_to_all_workers), "two workers"),
    "OutcomesAreTrue": (_patched(sending, "ended", _lost_counts_as_abandoned), "losses"),
    "RefinesWeightSync": (_patched(sending, "ended", _lost_counts_as_abandoned), "losses"),
    "Consistent": (_patched(sending, "_advance", _close_keeps_the_update_outstanding), "ends"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_code_violates_its_property(monkeypatch, name):
    plant, configuration = FAULTS[name]
    plant(monkeypatch)
    graph, bounds = search(SMALL[configuration]), SMALL[configuration]
    assert name in violated(graph, bounds, "ByTheWorld", [*SAFETY, "EverySendEnds"])


_ROW = (State.PENDING_ASYNC, SenderInput.REPLY)


def test_a_row_that_ends_an_update_without_a_report_violates_outcomes_are_true(monkeypatch):
    rows = dict(sending.SENDER_ROWS) | {_ROW: State.READY}
    monkeypatch.setattr(sending, "SENDER_ROWS", rows)
    graph = search(SMALL["two versions"])
    assert "OutcomesAreTrue" in violated(graph, SMALL["two versions"], "Safe", SAFETY)
