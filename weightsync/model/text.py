"""Analyses a model's text: the property at a location, which properties are temporal, and known traps of TLC.

This is not a TLA+ parser. It strips comments, takes each definition that starts in the first column of a line, and
follows names through EXTENDS, INSTANCE and ``Name!Definition``. That is enough for plainly written modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from weightsync.errors import ConfigurationError

_DEFINITION = re.compile(r"^(?:LOCAL[ \t]+)?([A-Za-z_]\w*)(?:\([^)\n]*\))?[ \t]*==", re.MULTILINE)
_NEXT_UNIT = re.compile(
    rf"{_DEFINITION.pattern}|^(?:ASSUM|AXIOM|THEOREM|LEMMA|VARIABLE|CONSTANT|RECURSIVE|INSTANCE|LOCAL|----|====)",
    re.MULTILINE,
)
_EXTENDS = re.compile(r"^[ \t]*EXTENDS[ \t]+([\w, \t\n]+?)(?=\n[ \t]*\n|\n\S|\Z)", re.MULTILINE)
_INSTANCE = re.compile(r"\bINSTANCE\s+(\w+)")
_OPEN_INSTANCE = re.compile(r"^(?:LOCAL[ \t]+)?INSTANCE[ \t]+(\w+)", re.MULTILINE)
_NAME = re.compile(r"([A-Za-z_]\w*)(?:\s*\([^()]*\))?\s*!\s*([A-Za-z_]\w*)|([A-Za-z_]\w*)")
_PLACE = re.compile(r"^line (\d+), col \d+ to line \d+, col \d+ of module (\w+)$")
_TEMPORAL = re.compile(r"(?<!<)<>(?!>)|~>|\b[WS]F_|-\+->|(?:=>|~)\s*\[\]|\[\]\s*~?\s*\[\]")
_BOX = re.compile(r"\[\]\s*\(")
_OPEN_TWICE = re.compile(r"\[\s*\[")
_LITERAL_NAME = re.compile(r"\b(\w+)(?:\([^)\n]*\))?\s*==\s*\[[^][|]*\\in\b[^|]*\|->")
_SEQUENCE_OF_LITERAL = re.compile(r"\b(?:Tail|SubSeq|Append)\s*\(\s*\[[^][|]*\\in\b[^|]*\|->")


def without_comments(text: str) -> str:
    """Return the text with its comments replaced by blanks, so that all positions stay the same."""
    kept: list[str] = []
    position = depth = 0
    while position < len(text):
        two = text[position : position + 2]
        if two == "(*":
            depth, step, shown = depth + 1, 2, "  "
        elif depth and two == "*)":
            depth, step, shown = depth - 1, 2, "  "
        elif not depth and two == "\\*":
            step = len(text[position:].partition("\n")[0])
            shown = " " * step
        elif not depth and text[position] == '"':
            step = text.find('"', position + 1) + 1 - position or 1
            step = max(step, 1)
            shown = text[position : position + step]
        else:
            step = 1
            shown = text[position] if not depth or text[position] == "\n" else " "
        kept.append(shown)
        position += step
    return "".join(kept)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"The model's file {path} cannot be read ({error.strerror}).") from error


@dataclass(frozen=True)
class Definition:
    """A definition of a module: its name, its body and its lines."""

    module: str
    name: str
    body: str
    first_line: int
    last_line: int


@dataclass(frozen=True)
class Module:
    """A module's text, with comments replaced by blanks."""

    name: str
    text: str

    @cached_property
    def definitions(self) -> dict[str, Definition]:
        """Its definitions by name."""
        found = {}
        for start in _DEFINITION.finditer(self.text):
            behind = _NEXT_UNIT.search(self.text, start.end())
            end = behind.start() if behind else len(self.text)
            first = self.text.count("\n", 0, start.start()) + 1
            last = self.text.count("\n", 0, end) + (behind is None)
            found[start.group(1)] = Definition(self.name, start.group(1), self.text[start.end() : end], first, last)
        return found

    @cached_property
    def unprefixed_modules(self) -> tuple[str, ...]:
        """The modules whose names it can use without a prefix."""
        extended = [name for group in _EXTENDS.findall(self.text) for name in re.findall(r"\w+", group)]
        return (*extended, *_OPEN_INSTANCE.findall(self.text))


