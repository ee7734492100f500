"""Each property of the second checker rejects a state or step that is changed to break it, and accepts the original."""

from __future__ import annotations

import pytest
from configurations import SMALL
from graph_support import explored
from modelcheck.second import Node
from modelcheck.second.books import BOOK_STEPS, BOOKS
from modelcheck.second.deliveries import DELIVERIES
from modelcheck.second.invariants import INVARIANTS
from modelcheck.second.possible import calls_are_possible
from modelcheck.second.promise import refines
from modelcheck.second.steps import STEPS, Step
from modelcheck.second.words import NO_LINK, Message

from weightsync.protocol._actions import Action

_STEP_PROPERTIES = {**STEPS, **BOOK_STEPS, **DELIVERIES, "RefinesWeightSync": refines}


def _sender(node: Node, **changes) -> Node:
    return node._replace(sdata=(node.sdata[0]._replace(**changes), *node.sdata[1:]))


def _out(node: Node, **changes) -> Node:
    return _sender(node, out=node.sdata[0].out._replace(**changes))


def _entry(node: Node, **changes) -> Node:
    members = node.sdata[0].members
    return _sender(node, members=(members[0]._replace(**changes), *members[1:]))


def _receiver(node: Node, **changes) -> Node:
    return node._replace(rdata=(node.rdata[0]._replace(**changes), *node.rdata[1:]))


def _awaits_an_answer(node: Node) -> bool:
    return node.blocked[0] and node.sdata[0].out.owed[0] != 0


def _serves_version_1(node: Node) -> bool:
    return node.rstate[0] == "ready" and node.rdata[0].served[1] == 1 and node.is_open(1, 1, 1)


#: The property, which states of the graph "two versions" are changed, and how.
STATES = [
    ("TypeOK", _awaits_an_answer, lambda n: n._replace(sstate=("waiting",))),
    ("TypeOK", _awaits_an_answer, lambda n: _out(n, outcomes=("MAYBE",))),
    ("TypeOK", _awaits_an_answer, lambda n: _sender(n, version=3)),
    ("TypeOK", _awaits_an_answer, lambda n: _sender(n, dueAll=n.sdata[0].version + 1)),
    ("TypeOK", _awaits_an_answer, lambda n: _entry(n, link=2)),
    ("TypeOK", _serves_version_1, lambda n: _receiver(n, fence=9)),
    ("TypeOK", _serves_version_1, lambda n: _receiver(n, served=(1, 3, 3))),
    ("TypeOK", _serves_version_1, lambda n: n._replace(messages=frozenset({Message(1, 1, 2, 1, 1)}))),
    ("Consistent", _awaits_an_answer, lambda n: n._replace(blocked=(False,))),
    ("Consistent", _awaits_an_answer, lambda n: n._replace(sstate=("ready",), blocked=(False,))),
    ("Consistent", _awaits_an_answer, lambda n: _out(n, outcomes=("APPLIED",))),
    ("Consistent", _awaits_an_answer, lambda n: _entry(n, link_state="LOST")),
    ("Consistent", _serves_version_1, lambda n: _receiver(n, link=NO_LINK)),
    ("Consistent", _serves_version_1, lambda n: _receiver(n, pending=(1, 2, 2))),
    ("Consistent", _serves_version_1, lambda n: n._replace(gone=((True,),))),
    (
        "EveryMessageHasARow",
        lambda n: any(m.kind == "ACK" for m in n.answers),
        lambda n: n._replace(sstate=("uninitialized",)),
    ),
    (
        "EveryMessageHasARow",
        lambda n: n.rstate == ("ready",) and any(m.v for m in n.messages),
        lambda n: n._replace(rstate=("closed",)),
    ),
    ("SenderBooks", _awaits_an_answer, lambda n: _sender(n, serial=0)),
    ("SenderBooks", _awaits_an_answer, lambda n: _entry(n, due=0)),
    ("ReceiverBooks", _serves_version_1, lambda n: _receiver(n, met=2)),
    ("ReceiverBooks", _serves_version_1, lambda n: _receiver(n, served=(0, 0, 0))),
    (
        "OpenLinksLeadSomewhere",
        lambda n: n.is_open(1, 1, 1) and n.rdata[0].link == NO_LINK,
        lambda n: n._replace(messages=frozenset()),
    ),
    ("NoTornRead", _serves_version_1, lambda n: _receiver(n, live=((1, 1, 1), (1, 2, 2)))),
    (
        "RefusalKeepsServing",
        lambda n: any(m.kind == "REFUSED" and (m.inc, m.v, m.p) == n.rdata[0].decided for m in n.answers),
        lambda n: _receiver(n, served=n.rdata[0].decided),
    ),
    (
        "LateJoinerCatchesUp",
        lambda n: _serves_version_1(n) and not n.messages,
        lambda n: _receiver(n, decided=(1, 0, 0)),
    ),
]


