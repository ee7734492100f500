"""The syntax trees of a model's definitions, which can be changed and written as text again.

Trees are written without layout and with every operand in brackets, so that columns do not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

#: The path to a node in a tree: the index of the child at each level.
Path = tuple[int, ...]


class Kind(Enum):
    """The kinds of nodes."""

    NAME = "name"
    NUMBER = "number"
    STRING = "string"
    CALL = "call"
    INDEX = "index"
    FIELD = "field"
    PRIME = "prime"
    INFIX = "infix"
    PREFIX = "prefix"
    AND = "and"
    OR = "or"
    QUANTIFIED = "quantified"
    CHOOSE = "choose"
    BOUND = "bound"
    IF = "if"
    CASE = "case"
    ARM = "arm"
    OTHER = "other"
    LET = "let"
    LOCAL = "local"
    EXCEPT = "except"
    UPDATE = "update"
    RECORD = "record"
    ENTRY = "entry"
    FUNCTION = "function"
    RECORDS = "records"
    MEMBERS = "members"
    FUNCTIONS = "functions"
    SET = "set"
    FILTER = "filter"
    MAP = "map"
    TUPLE = "tuple"


@dataclass(frozen=True, slots=True)
class Node:
    """A part of a definition.

    Attributes:
        kind: the kind of node.
        text: its name, operator or value, if it has one.
        parts: its children, in the order of the text.
    """

    kind: Kind
    text: str = ""
    parts: tuple[Node, ...] = ()

    def at(self, path: Path) -> Node:
        """Return the node at a path."""
        return self.parts[path[0]].at(path[1:]) if path else self

    def put(self, path: Path, node: Node) -> Node:
        """Return the tree with the node at a path replaced."""
        if not path:
            return node
        parts = list(self.parts)
        parts[path[0]] = parts[path[0]].put(path[1:], node)
        return replace(self, parts=tuple(parts))

    def walk(self, path: Path = ()) -> Iterator[tuple[Path, Node]]:
        """Yield every node with its path, from the top, in the order of the text."""
        yield path, self
        for place, part in enumerate(self.parts):
            yield from part.walk((*path, place))

    def names(self) -> frozenset[str]:
        """Return the names in the tree."""
        return frozenset(node.text for _, node in self.walk() if node.kind in (Kind.NAME, Kind.CALL))

    def __str__(self) -> str:
        return _WRITERS[self.kind](self)


def name(text: str) -> Node:
    """Return the node of a name."""
    return Node(Kind.NAME, text)


def _tight(node: Node) -> str:
    """Write an operand, in brackets unless its kind is unambiguous without."""
    return str(node) if node.kind in _CLOSED else f"({node})"


def _list(nodes: tuple[Node, ...]) -> str:
    return ", ".join(str(node) for node in nodes)


def _joined(word: str, node: Node) -> str:
    return f" {word} ".join(_tight(part) for part in node.parts)


def _prefix(node: Node) -> str:
    return f"{node.text}{'' if node.text == '~' else ' '}{_tight(node.parts[0])}"


def _except(node: Node) -> str:
    return f"[{node.parts[0]} EXCEPT {_list(node.parts[1:])}]"


def _let(node: Node) -> str:
    return f"LET {' '.join(str(part) for part in node.parts[:-1])} IN {node.parts[-1]}"


def _if(node: Node) -> str:
    condition, then, otherwise = (_tight(part) for part in node.parts)
    return f"IF {condition} THEN {then} ELSE {otherwise}"


_CLOSED = frozenset(
    {
        Kind.NAME, Kind.NUMBER, Kind.STRING, Kind.CALL, Kind.INDEX, Kind.FIELD, Kind.PRIME, Kind.EXCEPT, Kind.RECORD,
        Kind.FUNCTION, Kind.RECORDS, Kind.FUNCTIONS, Kind.SET, Kind.FILTER, Kind.MAP, Kind.TUPLE,
    }
)  # fmt: skip

_WRITERS: dict[Kind, Callable[[Node], str]] = {
    Kind.NAME: lambda node: node.text,
    Kind.NUMBER: lambda node: node.text,
    Kind.STRING: lambda node: node.text,
    Kind.CALL: lambda node: f"{node.text}({_list(node.parts)})",
    Kind.INDEX: lambda node: f"{_tight(node.parts[0])}[{_list(node.parts[1:])}]",
    Kind.FIELD: lambda node: f"{_tight(node.parts[0])}.{node.text}",
    Kind.PRIME: lambda node: f"{_tight(node.parts[0])}'",
    Kind.INFIX: lambda node: f"{_tight(node.parts[0])} {node.text} {_tight(node.parts[1])}",
    Kind.PREFIX: _prefix,
    Kind.AND: lambda node: _joined("/\\", node),
    Kind.OR: lambda node: _joined("\\/", node),
    Kind.QUANTIFIED: lambda node: f"{node.text} {_list(node.parts[:-1])} : {node.parts[-1]}",
    Kind.CHOOSE: lambda node: f"CHOOSE {node.parts[0]} : {node.parts[1]}",
    Kind.BOUND: lambda node: f"{node.text} \\in {_tight(node.parts[0])}",
    Kind.IF: _if,
    Kind.CASE: lambda node: f"CASE {' [] '.join(str(part) for part in node.parts)}",
    Kind.ARM: lambda node: f"{_tight(node.parts[0])} -> {_tight(node.parts[1])}",
    Kind.OTHER: lambda node: f"OTHER -> {_tight(node.parts[0])}",
    Kind.LET: _let,
    Kind.LOCAL: lambda node: f"{node.text} == {_tight(node.parts[0])}",
    Kind.EXCEPT: _except,
    Kind.UPDATE: lambda node: f"{node.parts[0]} = {_tight(node.parts[1])}",
    Kind.RECORD: lambda node: f"[{_list(node.parts)}]",
    Kind.ENTRY: lambda node: f"{node.text} |-> {node.parts[0]}",
    Kind.FUNCTION: lambda node: f"[{_list(node.parts[:-1])} |-> {node.parts[-1]}]",
    Kind.RECORDS: lambda node: f"[{_list(node.parts)}]",
    Kind.MEMBERS: lambda node: f"{node.text} : {node.parts[0]}",
    Kind.FUNCTIONS: lambda node: f"[{node.parts[0]} -> {node.parts[1]}]",
    Kind.SET: lambda node: f"{{{_list(node.parts)}}}",
    Kind.FILTER: lambda node: f"{{{node.parts[0]} : {node.parts[1]}}}",
    Kind.MAP: lambda node: f"{{{node.parts[0]} : {_list(node.parts[1:])}}}",
    Kind.TUPLE: lambda node: f"<<{_list(node.parts)}>>",
}