@dataclass
class Library:
    """The modules of one folder, each read on first use."""

    folder: Path
    _modules: dict[str, Module | None] = field(default_factory=dict)

    def module(self, name: str) -> Module | None:
        """Return a module; None if it is not in the folder, for example one of TLC's standard modules."""
        if name not in self._modules:
            path = self.folder / f"{name}.tla"
            self._modules[name] = Module(name, without_comments(_read(path))) if path.is_file() else None
        return self._modules[name]

    def closure(self, root: str) -> tuple[Module, ...]:
        """Return a module and all modules that it uses, directly or indirectly."""
        found: dict[str, Module] = {}
        waiting = [root]
        while waiting:
            module = self.module(waiting.pop())
            if module is not None and module.name not in found:
                found[module.name] = module
                waiting += [*module.unprefixed_modules, *_INSTANCE.findall(module.text)]
        return tuple(found.values())

    def resolve(self, module: str, name: str) -> Definition | None:
        """Return the definition that a name refers to inside a module."""
        text = self.module(module)
        if text is None:
            return None
        if name in text.definitions:
            return text.definitions[name]
        through = (self.resolve(other, name) for other in text.unprefixed_modules)
        return next((found for found in through if found), None)

    def reached(self, module: str, name: str) -> Iterator[Definition]:
        """Yield a definition and all definitions that it refers to, directly or indirectly."""
        waiting = [self.resolve(module, name)]
        seen: set[tuple[str, str]] = set()
        while waiting:
            found = waiting.pop()
            if found is not None and (found.module, found.name) not in seen:
                seen.add((found.module, found.name))
                yield found
                waiting += [self._named(found.module, match) for match in _NAME.finditer(found.body)]

    def _named(self, module: str, match: re.Match[str]) -> Definition | None:
        instance, inner, plain = match.groups()
        if plain:
            return self.resolve(module, plain)
        holder = self.resolve(module, instance)
        target = _INSTANCE.search(holder.body) if holder else None
        return self.resolve(target.group(1), inner) if target else None

    def is_temporal(self, module: str, name: str) -> bool:
        """Whether a property is temporal, so that TLC's liveness checker checks it."""
        bodies = (found.body for found in self.reached(module, name))
        return any(_TEMPORAL.search(body) or _nests_boxes(body) for body in bodies)

    def owners(self, module: str, names: tuple[str, ...], place: str) -> tuple[str, ...]:
        """Return the properties that contain the text at a location, which is given in TLC's wording."""
        match = _PLACE.match(place)
        if match is None:
            return ()
        line, home = int(match.group(1)), match.group(2)
        return tuple(
            name
            for name in names
            if any(
                found.module == home and found.first_line <= line <= found.last_line
                for found in self.reached(module, name)
            )
        )


def traps(module: Module) -> Iterator[str]:
    """Yield each place with an expression that TLC 2.18 is known to evaluate wrongly."""
    names = "|".join(sorted(set(_LITERAL_NAME.findall(module.text)))) or r"(?!)"
    except_on_name = re.compile(rf"\[\s*(?:{names})\b(?:\([^)\n]*\))?\s*EXCEPT\b")
    sequence_of_name = re.compile(rf"\b(?:Tail|SubSeq|Append)\s*\(\s*(?:{names})\b")
    places = [(start, "EXCEPT on a function literal") for start in _except_on_literal(module.text)]
    for pattern, what in (
        (except_on_name, "EXCEPT on a defined function literal"),
        (_SEQUENCE_OF_LITERAL, "Tail, SubSeq or Append of a function literal"),
        (sequence_of_name, "Tail, SubSeq or Append of a defined function literal"),
    ):
        places += [(match.start(), what) for match in pattern.finditer(module.text)]
    for start, what in sorted(places):
        line = module.text.count("\n", 0, start) + 1
        yield f"{module.name}.tla line {line}: {what}, which TLC 2.18 evaluates wrongly; keep it in a variable"


def _except_on_literal(text: str) -> Iterator[int]:
    for match in _OPEN_TWICE.finditer(text):
        end = _closing(text, match.end() - 1, "[]")
        if "|->" in text[match.start() : end] and re.match(r"\s*EXCEPT\b", text[end:]):
            yield match.start()


def _nests_boxes(body: str) -> bool:
    return any("[]" in body[box.end() : _closing(body, box.end() - 1, "()")] for box in _BOX.finditer(body))


def _closing(text: str, start: int, pair: str) -> int:
    """Return the position after the bracket that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == pair[0]) - (text[place] == pair[1])
        if not depth:
            return place + 1
    return len(text)
