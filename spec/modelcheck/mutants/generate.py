"""Generates the mutants of a module: each has one operator applied at one place, and is named after the change."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from modelcheck.mutants.operators import OPERATORS, Site, assigned, settled
from modelcheck.mutants.source import Source
from modelcheck.mutants.syntax import Kind, Node, Path

_LONGEST = 90


@dataclass(frozen=True, slots=True)
class Mutant:
    """One edit of one definition.

    Attributes:
        name: definition, operator and changed text; stable as long as these are.
        definition: the changed definition.
        operator: the operator.
        before: the text before the change.
        after: the text after it.
        tree: the definition with the edit.
    """

    name: str
    definition: str
    operator: str
    before: str
    after: str
    tree: Node


def mutants(source: Source, skipped: Collection[str]) -> tuple[Mutant, ...]:
    """Return all mutants of a module's definitions, in the order of its text.

    Args:
        source: the definitions.
        skipped: definitions that are not changed.
    """
    primed = _primed(source)
    found: list[Mutant] = []
    seen: Counter[str] = Counter()
    for definition, tree in source.trees.items():
        texts = {str(tree)}
        for operator, before, after, edited in _edits(tree, primed) if definition not in skipped else ():
            if str(edited) not in texts:
                texts.add(str(edited))
                stem = f"{definition}: {operator} {_short(before)} -> {_short(after)}"
                seen[stem] += 1
                name = stem if seen[stem] == 1 else f"{stem} #{seen[stem]}"
                found.append(Mutant(name, definition, operator, before, after, edited))
    return tuple(found)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _short(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 10]}... {_digest(text) % 16**6:06x}"


def _edits(tree: Node, primed: Mapping[str, frozenset[str]]) -> Iterator[tuple[str, str, str, Node]]:
    for path, node in tree.walk():
        above = tuple(tree.at(path[:length]) for length in range(len(path)))
        if _about_rules(node, above, path):
            continue
        site = Site(node, path, above, primed)
        for label, operator in OPERATORS.items():
            for other in operator(site):
                before, after = _difference(node, other)
                yield label, before, after, tree.put(path, other)


def _difference(node: Node, other: Node) -> tuple[str, str]:
    """Return the changed text; if a part of a list is removed, only that part."""
    if node.kind in (Kind.OR, Kind.CASE):
        rest = other.parts if other.kind is node.kind else (other,)
        gone = [part for part in node.parts if part not in rest]
        if len(gone) == 1:
            return str(gone[0]), "nothing"
    return str(node), str(other)


def _about_rules(node: Node, above: tuple[Node, ...], path: Path) -> bool:
    """Whether a node exists only for the reverts: the name of a rule, or what happens without it."""
    chain = (*above, node)
    if any(settled(part) is not None for part in chain):
        return True
    beside = [(part.parts[0], path[place]) for place, part in enumerate(above) if part.kind is Kind.IF]
    return any(step and settled(condition) is (step == 2) for condition, step in beside)


def _primed(source: Source) -> dict[str, frozenset[str]]:
    """Return the variables that each definition assigns, directly or indirectly."""
    found: dict[str, frozenset[str]] = {}
    changed = True
    while changed:
        changed = False
        for definition, tree in source.trees.items():
            now = assigned(tree, found)
            if now != found.get(definition, frozenset()):
                found[definition] = now
                changed = True
    return found
