"""Which parts of a model's text were never evaluated: guards that never let anything by, alternatives never taken.

TLC's coverage names each expression by its place and says how often it was evaluated, once for each action that it is
a part of. An expression whose neighbours have the same count is not named: it stands and falls with what it is in.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from weightsync.model.text import Definition, Library

_COVERED = re.compile(r"^<(\w+) line (\d+), col \d+ to line \d+, col \d+ of module (\w+)(?: \([^)]*\))?>: (\d+):(\d+)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_EVALUATED = re.compile(r"^(\|*)line (\d+), col (\d+) to line (\d+), col (\d+) of module (\w+): (\d+)$")


@dataclass(frozen=True, slots=True)
class Action:
    """How often an action was taken.

    Attributes:
        module: where it is defined.
        name: its name.
        line: its line.
        distinct: steps that led to a state not seen before.
        taken: all steps.
    """

    module: str
    name: str
    line: int
    distinct: int
    taken: int


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A part of a module's text, columns from 1, both ends in it."""

    module: str
    first_line: int
    first_column: int
    last_line: int
    last_column: int

    @property
    def start(self) -> tuple[int, int]:
        """Where it begins."""
        return self.first_line, self.first_column

    @property
    def end(self) -> tuple[int, int]:
        """Where it ends."""
        return self.last_line, self.last_column

    def holds(self, other: Place) -> bool:
        """Whether another place is a part of this one."""
        return self.module == other.module and self.start <= other.start and other.end <= self.end


@dataclass(frozen=True, slots=True)
class Expression:
    """How often an expression was evaluated, as a part of one action.

    Attributes:
        depth: how deep it lies in what is named before it.
        place: where it stands.
        count: how often.
    """

    depth: int
    place: Place
    count: int


@dataclass(frozen=True, slots=True)
class Unreached:
    """A part that was never evaluated.

    Attributes:
        definition: the definition that it is a part of.
        text: what it says, in one line.
        line: where it begins.
    """

    definition: str
    text: str
    line: int


def read_action(text: str) -> Action | None:
    """Read TLC's line about an action."""
    match = _COVERED.match(text)
    if match is None:
        return None
    name, line, module, distinct, taken = match.groups()
    return Action(module, name, int(line), int(distinct), int(taken))


def read_expression(text: str) -> Expression | None:
    """Read TLC's line about an expression."""
    match = _EVALUATED.match(text.strip())
    if match is None:
        return None
    bars, first, column, last, end, module, count = match.groups()
    return Expression(len(bars), Place(module, int(first), int(column), int(last), int(end)), int(count))


def unreached(runs: Iterable[Sequence[Expression]], library: Library, modules: Collection[str]) -> Iterator[Unreached]:
    """Yield each part of the modules that no run evaluated; a part of such a part is not named again."""
    total: Counter[Place] = Counter()
    whole: set[Place] = set()
    for run in runs:
        for here, after in zip(run, [*run[1:], None], strict=True):
            total[here.place] += here.count
            if here.count and (after is None or after.depth <= here.depth):
                whole.add(here.place)
    reached = _bodies(library, whole)
    idle = sorted(place for place, count in total.items() if not count and place.module in modules)
    for place in idle:
        inside = any(other != place and other.holds(place) for other in idle)
        definition = _definition(library, place)
        if not inside and definition is not None and definition.name not in reached:
            yield Unreached(definition.name, _said(library, place), place.first_line)


def _bodies(library: Library, whole: Iterable[Place]) -> set[str]:
    """Return the definitions that were evaluated in all their parts, since what names them was, all parts alike."""
    found = set()
    for place in whole:
        for name in _NAME.findall(_said(library, place)):
            found |= {each.name for each in library.reached(place.module, name)}
    return found


def _definition(library: Library, place: Place) -> Definition | None:
    module = library.module(place.module)
    found = module.definitions.values() if module else ()
    return next((each for each in found if each.first_line <= place.first_line <= each.last_line), None)


def _said(library: Library, place: Place) -> str:
    module = library.module(place.module)
    assert module is not None
    lines = module.text.split("\n")[place.first_line - 1 : place.last_line]
    lines[-1] = lines[-1][: place.last_column]
    lines[0] = lines[0][place.first_column - 1 :]
    return " ".join(" ".join(lines).split())
