"""The graph of a configuration, with the scenario that a transport needs for each step, and its role projections."""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).parents[2] / "tests" / "protocol" / "graph"))

from machines import forget
from modelcheck.second import Bounds
from modelcheck.second.words import Receiver, Sender
from network import World, is_open, link_of, start
from search import projected, successors

from weightsync.protocol._actions import Action
from weightsync.protocol._tables import State

__all__ = ["NEEDS", "Graph", "Label", "Spot", "Step", "graph_of", "machines"]

#: Scenarios of the conformance kit. A step may need a transport that supports one of them.
CUT: Final = "a cut with an update outstanding"
SENDER_LOST: Final = "the sender is lost"
SENDER_BYE: Final = "the sender says bye"
LAST_WORDS: Final = "the sender's last words"
WORKER_LOST: Final = "a worker is lost"
WORKER_GONE: Final = "a receiver that is gone"
WORKER_BYE: Final = "a worker says bye"
IDLE_BYE: Final = "an idle worker says bye"
NEEDS: Final = (CUT, SENDER_LOST, SENDER_BYE, LAST_WORDS, WORKER_LOST, WORKER_GONE, WORKER_BYE, IDLE_BYE)

Pair = tuple[int, int]
Label = tuple[Any, ...]
#: The actions of each role. All others are the network's.
SENDERS: Final = frozenset(
    {
        Action.DIE, Action.CONNECT, Action.JOIN, Action.REMOVE, Action.SEND_ALL, Action.SEND_TO, Action.SEND_ASYNC_ALL,
        Action.SEND_ASYNC_TO, Action.WAIT, Action.DEADLINE, Action.INTERRUPTED, Action.ABANDON, Action.CLOSE_SENDER,
        Action.NOTICE, Action.GIVE_UP, Action.ANSWER_HELLO, Action.ANSWER_ACK, Action.ANSWER_REFUSAL,
        Action.ANSWER_REJECTED, Action.ANSWER_BYE,
    }
)  # fmt: skip
RECEIVERS: Final = frozenset(
    {
        Action.HELLO_ARRIVED, Action.UPDATE_ARRIVED, Action.LINK_DOWN, Action.APPLIED, Action.REFUSED, Action.BROKEN,
        Action.ANSWERED, Action.CLOSE_RECEIVER, Action.CRASH_RECEIVER, Action.LINK_FAILED, Action.FAIL_RECEIVER,
    }
)  # fmt: skip


#: Actions of a worker that end its link with an unsolicited message.
_LAST_WORDS: Final = frozenset({Action.CLOSE_RECEIVER, Action.FAIL_RECEIVER, Action.LINK_FAILED, Action.BROKEN})


@dataclass(frozen=True)
class Spot:
    """A node of the graph, with its history: how each worker's end closed, and how many calls wait."""

    world: World
    #: For each link whose worker's end is closed, the scenario that is needed to notice it.
    gone: frozenset[tuple[Pair, str]] = frozenset()
    #: For each link, the number of messages to the worker without an answer.
    waiting: frozenset[tuple[Pair, int]] = frozenset()


@dataclass(frozen=True)
class Step:
    """An edge of the graph."""

    label: Label
    needs: str
    to: Spot
    #: (role, projection before, label without the machine's number, projection after). None: a step of the network.
    role: tuple[str, Any, Label, Any] | None


@dataclass
class Graph:
    """All nodes that can be reached from the start."""

    first: Spot
    steps: dict[Spot, list[Step]] = field(default_factory=dict)


def graph_of(bounds: Bounds) -> Graph:
    """The graph of a configuration, by breadth-first search."""
    forget()
    graph = Graph(Spot(start(bounds)))
    todo = deque([graph.first])
    graph.steps[graph.first] = []
    while todo:
        spot = todo.popleft()
        for label, world in sorted(successors(spot.world), key=_by_label):
            step = _step(spot, label, world)
            graph.steps[spot].append(step)
            if step.to not in graph.steps:
                graph.steps[step.to] = []
                todo.append(step.to)
    return graph


def _by_label(edge: tuple[Label, World]) -> list[str]:
    return [repr(sorted(each) if isinstance(each, frozenset) else each) for each in edge[0]]


