"""Immutable mappings by worker id: an update of one value costs about the same however many workers there are.

A mapping of up to `SMALL` workers is a plain dict, copied whole. A larger one is a tree, and a new value copies the
path to it: one node of 32 children or less on each level. The mapping before stays as it was.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import Final, TypeVar, final

Value = TypeVar("Value")

_BITS: Final = 5
_FAN_OUT: Final = 1 << _BITS
#: Up to this many workers, a plain dict is copied.
SMALL: Final = _FAN_OUT

#: Children, by the next bits of the id; or up to `_FAN_OUT` workers.
_Node = tuple["_Node[Value]", ...] | dict[int, Value]
_Path = list[tuple[tuple[_Node[Value], ...], int]]


@final
class Tree(Mapping[int, Value]):
    """A mapping of many workers, in the order of their ids. It never changes."""

    __slots__ = ("_root", "_size")

    def __init__(self, root: _Node[Value], size: int) -> None:
        self._root = root
        self._size = size

    def __getitem__(self, worker: int) -> Value:
        node, bits = self._root, worker
        while isinstance(node, tuple):
            node, bits = node[bits & _FAN_OUT - 1], bits >> _BITS
        return node[worker]

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        return iter(self._plain())

    def items(self) -> ItemsView[int, Value]:
        """Each worker and its value, as a dict has them: no call for each."""
        return self._plain().items()

    def values(self) -> ValuesView[Value]:
        """Each worker's value."""
        return self._plain().values()

    def _plain(self) -> dict[int, Value]:
        found: dict[int, Value] = {}
        nodes = [self._root]
        while nodes:
            node = nodes.pop()
            if isinstance(node, tuple):
                nodes.extend(node)
            else:
                found.update(node)
        return dict(sorted(found.items()))

    def __repr__(self) -> str:
        return repr(self._plain())


def put(values: Mapping[int, Value], worker: int, value: Value) -> Mapping[int, Value]:
    """A copy of the mapping with this value for a worker."""
    if type(values) is not Tree:
        if len(values) < SMALL:
            return {**values, worker: value}
        values = Tree(_grown(dict(values), 0), len(values))
    path, leaf = _path(values._root, worker)
    after = {**leaf, worker: value}
    node = _grown(after, _BITS * len(path)) if len(after) > _FAN_OUT else after
    return Tree(_replaced(path, node), values._size + len(after) - len(leaf))


def drop(values: Mapping[int, Value], worker: int) -> Mapping[int, Value]:
    """The mapping without a worker.

    Raises:
        KeyError: it is not in there.
    """
    if type(values) is not Tree:
        if len(values) <= SMALL:
            rest = dict(values)
            del rest[worker]
            return rest
        values = Tree(_grown(dict(values), 0), len(values))
    path, leaf = _path(values._root, worker)
    rest = dict(leaf)
    del rest[worker]
    return Tree(_replaced(path, rest), values._size - 1)


def _path(node: _Node[Value], worker: int) -> tuple[_Path[Value], dict[int, Value]]:
    """The nodes above a worker's leaf, each with the number of the child that leads there, and the leaf."""
    path, bits = [], worker
    while isinstance(node, tuple):
        at = bits & _FAN_OUT - 1
        path.append((node, at))
        node, bits = node[at], bits >> _BITS
    return path, node


def _replaced(path: _Path[Value], node: _Node[Value]) -> _Node[Value]:
    """The root once `node` is at the end of the path."""
    for above, at in reversed(path):
        node = (*above[:at], node, *above[at + 1 :])
    return node


def _grown(values: dict[int, Value], shift: int) -> _Node[Value]:
    """The node of these workers: divided by the next bits of their ids while there are too many for one."""
    if len(values) <= _FAN_OUT:
        return values
    children: list[dict[int, Value]] = [{} for _ in range(_FAN_OUT)]
    for worker, value in values.items():
        children[worker >> shift & _FAN_OUT - 1][worker] = value
    return tuple(_grown(child, shift + _BITS) for child in children)