@pytest.mark.parametrize(("name", "which", "change"), STATES)
def test_a_changed_state_violates_its_property(name, which, change):
    nodes = [node for node in explored("two versions")[0].nodes if which(node)]
    assert nodes
    bounds, holds = SMALL["two versions"], (INVARIANTS | BOOKS)[name]
    assert [(holds(bounds, node), holds(bounds, change(node))) for node in nodes] == [(True, False)] * len(nodes)


def _by(action):
    return lambda step: any(label[0] == action for label in step.labels)


def _counts_an_ack(step: Step) -> bool:
    return ("PENDING", "APPLIED") in zip(step.old.sdata[0].out.outcomes, step.new.sdata[0].out.outcomes, strict=True)


def _old(change):
    return lambda step: step._replace(old=change(step.old))


def _new(change):
    return lambda step: step._replace(new=change(step.new))


#: The property, the graph, which of its steps are changed, and how.
CHANGED_STEPS = [
    ("OnlyRows", "two versions", _by(Action.ABANDON), _new(lambda n: n._replace(sstate=("uninitialized",)))),
    ("OnlyRows", "two versions", _by(Action.ANSWERED), _new(lambda n: n._replace(rstate=("pending_async",)))),
    (
        "NothingOvertakes",
        "two versions",
        lambda s: _by(Action.SEND_ALL)(s) and any(m.v == 1 for m in s.old.messages),
        _new(lambda n: n._replace(messages=frozenset(m._replace(p=min(m.p, 1)) for m in n.messages))),
    ),
    ("AckNamesItsVersion", "two versions", _counts_an_ack, _old(lambda n: n._replace(answers=frozenset()))),
    ("AckNamesItsVersion", "two versions", _counts_an_ack, _old(lambda n: _sender(n, incarnation=2))),
    ("AckedMeansServed", "two versions", _counts_an_ack, _old(lambda n: _out(n, did=frozenset()))),
    (
        "AckedMeansServed",
        "two versions",
        lambda s: _by(Action.ANSWERED)(s) and s.old.rdata[0].answer == "ACK",
        _new(lambda n: _receiver(n, served=(0, 0, 0))),
    ),
    (
        "ServingIsMonotone",
        "two versions",
        lambda s: _by(Action.APPLIED)(s) and s.new.rdata[0].served == (1, 1, 1),
        _old(lambda n: _receiver(n, served=(1, 2, 2))),
    ),
    ("ServingIsMonotone", "two versions", _by(Action.APPLIED), _old(lambda n: _receiver(n, met=2))),
    ("OneOutstanding", "two versions", _by(Action.SEND_ALL), _old(lambda n: n._replace(sstate=("pending_async",)))),
    ("ServedChangesByApplied", "two versions", _by(Action.APPLIED), _old(lambda n: n._replace(rstate=("ready",)))),
    ("ServedChangesByApplied", "two versions", _by(Action.APPLIED), _old(lambda n: _receiver(n, pending=(1, 0, 0)))),
    ("OnlyTargetsChange", "two versions", _by(Action.SEND_ALL), _new(lambda n: _out(n, owed=(0,)))),
    (
        "OnlyTargetsChange",
        "two versions",
        lambda s: s.new.rdata[0].pending[1] and _by(Action.UPDATE_ARRIVED)(s),
        _old(lambda n: n._replace(messages=frozenset())),
    ),
    ("CopyOwesNothing", "successors", _by(Action.COPY), _new(lambda n: n._replace(sstate=(n.sstate[0], "ready")))),
    ("CopyOwesNothing", "successors", _by(Action.COPY), _new(lambda n: n._replace(sstate=("nonsense", n.sstate[1])))),
    ("ClosedIsFinal", "ends", _by(Action.CONNECT), _old(lambda n: n._replace(sstate=("closed",)))),
    (
        "OutcomesAreTrue",
        "two versions",
        lambda s: _by(Action.WAIT)(s) and s.new.sstate == ("ready",),
        lambda s: s._replace(labels=()),
    ),
    ("OutcomesAreTrue", "two versions", _by(Action.DEADLINE), _new(lambda n: _out(n, outcomes=("LOST",)))),
    (
        "AnswersSayWhatHappened",
        "two versions",
        _by(Action.ANSWERED),
        _new(lambda n: n._replace(answers=frozenset(m._replace(p=m.p + 1) for m in n.answers))),
    ),
    ("NothingIsLeftUnsaid", "two versions", _by(Action.ANSWERED), _new(lambda n: n._replace(answers=frozenset()))),
    (
        "FencesAreHeeded",
        "ends",
        _by(Action.CONNECT),
        _old(lambda n: _entry(n._replace(sstate=("closed",)), fence=2)),
    ),
    (
        "OnlyTheLivingAct",
        "successors",
        lambda s: s.old.slife[0] == "dead",
        _new(lambda n: n._replace(blocked=(True, *n.blocked[1:]))),
    ),
    (
        "MessagesAreRead",
        "two versions",
        lambda s: _by(Action.UPDATE_ARRIVED)(s) and s.new.rdata[0].pending != s.old.rdata[0].pending,
        _new(lambda n: _receiver(n, pending=(0, 0, 0))),
    ),
    ("AnswersAreRead", "two versions", _counts_an_ack, _new(lambda n: _out(n, outcomes=("REFUSED",)))),
    ("AnswersAreRead", "two versions", _by(Action.ANSWER_HELLO), _new(lambda n: _entry(n, link_state="EXPECTED"))),
    (
        "NetworkKeepsItsWord",
        "two versions",
        lambda s: len(s.old.answers) > 1,
        lambda s: s._replace(new=s.old._replace(answers=frozenset())),
    ),
    (
        "NetworkKeepsItsWord",
        "successors",
        lambda s: s.old.answers,
        lambda s: s._replace(
            new=s.old._replace(answers=s.old.answers | {m._replace(inc=9) for m in s.old.answers}),
        ),
    ),
    ("FarEndsCloseForAReason", "two versions", _by(Action.APPLIED), _new(lambda n: n._replace(gone=((True,),)))),
    (
        "FarEndsCloseForAReason",
        "two versions",
        _by(Action.HELLO_ARRIVED),
        lambda s: s._replace(new=s.old._replace(gone=((True,),))),
    ),
    (
        "DispatchesReachTheirTargets",
        "two versions",
        _by(Action.SEND_ALL),
        _new(lambda n: n._replace(messages=frozenset())),
    ),
    (
        "LinksBeginWhole",
        "crashes",
        lambda s: _by(Action.JOIN)(s) and s.old.sdata[0].incarnation,
        _new(lambda n: n._replace(messages=frozenset())),
    ),
    ("LinksBeginWhole", "crashes", _by(Action.JOIN), _new(lambda n: _entry(n, link_state="UP"))),
    ("LinksEndWhole", "losses", _by(Action.GIVE_UP), _new(lambda n: _entry(n, link=0))),
    ("RefinesWeightSync", "two versions", _by(Action.APPLIED), _new(lambda n: _receiver(n, served=(1, 9, 9)))),
    ("RefinesWeightSync", "two versions", _counts_an_ack, _old(lambda n: _out(n, did=frozenset()))),
    ("RefinesWeightSync", "two versions", _by(Action.DEADLINE), _new(lambda n: n._replace(sstate=("ready",)))),
    (
        "RefinesWeightSync",
        "two versions",
        _by(Action.SEND_ALL),
        _new(lambda n: _sender(n, version=n.sdata[0].version - 1)),
    ),
    ("RefinesWeightSync", "two versions", _by(Action.CONNECT), _old(lambda n: _sender(n, incarnation=2))),
]