def _step(spot: Spot, label: Label, after: World) -> Step:
    before = spot.world
    waiting = dict(spot.waiting)
    for m in after.messages - before.messages:
        waiting[m.s, m.w] = waiting.get((m.s, m.w), 0) + 1
    for m in after.answers - before.answers:
        waiting[m.s, m.w] = max(waiting.get((m.s, m.w), 0) - 1, 0)
    if label[0] == Action.JOIN:
        waiting[label[1], label[2]] = sum(m.s == label[1] and m.w == label[2] for m in after.messages)
    gone = {pair: why for pair, why in spot.gone if pair in after.gone}
    for pair in after.gone - before.gone:
        gone[pair] = _closed(label, spot, pair)
    bye = any(m.kind == "BYE" for m in after.answers)
    needs = _needs(label, before, dict(spot.gone))
    to = Spot(
        after,
        frozenset(gone.items()),
        frozenset((pair, count) for pair, count in waiting.items() if count and (pair in after.gone or not bye)),
    )
    return Step(label, needs, to, _role(label, before, after))


def _closed(label: Label, spot: Spot, pair: Pair) -> str:
    """The scenario that is needed to notice that the worker's end of a link has just closed."""
    if label[0] == Action.CRASH_RECEIVER:
        return WORKER_LOST if dict(spot.waiting).get(pair) else WORKER_GONE
    if label[0] == Action.LINK_DOWN:
        return CUT
    taken_over = label[0] == Action.HELLO_ARRIVED and label[2] != pair[0]
    if label[0] in _LAST_WORDS or taken_over:
        return WORKER_BYE if dict(spot.waiting).get(pair) else IDLE_BYE
    return WORKER_GONE


def _needs(label: Label, before: World, gone: dict[Pair, str]) -> str:
    match label:
        case (Action.LINK_DOWN, w, s, k):
            if is_open(before, s, w, k):
                return CUT
            if before.trainer(s).life == "dead":
                return SENDER_LOST
            owing = before.worker(w).state is State.AWAITING_ACK and link_of(before, before.worker(w)) == (s, k)
            return LAST_WORDS if owing else SENDER_BYE  # a worker that owes an answer does not read a goodbye
        case (Action.NOTICE, s, w):
            why = gone[s, w]
            return WORKER_GONE if why in (WORKER_BYE, IDLE_BYE) else why
        case (Action.ANSWER_BYE, s, w, _):
            return gone[s, w]
        case (Action.ANSWER_REJECTED, s, w, *_) if gone.get((s, w)) in (WORKER_BYE, IDLE_BYE):
            return gone[s, w]
        case _:
            return ""


def _role(label: Label, before: World, after: World) -> tuple[str, Any, Label, Any] | None:
    name, *rest = label
    if name in SENDERS:
        s = rest[0]
        short = (name, *rest[1:])
        return "sender", machines(before)[0][s - 1], short, machines(after)[0][s - 1]
    if name in RECEIVERS:
        w = rest[0]
        return "receiver", machines(before)[1][w - 1], (name, *rest[1:]), machines(after)[1][w - 1]
    return None


# ---------------------------------------------------------------------------------------------- projections


@cache
def machines(world: World) -> tuple[list[Any], list[Any]]:
    """The projections of all senders (None: not alive) and of all receivers, without ghost variables."""
    node = projected(world)
    alive = zip(node.sstate, node.sdata, node.slife, strict=True)
    senders = [_sender(state, data) if life == "alive" else None for state, data, life in alive]
    return senders, [_receiver(state, data) for state, data in zip(node.rstate, node.rdata, strict=True)]


def _sender(state: str, data: Sender) -> tuple[Any, ...]:
    members = tuple(None if entry.link_state == "NONE" else tuple(entry) for entry in data.members)
    last = (data.out.version, data.out.owed, data.out.outcomes)
    return (state, data.incarnation, data.version, data.dueAll, members, last)


def _receiver(state: str, data: Receiver) -> tuple[Any, ...]:
    keys = (data.decided[:2], data.pending[:2], data.served[:2])
    return (state, data.link, data.fence, *keys, data.answer)
