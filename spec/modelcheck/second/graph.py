"""A labelled graph of the model's states, made by TLC or by the shipped machines."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import networkx

from modelcheck.second.words import Node

#: An action's name and its arguments.
Label: TypeAlias = "tuple[str | int | frozenset[int], ...]"


@dataclass
class Graph:
    """Nodes and labelled edges, by their numbers. Node 0 is the initial state.

    Attributes:
        nodes: the states.
        labels: the different labels.
        edges: (from, label, to), each once.
    """

    nodes: list[Node] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    edges: dict[tuple[int, int, int], None] = field(default_factory=dict)

    @cached_property
    def steps(self) -> dict[tuple[int, int], tuple[Label, ...]]:
        """For each pair of different nodes that edges join, the labels of these edges."""
        found: dict[tuple[int, int], tuple[Label, ...]] = {}
        for before, label, after in self.edges:
            if before != after:
                found[before, after] = (*found.get((before, after), ()), self.labels[label])
        return found

    @cached_property
    def successors(self) -> list[list[int]]:
        """The successors of each node, without the node itself."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for before, after in self.steps:
            found[before].append(after)
        return found

    @cached_property
    def leaving(self) -> list[frozenset[Label]]:
        """The labels of the edges that leave each node."""
        found: list[set[Label]] = [set() for _ in self.nodes]
        for before, label, _ in self.edges:
            found[before].add(self.labels[label])
        return list(map(frozenset, found))

    @property
    def stuck(self) -> Iterator[int]:
        """The nodes without an outgoing edge."""
        left = {before for before, _, _ in self.edges}
        return (node for node in range(len(self.nodes)) if node not in left)

    @cached_property
    def _tree(self) -> dict[int, int]:
        """Each node's predecessor on a shortest path from the start."""
        came: dict[int, int] = {0: 0}
        waiting = deque([0])
        while waiting:
            node = waiting.popleft()
            for after in self.successors[node]:
                if after not in came:
                    came[after] = node
                    waiting.append(after)
        return came

    @cached_property
    def depth(self) -> int:
        """The greatest distance of a node from the start, counted in states."""
        far = {0: 1}
        for node, before in self._tree.items():
            far.setdefault(node, far[before] + 1)
        return max(far.values())

    def path(self, node: int) -> list[Label]:
        """The actions of a shortest path from the start to a node."""
        found: list[Label] = []
        while node != 0:
            before = self._tree[node]
            found.append(self.steps[before, node][0])
            node = before
        return found[::-1]


def components(among: Collection[int], successors: Sequence[Iterable[int]]) -> Iterator[set[int]]:
    """The strongly connected components of a part of a graph.

    Args:
        among: the nodes of the part.
        successors: the successors of each node, inside the part or outside.
    """
    part = networkx.DiGraph((node, after) for node in among for after in successors[node] if after in among)
    part.add_nodes_from(among)
    yield from networkx.strongly_connected_components(part)
