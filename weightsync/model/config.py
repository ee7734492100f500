"""TLC's configuration of a run: the constants, what is checked and how; and its text as a .cfg file.

The manifest avoids repetition: a module's table holds what all of its configurations have in common, ``[constants.*]``
and ``[checks.*]`` are groups that both may name, and a configuration holds only its differences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from weightsync.model.text import Library

#: A constant's value in the manifest; an array is a TLA+ set.
Value: TypeAlias = bool | int | str | Sequence["Value"]


@dataclass(frozen=True)
class Config:
    """A configuration of TLC.

    Attributes:
        specification: the behaviours to check.
        constants: each constant's value.
        deadlock: whether a deadlock is an error.
        constraints: conditions that a state must satisfy for its successors to be explored.
        action_constraints: conditions that a step must satisfy to be taken.
        view: the expression by which states are distinguished; empty for all variables.
        symmetry: the permutations under which states are equal; empty for none.
        invariants: checked in every state.
        properties: checked over behaviours.
    """

    specification: str
    constants: Mapping[str, Value] = field(default_factory=dict)
    deadlock: bool = False
    constraints: tuple[str, ...] = ()
    action_constraints: tuple[str, ...] = ()
    view: str = ""
    symmetry: str = ""
    invariants: tuple[str, ...] = ()
    properties: tuple[str, ...] = ()

    @property
    def checked(self) -> tuple[str, ...]:
        """The invariants, then the properties."""
        return (*self.invariants, *self.properties)

    @property
    def text(self) -> str:
        """The configuration as a .cfg file."""
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"SPECIFICATION {self.specification}"
        yield f"CHECK_DEADLOCK {literal(self.deadlock)}"
        yield from constant_lines(self.constants)
        for keyword, names in (
            ("CONSTRAINT", self.constraints),
            ("ACTION_CONSTRAINT", self.action_constraints),
            ("VIEW", (self.view,) if self.view else ()),
            ("SYMMETRY", (self.symmetry,) if self.symmetry else ()),
            ("INVARIANTS", self.invariants),
            ("PROPERTIES", self.properties),
        ):
            if names:
                yield keyword
                yield from (f"  {name}" for name in names)


def constant_lines(constants: Mapping[str, Value]) -> Iterator[str]:
    """Yield the lines that assign the constants."""
    if constants:
        yield "CONSTANTS"
        yield from (f"  {name} = {literal(value)}" for name, value in constants.items())


def literal(value: Value) -> str:
    """Return a value as TLA+ text. Raises ValueError: a constant cannot have a value of this type."""
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, (list, tuple)):
        return f"{{{', '.join(map(literal, value))}}}"
    raise ValueError(f"{value!r} is neither a number, a string, true or false, nor an array of these")


#: Keys that may be in a module's table and in a configuration's; lists are concatenated.
_LISTS = ("constraints", "action_constraints", "invariants", "properties")
_SINGLE = ("specification", "deadlock", "view", "symmetry")
CONFIG_KEYS = frozenset({*_LISTS, *_SINGLE, "constants", "checks"})


@dataclass(frozen=True)
class Groups:
    """The parts of the manifest that several configurations share.

    Attributes:
        constants: group name to constants and their values.
        checks: group name to its invariants and properties.
        modules: module name to what its configurations have in common.
    """

    constants: Mapping[str, Mapping[str, Value]]
    checks: Mapping[str, Mapping[str, Sequence[str]]]
    modules: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Groups:
        """Read the groups of a manifest."""
        return cls(document.get("constants", {}), document.get("checks", {}), document.get("module", {}))

    def config(self, entry: Mapping[str, Any]) -> Config:
        """Return TLC's configuration for an entry of the manifest.

        If neither the entry nor its module's table lists anything to check, the property in ``violates`` is checked.

        Raises:
            KeyError: the specification is missing.
            ValueError: a group, a constant or a key of the module's table is unknown.
        """
        shared = self.modules.get(entry["module"], {})
        if unknown := set(shared) - CONFIG_KEYS:
            raise ValueError(f"the table of its module has unknown keys: {sorted(unknown)}")
        given = {key: found[key] for found in (shared, entry) for key in _SINGLE if key in found}
        given |= {key: tuple(name for found in (shared, entry) for name in found.get(key, ())) for key in _LISTS}
        named = [_group(self.checks, name) for found in (shared, entry) for name in found.get("checks", ())]
        for key in ("invariants", "properties"):
            given[key] = (*(name for group in named for name in group.get(key, ())), *given[key])
        if not (given["invariants"] or given["properties"]) and "violates" in entry:
            given["invariants" if entry["expected"] == "safety" else "properties"] = (entry["violates"],)
        return Config(given.pop("specification"), self._constants(shared, entry), **given)

    def _constants(self, shared: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for name in shared.get("constants", ()):
            found |= _group(self.constants, name)
        own = entry.get("constants", {})
        if unknown := set(own) - set(found):
            raise ValueError(f"its module has no constants {', '.join(sorted(unknown))}")
        found |= own
        for value in found.values():
            literal(value)
        return found


def _group(groups: Mapping[str, Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    if name not in groups:
        raise ValueError(f"there is no group {name}; there are {', '.join(groups)}")
    return groups[name]


def config_traps(library: Library, root: str, config: Config, workers: int) -> Iterator[str]:
    """Yield the reasons why TLC's verdict on a configuration's temporal properties would be unreliable."""
    temporal = [name for name in config.properties if library.is_temporal(root, name)]
    if not temporal:
        return
    names = ", ".join(temporal)
    if workers != 1:
        yield f"{names}: temporal, and TLC 2.18 can miss a violation with {workers} workers; use 1"
    for keyword, named in (("SYMMETRY", config.symmetry), ("VIEW", config.view)):
        if named:
            yield f"{names}: temporal, and TLC does not check those reliably under {keyword}"
