"""Examines a graph: which of a configuration's properties do not hold in it, and a path to each violation."""

from __future__ import annotations

from dataclasses import dataclass

from modelcheck.second.books import BOOK_STEPS, BOOKS
from modelcheck.second.bounds import Bounds
from modelcheck.second.canaries import STATE_CANARIES, STEP_CANARIES
from modelcheck.second.deliveries import DELIVERIES
from modelcheck.second.graph import Graph, Label
from modelcheck.second.invariants import INVARIANTS
from modelcheck.second.liveness import ENDINGS, SPECIFICATIONS, lasting
from modelcheck.second.possible import calls_are_possible
from modelcheck.second.promise import refines, starts
from modelcheck.second.steps import STEPS, Step
from weightsync.errors import ConfigurationError

_REFINEMENT = "RefinesWeightSync"
_POSSIBLE = "CallsArePossible"
_OF_STATES = {**INVARIANTS, **BOOKS, **STATE_CANARIES}
_OF_STEPS = {**STEPS, **BOOK_STEPS, **DELIVERIES, **STEP_CANARIES, _REFINEMENT: refines}
#: The names of all properties with a second reading.
KNOWN = frozenset({*_OF_STATES, *_OF_STEPS, *ENDINGS, _POSSIBLE})


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be checked in the graph of a configuration.

    Attributes:
        bounds: its constants.
        specification: the specification, which gives the fairness.
        names: its invariants and properties.
        deadlock: whether a state without an outgoing edge is an error.
    """

    bounds: Bounds
    specification: str
    names: tuple[str, ...]
    deadlock: bool = False


@dataclass(frozen=True, slots=True)
class Broken:
    """A property that does not hold.

    Attributes:
        name: its name, or "deadlock" for a state without an outgoing edge.
        path: the actions of a shortest path to the violation.
        lasting: the number of states on an infinite walk that violates it, or 0.
    """

    name: str
    path: tuple[Label, ...]
    lasting: int = 0


DEADLOCK = "deadlock"


def unread(question: Question) -> list[str]:
    """The properties and specifications of a question that have no second reading."""
    names = [name for name in question.names if name not in KNOWN]
    return names if question.specification in SPECIFICATIONS else [*names, question.specification]


def examine(graph: Graph, question: Question) -> list[Broken]:
    """The properties that do not hold in a graph.

    Raises:
        ConfigurationError: a property has no second reading, or no behaviour is fair.
    """
    missing = unread(question)
    if missing:
        raise ConfigurationError(
            f"{', '.join(missing)} cannot be checked a second time: spec/modelcheck/second has no reading of it."
        )
    found = [*_states(graph, question), *_steps(graph, question), *_endings(graph, question)]
    if question.deadlock:
        found += [Broken(DEADLOCK, tuple(graph.path(node))) for node in list(graph.stuck)[:1]]
    return sorted(found, key=lambda broken: [*question.names, DEADLOCK].index(broken.name))


def _states(graph: Graph, question: Question) -> list[Broken]:
    found = []
    for name in question.names:
        holds = _OF_STATES.get(name)
        if holds is not None:
            bad = next((at for at, node in enumerate(graph.nodes) if not holds(question.bounds, node)), None)
            if bad is not None:
                found.append(Broken(name, tuple(graph.path(bad))))
    if _POSSIBLE in question.names:
        leaving = enumerate(zip(graph.nodes, graph.leaving, strict=True))
        bad = next(
            (at for at, (node, labels) in leaving if not calls_are_possible(question.bounds, node, labels)), None
        )
        if bad is not None:
            found.append(Broken(_POSSIBLE, tuple(graph.path(bad))))
    return found


def _steps(graph: Graph, question: Question) -> list[Broken]:
    checks = {name: _OF_STEPS[name] for name in question.names if name in _OF_STEPS}
    found = []
    if _REFINEMENT in checks and not starts(question.bounds, graph.nodes[0]):
        found.append(Broken(_REFINEMENT, ()))
        del checks[_REFINEMENT]
    nodes, bounds = graph.nodes, question.bounds
    for (before, after), labels in graph.steps.items() if checks else ():
        step = Step(nodes[before], nodes[after], labels)
        broken = [name for name, holds in checks.items() if not holds(bounds, step)]
        for name in broken:
            del checks[name]
            found.append(Broken(name, (*graph.path(before), labels[0])))
    return found


def _endings(graph: Graph, question: Question) -> list[Broken]:
    fair = SPECIFICATIONS[question.specification](question.bounds)
    found = []
    for name in question.names:
        for condition in ENDINGS[name](question.bounds) if name in ENDINGS else ():
            component = lasting(graph, condition, fair)
            if component is not None:
                found.append(Broken(name, tuple(graph.path(min(component))), len(component)))
                break
    return found
