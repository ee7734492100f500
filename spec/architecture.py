"""Renders the module map in `docs/architecture.md`: the floors, their packages and modules, and the imports.

The floors are the layers of import-linter's first contract in `pyproject.toml`. The imports are found by grimp, which
import-linter uses too. With ``--check`` nothing is written and the page is compared byte for byte.
Exit status: 0 the page is up to date, 1 the page differs, 2 the page or the contract cannot be read.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grimp
from protocolgen.docs import fill, keep
from protocolgen.source import SpecError

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "weightsync"
PAGE = "docs/architecture.md"
#: The width of a line in a box of the picture.
_WIDTH = 64


@dataclass(frozen=True)
class Room:
    """A package or module directly below `weightsync`."""

    name: str
    #: The first paragraph of its docstring.
    meaning: str
    #: The modules below it, named relative to it.
    modules: tuple[str, ...]
    #: The rooms that it imports. `weightsync` itself stands for the public names.
    imports: frozenset[str]


Floor = tuple[Room, ...]


def floors(root: Path = ROOT) -> list[Floor]:
    """The floors, the lowest first.

    Raises:
        SpecError: `pyproject.toml` has no contract of layers.
    """
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    return [tuple(_room(root, graph, name) for name in names) for names in _layers(root)]


def _layers(root: Path) -> list[list[str]]:
    """The names on each floor, the lowest first."""
    loaded = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = loaded["tool"]["importlinter"]["contracts"]
    layers = next((contract["layers"] for contract in contracts if contract["type"] == "layers"), None)
    if layers is None:
        raise SpecError(["pyproject.toml: import-linter has no contract of the type 'layers'"])
    return [re.split(r"\s*[|:]\s*", layer.strip()) for layer in reversed(layers)]


def _room(root: Path, graph: grimp.ImportGraph, name: str) -> Room:
    whole = f"{PACKAGE}.{name}"
    below = sorted(graph.find_descendants(whole))
    imported = {each for module in (whole, *below) for each in graph.find_modules_directly_imported_by(module)}
    rooms = {module.split(".")[1] if "." in module else PACKAGE for module in imported}
    packages = {each.rpartition(".")[0] for each in below}
    modules = tuple(module.removeprefix(f"{whole}.") for module in below if module not in packages)
    return Room(name, _meaning(root / PACKAGE / name), modules, frozenset(rooms - {name}))


def _meaning(place: Path) -> str:
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def sections(house: Sequence[Floor]) -> dict[str, str]:
    """The generated parts of the page, by name."""
    return {"floors": picture(house), "packages": table(house)}


def picture(house: Sequence[Floor]) -> str:
    """A mermaid diagram: a box for each floor, an arrow from a floor to those that it imports.

    An arrow that others imply is left out. The table has all imports.
    """
    lines = ["```mermaid", "flowchart TD"]
    for number, floor in reversed(list(enumerate(house, 1))):
        lines += [f'  subgraph floor{number}["{number}"]', "    direction LR"]
        lines += [f'    {room.name}["{_label(room)}"]' for room in floor]
        lines += [*_inside(floor), "  end"]
    lines += [f"  floor{above} --> floor{below}" for above, below in _arrows(house)]
    return "\n".join([*lines, "```", ""])


def _label(room: Room) -> str:
    """The text of a room's box: its name and its modules, with a separate line for each package inside it."""
    inside: dict[str, list[str]] = {}
    for module in room.modules:
        package, _, name = module.rpartition(".")
        inside.setdefault(package, []).append(name)
    lines = [f"<b>{room.name}</b>"]
    for package, names in inside.items():
        lead = f"<i>{package}:</i> " if package else ""
        lines += textwrap.wrap(", ".join(names), _WIDTH, initial_indent=lead, break_on_hyphens=False)
    return "<br>".join(lines)


def _inside(floor: Floor) -> Iterator[str]:
    """Arrows between two rooms of one floor."""
    names = {room.name for room in floor}
    for room in floor:
        yield from (f"    {room.name} -.-> {other}" for other in sorted(room.imports & names))


def _arrows(house: Sequence[Floor]) -> list[tuple[int, int]]:
    """The arrows between floors, the highest first, without those that others imply."""
    of = {room.name: number for number, floor in enumerate(house, 1) for room in floor}
    below = {
        number: {of[name] for room in floor for name in room.imports if name in of and of[name] != number}
        for number, floor in enumerate(house, 1)
    }

    def reached(number: int) -> set[int]:
        return below[number].union(*(reached(each) for each in below[number]))

    return [
        (above, under)
        for above in sorted(below, reverse=True)
        for under in sorted(below[above], reverse=True)
        if not any(under in reached(other) for other in below[above] - {under})
    ]


def table(house: Sequence[Floor]) -> str:
    """A table of the packages, the highest floor first."""
    lines = ["| floor | package | what is in it | imports |", "| --- | --- | --- | --- |"]
    order = [*(room.name for floor in house for room in floor), PACKAGE]
    for number, floor in reversed(list(enumerate(house, 1))):
        for room in floor:
            imports = ", ".join(f"`{name}`" for name in order if name in room.imports) or "nothing"
            lines.append(f"| {number} | `{room.name}` | {room.meaning} | {imports} |")
    return "\n".join([*lines, ""])


def render(text: str, house: Iterable[Floor]) -> str:
    """The page with its generated parts rewritten.

    Raises:
        SpecError: a marker of the page names no part, or does not end.
    """
    return fill(PAGE, text, sections(list(house)))


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    page = ROOT / PAGE
    try:
        text = render(page.read_text(encoding="utf-8"), floors())
    except SpecError as error:
        print(f"nothing was written:\n{error}", file=sys.stderr)
        return 2
    return keep(page, text, arguments, f"{PAGE} is not what the imports give: run `python spec/architecture.py`.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
