"""A labelled graph of the model's states, whoever made it: TLC, or the shipped machines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from modelcheck.second.words import Node

#: An action's name and its arguments.
Label: TypeAlias = "tuple[str | int | frozenset[int], ...]"


@dataclass
class Graph:
    """Nodes and labelled edges by their numbers; node 0 is where everything starts.

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
        """The pairs of different nodes that an edge joins, and by which actions."""
        found: dict[tuple[int, int], tuple[Label, ...]] = {}
        for before, label, after in self.edges:
            if before != after:
                found[before, after] = (*found.get((before, after), ()), self.labels[label])
        return found

    @cached_property
    def successors(self) -> list[list[int]]:
        """Where each node's edges lead, itself not counted."""
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
        """The nodes that no edge leaves."""
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
        """The longest shortest path from the start, in states."""
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


def components(among: Iterable[int], successors: Callable[[int], Iterable[int]]) -> Iterator[list[int]]:
    """The strongly connected components of a part of a graph (Tarjan's, without recursion).

    Args:
        among: the nodes of that part.
        successors: the nodes of that part that a node's edges lead to.
    """
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    for root in among:
        if root in index:
            continue
        work: list[tuple[int, Iterator[int]]] = []
        _enter(root, index, low, stack, on_stack)
        work.append((root, iter(successors(root))))
        while work:
            node, rest = work[-1]
            for after in rest:
                if after not in index:
                    _enter(after, index, low, stack, on_stack)
                    work.append((after, iter(successors(after))))
                    break
                if after in on_stack:
                    low[node] = min(low[node], index[after])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    yield _leave(node, stack, on_stack)


def _enter(node: int, index: dict[int, int], low: dict[int, int], stack: list[int], on_stack: set[int]) -> None:
    index[node] = low[node] = len(index)
    stack.append(node)
    on_stack.add(node)


def _leave(node: int, stack: list[int], on_stack: set[int]) -> list[int]:
    found = []
    while True:
        member = stack.pop()
        on_stack.discard(member)
        found.append(member)
        if member == node:
            return found
