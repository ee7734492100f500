"""The definitions that specify a model's behaviour, as trees, and the text of the module with one of them changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from modelcheck.mutants.parser import parse
from modelcheck.mutants.syntax import Node
from weightsync.model.text import Definition, Module


@dataclass(frozen=True)
class Source:
    """A module whose definitions can be changed one at a time.

    Attributes:
        module: its text.
        roots: the definitions that specify the behaviour; the definitions they refer to are read too.
        planted: definitions that are left out, because they break rules on purpose.
    """

    module: Module
    roots: Sequence[str]
    planted: Sequence[str] = ()

    @cached_property
    def trees(self) -> dict[str, Node]:
        """Each definition that the roots refer to, in the order of the text.

        Raises:
            ConfigurationError: if one cannot be read.
        """
        found: dict[str, Node] = {}
        waiting = list(self.roots)
        while waiting:
            wanted = waiting.pop()
            definition = self.module.definitions.get(wanted)
            if definition is not None and wanted not in found and wanted not in self.planted:
                found[wanted] = parse(" " * _indent(self.module, definition) + definition.body)
                waiting += sorted(found[wanted].names())
        return {one: found[one] for one in self.module.definitions if one in found}

    def text(self, name: str, tree: Node) -> str:
        """Return the module's text with another body for a definition; all other lines keep their numbers."""
        definition = self.module.definitions[name]
        lines = self.module.text.split("\n")
        first, last = definition.first_line - 1, definition.last_line
        head = lines[first][: _indent(self.module, definition)]
        lines[first:last] = [f"{head} {tree}", *[""] * (last - first - 1)]
        return "\n".join(lines)


def _indent(module: Module, definition: Definition) -> int:
    return module.text.split("\n")[definition.first_line - 1].index("==") + 2
