"""Reads the sources of the assurance page, and checks that everything they name exists in the tree."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelcheck.second.bounds import Bounds

_NAMED = re.compile(r"test_(g\d+)[a-z]?_")
_PLANTED = Path("tests/protocol/planted/test_planted.py")


class SourceError(Exception):
    """A source of the page names something that does not exist, or omits something that does."""


@dataclass(frozen=True, slots=True)
class Guarantee:
    """One guarantee, and the evidence for it.

    Attributes:
        id: G1 to G12.
        name: its name in protocol.toml.
        meaning: its meaning in words.
        properties: its properties in the model.
        needs: features of which one must be possible for its properties to be able to fail; none: always.
        tests: node ids of its tests.
        plant: the function that plants a fault against it.
        planted: a description of that fault.
        assumed: what it assumes.
        unproved: what is not proved.
    """

    id: str
    name: str
    meaning: str
    properties: tuple[str, ...]
    needs: tuple[str, ...]
    tests: tuple[str, ...]
    plant: str
    planted: str
    assumed: str
    unproved: str


@dataclass(frozen=True, slots=True)
class Least:
    """The minimum that configurations must check.

    Attributes:
        properties: the properties, in one configuration or in several.
        bounds: the minimum constants of each of these configurations.
    """

    properties: tuple[str, ...]
    bounds: Bounds


def least(root: Path) -> tuple[Least, ...]:
    """Read the minimum bounds for each group of properties.

    Raises:
        SourceError: a group of properties does not exist.
    """
    document = _toml(root / "spec" / "assurance.toml")
    groups = document["groups"]
    try:
        return tuple(Least(tuple(groups[entry["of"]]), _bounds(entry)) for entry in document["least"])
    except KeyError as error:
        raise SourceError(f"a [[least]] names a group of properties that is not in [groups]: {error}") from error


def _bounds(entry: Mapping[str, Any]) -> Bounds:
    return Bounds(
        senders=entry.get("senders", 1),
        workers=entry.get("workers", 1),
        max_version=entry.get("versions", 1),
        max_link=entry.get("links", 1),
        max_clock=entry.get("clocks", 1),
        features=frozenset(entry.get("features", ())),
        links=frozenset(entry.get("network", ())),
    )


def read(root: Path) -> tuple[Guarantee, ...]:
    """Read all guarantees of the protocol, in their order.

    Raises:
        SourceError: a guarantee has no entry, or an entry names a property or test that does not exist.
    """
    protocol = _toml(root / "spec" / "protocol.toml")["guarantee"]
    entries = {entry["id"]: entry for entry in _toml(root / "spec" / "assurance.toml")["guarantee"]}
    if set(entries) != {each["id"] for each in protocol}:
        raise SourceError(f"the guarantees are {[each['id'] for each in protocol]}, and not {sorted(entries)}")
    tests, plants = _tests(root), _plants(root)
    model = (root / "tla" / "AckProtocol.tla").read_text(encoding="utf-8")
    return tuple(_guarantee(each, entries[each["id"]], tests, plants, model) for each in protocol)


def _guarantee(
    named: Mapping[str, Any],
    entry: Mapping[str, Any],
    tests: Mapping[str, str],
    plants: Mapping[str, tuple[str, str]],
    model: str,
) -> Guarantee:
    id = named["id"]
    own = [test for test, of in tests.items() if of == id.lower()]
    further = [test for test in entry["tests"] if test not in own]
    complaints = [
        *(f"{id}: there is no test {test}" for test in further if test not in tests),
        *(f"{id}: AckProtocol.tla has no {name}" for name in entry["properties"] if f"\n{name} ==" not in model),
        *([] if id in plants else [f"{id}: no fault is planted against it in {_PLANTED}"]),
    ]
    if complaints:
        raise SourceError("\n".join(complaints))
    return Guarantee(
        id,
        named["name"],
        named["meaning"],
        tuple(entry["properties"]),
        tuple(entry.get("needs", ())),
        (*own, *further),
        *plants[id],
        _flat(entry["assumed"]),
        _flat(entry["unproved"]),
    )


def _flat(text: str) -> str:
    return " ".join(text.split())


def _toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _tests(root: Path) -> dict[str, str]:
    """Every test's node id, with the guarantee in its name ("g1") or an empty string."""
    found = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            match = _NAMED.match(name)
            found[f"{path.relative_to(root)}::{name}"] = match[1] if match else ""
    return found


def _plants(root: Path) -> dict[str, tuple[str, str]]:
    """Guarantee to the function that plants a fault against it, and the description of the fault."""
    found: dict[str, tuple[str, str]] = defaultdict(tuple)  # type: ignore[arg-type]
    for node in ast.parse((root / _PLANTED).read_text(encoding="utf-8")).body:
        words = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
        if isinstance(node, ast.FunctionDef) and words and re.match(r"G\d+: ", words):
            id, what = words.split(": ", 1)
            found[id] = (node.name, what.rstrip("."))
    return dict(found)


#: Written by ``pytest --trace-counts tests/protocol/traces/recorded.json``: runs and events of each test.
RECORDED = Path("tests/protocol/traces/recorded.json")


class Recorded:
    """The counts of recorded runs. All of them conform, since the plugin fails a session with a line that does not."""

    def __init__(self, root: Path) -> None:
        self._counts: dict[str, tuple[int, int]] = json.loads((root / RECORDED).read_text(encoding="utf-8"))

    def of(self, tests: Iterable[str]) -> str:
        """The recorded runs and events of these tests, in words."""
        return self._words([self._counts[test] for test in tests if test in self._counts])

    def all(self) -> str:
        """The recorded runs and events of all tests, in words."""
        return f"{self._words(list(self._counts.values()))} of {len(self._counts):,} tests"

    @staticmethod
    def _words(counts: list[tuple[int, int]]) -> str:
        runs, events = (sum(count[place] for count in counts) for place in (0, 1))
        return f"{runs:,} runs, {events:,} events" if runs else "-"
