"""How much of the model's graph was replayed over an adapter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from weightsync.protocol.machine import Role
from weightsync.testing.replay_data import Edge, Step, graphs

BROKEN = "an earlier step broke a rule"


@dataclass
class Coverage:
    """The edges of the role projections: all, those replayed, and why others were not."""

    edges: set[Edge] = field(default_factory=set)
    taken: set[Edge] = field(default_factory=set)
    _missed: dict[Edge, str] = field(default_factory=dict)

    def take(self, step: Step) -> None:
        """Record that a step was replayed."""
        if step.edge is not None:
            self.taken.add(step.edge)

    def stop(self, rest: Iterable[Step], why: str) -> None:
        """Record that the rest of a path was not replayed."""
        for step in rest:
            if step.edge is not None:
                self._missed.setdefault(step.edge, why)

    def by_role(self) -> Mapping[str, tuple[int, int]]:
        """For each role, how many edges were replayed, and how many there are."""
        return {role: (_count(self.taken & self.edges, role), _count(self.edges, role)) for role in Role}

    def unreached(self) -> Mapping[str, str]:
        """The edges that were not replayed, in words, each with the reason."""
        missed = sorted(self.edges - self.taken, key=lambda edge: (edge.role, edge.before, edge.label, edge.after))
        return {
            f"{graphs().words(edge)} [{edge.before}.{edge.label}.{edge.after}]": self._missed.get(edge, BROKEN)
            for edge in missed
        }


def _count(edges: Iterable[Edge], role: str) -> int:
    return sum(edge.role == role for edge in edges)
