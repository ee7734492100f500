"""Role projections of the model's graph, and paths that cover them: `replay.json`, rendered by ``spec/replay.py``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from weightsync.protocol._actions import Action
from weightsync.protocol.machine import Role

#: A node of a role's projection, its state first. See `weightsync.testing.projecting`.
Node = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Edge:
    """One transition of one machine."""

    role: str
    before: int
    label: int
    after: int


@dataclass(frozen=True, slots=True)
class Step:
    """One action of the model, and the state of every machine after it."""

    #: The action, and its arguments.
    label: Sequence[Any]
    #: The scenario that needs the same ability of an adapter; empty: the step needs at most that a message is carried.
    needs: str
    #: The nodes by machine; None if it is not alive.
    senders: Sequence[Node | None]
    receivers: Sequence[Node]
    #: The edge of the machine that acts; None if the network acts.
    edge: Edge | None


@dataclass(frozen=True, slots=True)
class Configuration:
    """A small graph of the model."""

    name: str
    senders: int
    workers: int
    #: How its network misbehaves: "Reorders", "Duplicates", "Loses".
    links: frozenset[str]
    #: All edges of its machines.
    edges: frozenset[Edge]
    paths: Sequence[Sequence[Step]]


@dataclass(frozen=True, slots=True)
class Graphs:
    """All configurations."""

    configurations: Mapping[str, Configuration]
    tables: Mapping[str, Any]

    def words(self, edge: Edge) -> str:
        """An edge, in words."""
        nodes = self.tables[f"{edge.role}s"]
        name, *arguments = self.tables["labels"][edge.label]
        before, after = (nodes[at][0] if nodes[at] else "not alive" for at in (edge.before, edge.after))
        return f"{edge.role}, {before}: {name}({', '.join(map(str, arguments))}) -> {after}"


@cache
def graphs() -> Graphs:
    """The contents of the file."""
    read = json.loads(files("weightsync.testing").joinpath("replay.json").read_text(encoding="utf-8"))
    return Graphs({name: _configuration(name, found, read) for name, found in read["configurations"].items()}, read)


def _configuration(name: str, found: Mapping[str, Any], tables: Mapping[str, Any]) -> Configuration:
    return Configuration(
        name,
        found["senders"],
        found["workers"],
        frozenset(found["links"]),
        frozenset(Edge(role, *edge) for role in Role for edge in found[f"{role} edges"]),
        [[_step(row, tables) for row in path] for path in found["paths"]],
    )


def _step(row: Sequence[Any], tables: Mapping[str, Any]) -> Step:
    label, needs, senders, receivers, edge = row
    return Step(
        tables["labels"][label],
        tables["needs"][needs],
        [tables["senders"][number] for number in senders],
        [tables["receivers"][number] for number in receivers],
        Edge(_role(tables["labels"][label]), *edge) if edge else None,
    )


#: The actions of receivers; every other action of a machine is a sender's.
RECEIVERS_ACTIONS = frozenset(
    {
        Action.HELLO_ARRIVED,
        Action.UPDATE_ARRIVED,
        Action.LINK_DOWN,
        Action.APPLIED,
        Action.REFUSED,
        Action.BROKEN,
        Action.ANSWERED,
        Action.CLOSE_RECEIVER,
        Action.CRASH_RECEIVER,
    }
)


def _role(label: Sequence[Any]) -> Role:
    return Role.RECEIVER if label[0] in RECEIVERS_ACTIONS else Role.SENDER
