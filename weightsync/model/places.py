"""Finds parts of a model's text that were never evaluated: guards that never pass, alternatives that are never taken.

TLC's coverage lists expressions by their location with how often each was evaluated, once for each action that
contains it. It omits an expression that has the same count as its neighbours; the enclosing expression's count applies.
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
        module: the module that defines it.
        name: its name.
        line: its line.
        distinct: how many of its steps led to a new state.
        taken: how many steps it took in all.
    """

    module: str
    name: str
    line: int
    distinct: int
    taken: int


@dataclass(frozen=True, slots=True, order=True)
class TextRange:
    """A range of a module's text. Columns count from 1, and both ends are included."""

    module: str
    first_line: int
    first_column: int
    last_line: int
    last_column: int

    @property
    def start(self) -> tuple[int, int]:
        """The line and column of its first character."""
        return self.first_line, self.first_column

    @property
    def end(self) -> tuple[int, int]:
        """The line and column of its last character."""
        return self.last_line, self.last_column

    def holds(self, other: TextRange) -> bool:
        """Whether another range is within this one."""
        return self.module == other.module and self.start <= other.start and other.end <= self.end


@dataclass(frozen=True, slots=True)
class Expression:
    """How often an expression was evaluated as a part of one action.

    Attributes:
        depth: its nesting depth in the expressions listed before it.
        place: its location.
        count: how often it was evaluated.
    """

    depth: int
    place: TextRange
    count: int


@dataclass(frozen=True, slots=True)
class Unreached:
    """A part that was never evaluated.

    Attributes:
        definition: the definition that contains it.
        text: its text, in one line.
        line: its first line.
    """

    definition: str
    text: str
    line: int


def read_action(text: str) -> Action | None:
    """Parse TLC's coverage line for an action."""
    match = _COVERED.match(text)
    if match is None:
        return None
    name, line, module, distinct, taken = match.groups()
    return Action(module, name, int(line), int(distinct), int(taken))


def read_expression(text: str) -> Expression | None:
    """Parse TLC's coverage line for an expression."""
    match = _EVALUATED.match(text.strip())
    if match is None:
        return None
    bars, first, column, last, end, module, count = match.groups()
    return Expression(len(bars), TextRange(module, int(first), int(column), int(last), int(end)), int(count))


def unreached(runs: Iterable[Sequence[Expression]], library: Library, modules: Collection[str]) -> Iterator[Unreached]:
    """Yield the outermost parts of the modules that no run evaluated."""
    total: Counter[TextRange] = Counter()
    whole: set[TextRange] = set()
    for run in runs:
        for here, after in zip(run, [*run[1:], None], strict=True):
            total[here.place] += here.count
            if here.count and (after is None or after.depth <= here.depth):
                whole.add(here.place)
    reached = _evaluated_definitions(library, whole)
    idle = sorted(place for place, count in total.items() if not count and place.module in modules)
    for place in idle:
        inside = any(other != place and other.holds(place) for other in idle)
        definition = _definition(library, place)
        if not inside and definition is not None and definition.name not in reached:
            yield Unreached(definition.name, _text_at(library, place), place.first_line)


def _evaluated_definitions(library: Library, whole: Iterable[TextRange]) -> set[str]:
    """Return the definitions whose parts were all evaluated, because an expression that names them was."""
    found = set()
    for place in whole:
        for name in _NAME.findall(_text_at(library, place)):
            found |= {each.name for each in library.reached(place.module, name)}
    return found


def _definition(library: Library, place: TextRange) -> Definition | None:
    module = library.module(place.module)
    found = module.definitions.values() if module else ()
    return next((each for each in found if each.first_line <= place.first_line <= each.last_line), None)


def _text_at(library: Library, place: TextRange) -> str:
    module = library.module(place.module)
    assert module is not None
    lines = module.text.split("\n")[place.first_line - 1 : place.last_line]
    lines[-1] = lines[-1][: place.last_column]
    lines[0] = lines[0][place.first_column - 1 :]
    return " ".join(" ".join(lines).split())