@pytest.mark.parametrize(("name", "graph", "which", "change"), CHANGED_STEPS)
def test_a_changed_step_violates_its_property(name, graph, which, change):
    found, bounds = explored(graph)[0], SMALL[graph]
    steps = [Step(found.nodes[a], found.nodes[b], labels) for (a, b), labels in found.steps.items()]
    chosen = [step for step in steps if which(step)]
    assert chosen
    holds = _STEP_PROPERTIES[name]
    assert [(holds(bounds, step), holds(bounds, change(step))) for step in chosen] == [(True, False)] * len(chosen)


def test_every_property_has_a_changed_state_or_step():
    assert {name for name, *_ in STATES} == {*INVARIANTS, *BOOKS}
    assert {name for name, *_ in CHANGED_STEPS} == set(_STEP_PROPERTIES)


@pytest.mark.parametrize("name", ["two versions", "ends", "losses"])
def test_calls_are_possible_rejects_a_state_without_a_required_edge(name):
    """`calls_are_possible` accepts every node with all of its edges.

    For each action but Connect, which it does not require, it rejects some node that lacks an edge of that action.
    """
    graph, bounds = explored(name)[0], SMALL[name]
    missed = set()
    for node, leaving in zip(graph.nodes, graph.leaving, strict=True):
        assert calls_are_possible(bounds, node, leaving)
        missed |= {each[0] for each in leaving if not calls_are_possible(bounds, node, leaving - {each})}
    assert missed >= {label[0] for label in graph.labels} - {Action.CONNECT}
