"""A second reading of the temporal properties, by strongly connected components.

In a finite graph, an infinite behaviour ends in a walk inside one component, or rests in one state. It is fair to an
action if the walk takes a step of that action, or visits a state where the action is disabled. So if any walk in a
component is fair, the one that visits all of it is. ``p`` leads to ``q`` unless some path without ``q`` leads from a
state of ``p`` to a component without ``q`` in which a walk is fair to all actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product

from modelcheck.second.bounds import Bounds
from modelcheck.second.graph import Graph, Label, components
from modelcheck.second.words import Node
from weightsync.errors import ConfigurationError
from weightsync.protocol._actions import Action

Condition = Callable[[Node], bool]


@dataclass(frozen=True, slots=True)
class Fair:
    """A fair action: the names of its labels, and their first arguments."""

    names: frozenset[str]
    arguments: tuple[int, ...]

    def takes(self, label: Label) -> bool:
        """Whether a step with this label is a step of this action."""
        return label[0] in self.names and label[1 : 1 + len(self.arguments)] == self.arguments


_READS = frozenset({Action.HELLO_ARRIVED, Action.UPDATE_ARRIVED})
_HEARS = frozenset(
    {Action.ANSWER_HELLO, Action.ANSWER_ACK, Action.ANSWER_REFUSAL, Action.ANSWER_REJECTED, Action.ANSWER_BYE}
)


def nothing(bounds: Bounds) -> list[Fair]:
    """No fairness: nothing has to happen."""
    return []


def clock(bounds: Bounds) -> list[Fair]:
    """Fairness of time: deadlines pass.

    Raises:
        ConfigurationError: deadlines are not among the features, so no behaviour would be fair.
    """
    if "deadline" not in bounds.features:
        raise ConfigurationError("ByTheClock without the feature deadline: no behaviour is fair, so all would hold.")
    return _each("Deadline", frozenset({Action.DEADLINE}), bounds, product(bounds.all_senders))


def world(bounds: Bounds) -> list[Fair]:
    """Fairness of the world: messages are delivered, workers read, decide and answer, and losses are noticed."""
    workers = list(product(bounds.all_workers))
    links = list(product(bounds.all_senders, bounds.all_workers))
    return [
        *_each("Reads", _READS, bounds, workers),
        *_each("Applied", frozenset({Action.APPLIED}), bounds, workers),
        *_each("SendAck", frozenset({Action.SEND_ACK}), bounds, workers),
        *_each("Answered", frozenset({Action.ANSWERED}), bounds, workers),
        *_each("Hears", _HEARS, bounds, links),
        *_each("Notice", frozenset({Action.NOTICE}), bounds, links),
    ]


def _each(conjunct: str, names: frozenset[str], bounds: Bounds, places: Iterable[tuple[int, ...]]) -> list[Fair]:
    return [] if conjunct in bounds.unfair else [Fair(names, place) for place in places]


#: The fairness of each specification that a configuration may name.
SPECIFICATIONS: Mapping[str, Callable[[Bounds], list[Fair]]] = {
    "Safe": nothing,
    "ByTheClock": clock,
    "ByTheWorld": world,
}


def every_send_ends(bounds: Bounds) -> list[Condition]:
    """G10. No caller waits forever."""
    return [partial(_is_blocked, s=s) for s in bounds.all_senders]


def losses_are_noticed(bounds: Bounds) -> list[Condition]:
    """No link stays open after its other end is closed, so that its worker can come back."""
    return [partial(_is_gone, s=s, w=w) for s, w in product(bounds.all_senders, bounds.all_workers)]


def joiners_answer(bounds: Bounds) -> list[Condition]:
    """G12. No joiner owes the update that followed its Hello forever."""
    return [partial(_is_catching, s=s, w=w) for s, w in product(bounds.all_senders, bounds.all_workers)]


def _is_blocked(node: Node, s: int) -> bool:
    return node.blocked[s - 1]


def _is_gone(node: Node, s: int, w: int) -> bool:
    return node.is_gone(s, w)


def _is_catching(node: Node, s: int, w: int) -> bool:
    return node.entry(s, w).catching != 0


#: The temporal properties by name, each as the conditions that must not last forever.
ENDINGS: Mapping[str, Callable[[Bounds], list[Condition]]] = {
    "EverySendEnds": every_send_ends,
    "LossesAreNoticed": losses_are_noticed,
    "JoinersAnswer": joiners_answer,
}


def lasting(graph: Graph, condition: Condition, fair: list[Fair]) -> set[int] | None:
    """A component in which the condition can hold forever on a fair walk, or None."""
    within = {place for place, node in enumerate(graph.nodes) if condition(node)}
    for component in components(within, graph.successors):
        if all(_is_fair(graph, component, each) for each in fair):
            return component
    return None


def _is_fair(graph: Graph, component: set[int], fair: Fair) -> bool:
    """Whether a walk through the whole component takes the action, or meets a state where it is disabled."""
    for place in component:
        possible = False
        for after in graph.successors[place]:
            if any(fair.takes(label) for label in graph.steps[place, after]):
                possible = True
                if after in component:
                    return True
        if not possible:
            return True
    return False
