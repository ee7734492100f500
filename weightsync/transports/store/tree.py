"""The shape of a fan-out: from whom each worker gets a payload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Node:
    """A worker that is sent a payload.

    Args:
        host: identifies its host.
        at_loopback: whether only workers of its own host can connect to it.
        passes_on: whether it may be given children.
    """

    host: bytes
    at_loopback: bool = False
    passes_on: bool = True

    def reaches(self, parent: Node) -> bool:
        """Whether it can connect to ``parent``."""
        return not parent.at_loopback or parent.host == self.host


def tree_of(nodes: Sequence[Node], width: int) -> list[int | None]:
    """The parent of each node, by its index; None: the trainer.

    The trainer and each node that passes payloads on have at most ``width`` children. Nodes of one host are mostly one
    another's parents. A node that passes nothing on is a leaf; the trainer has more children only if no other parent
    has room for a leaf.

    Args:
        width: 1 or more.
    """
    parents: list[int | None] = [None] * len(nodes)
    # Those at a loopback come last, so that all their descendants are of their host as well.
    order = sorted(
        (index for index, node in enumerate(nodes) if node.passes_on),
        key=lambda index: (nodes[index].at_loopback, nodes[index].host),
    )
    room_of: dict[int | None, int] = {None: width}
    blocks: list[tuple[int | None, list[int]]] = [(None, order)]
    for parent, block in blocks:  # it grows: breadth first
        for part in _split_evenly(block, width):
            parents[part[0]] = parent
            room_of[parent] -= 1
            room_of[part[0]] = width
            blocks.append((part[0], part[1:]))
    for index, node in enumerate(nodes):
        if not node.passes_on:
            parents[index] = _parent_with_room(nodes, room_of, node)
    return parents


def _split_evenly(block: list[int], count: int) -> Iterator[list[int]]:
    """At most ``count`` neighbouring parts of almost the same size, none of them empty."""
    count = min(count, len(block))
    for number in range(count):
        yield block[number * len(block) // count : (number + 1) * len(block) // count]


def _parent_with_room(nodes: Sequence[Node], room_of: dict[int | None, int], leaf: Node) -> int | None:
    """The first parent that has room for a leaf, which takes it; None: the trainer, with or without room."""
    for parent, room in room_of.items():
        if room and (parent is None or leaf.reaches(nodes[parent])):
            room_of[parent] -= 1
            return parent
    return None
