"""The mutants: each is one of mutmut's mutations of one function of the machines or their pure halves."""

from __future__ import annotations

import difflib
import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import libcst as cst
from mutmut.mutation.file_mutation import create_mutations

from weightsync import machine

MODULES = (
    "weightsync.machine",
    "weightsync.protocol.sender",
    "weightsync.protocol.sender_guards",
    "weightsync.protocol.receiver",
)


@dataclass(frozen=True)
class Mutant:
    """One function, changed in one place.

    Attributes:
        module: where it stands.
        function: its name, behind its class's.
        was: the lines that are gone.
        now: the lines that stand in their place.
        told: whether only a text for people is another one.
        twin: how many mutants before it read the same (the same change to another of several equal lines).
        source: the whole module.
    """

    module: str
    function: str
    was: str
    now: str
    told: bool
    twin: int
    source: str

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What it is called in the reviewed file."""
        return f"{self.module}.{self.function}", self.was, self.now, self.twin

    def plant(self) -> None:
        """Give the function of this process the mutant's code; whoever holds the function, holds the mutant."""
        function, mutated = self._find(vars(importlib.import_module(self.module))), self._find(self._executed())
        function.__code__ = mutated.__code__
        function.__defaults__, function.__kwdefaults__ = mutated.__defaults__, mutated.__kwdefaults__
        if self.module == machine.__name__:
            _build_again()

    def _executed(self) -> dict[str, Any]:
        code: CodeType = compile(self.source, f"<mutant of {self.module}>", "exec")
        space: dict[str, Any] = {"__name__": self.module}
        exec(code, space)
        return space

    def _find(self, space: dict[str, Any]) -> FunctionType:
        first, *rest = self.function.split(".")
        found: Any = space[first]
        for name in rest:
            found = vars(found)[name]
        function = found.fget if isinstance(found, property) else found
        assert isinstance(function, FunctionType)
        return function


def _build_again() -> None:
    """What the machines' module does with its functions when it is imported."""
    for role in (machine.SenderMachine, machine.ReceiverMachine):
        role.shared = machine._shared(role.rows)
        role._events = machine._events(role.shared, role.inputs)


def mutants(module: str, wanted: Callable[[str], bool] = bool) -> Iterator[Mutant]:
    """All of a module whose function's full name is wanted, in the order of its lines."""
    path = Path(str(importlib.import_module(module).__file__))
    tree, mutations, _, _ = create_mutations(str(path), path.read_text(encoding="utf-8"))
    names, twins = _functions(tree), Counter[tuple[str, str, str]]()
    for mutation in mutations:
        within = mutation.contained_by_top_level_function
        if within is None or within not in names or not wanted(f"{module}.{names[within]}"):
            continue
        before = tree.code_for_node(within)
        changed = within.deep_replace(mutation.original_node, mutation.mutated_node)
        assert isinstance(changed, cst.FunctionDef)
        after = tree.code_for_node(changed)
        same = names[within], *_difference(before, after)
        told = isinstance(mutation.original_node, cst.SimpleString) and " " in mutation.original_node.value
        # A method's code by itself lacks its indentation; a function's saves a walk through the whole module.
        whole = (
            _code(tree.deep_replace(within, changed)) if "." in names[within] else tree.code.replace(before, after, 1)
        )
        assert whole != tree.code, f"{same} is no mutant"
        yield Mutant(module, *same, told, twins[same], whole)
        twins[same] += 1


def _code(tree: Any) -> str:
    assert isinstance(tree, cst.Module)
    return tree.code


def _functions(tree: cst.Module) -> dict[Any, str]:
    names: dict[Any, str] = {}
    for statement in tree.body:
        if isinstance(statement, cst.FunctionDef):
            names[statement] = statement.name.value
        elif isinstance(statement, cst.ClassDef):
            for inner in statement.body.body:
                if isinstance(inner, cst.FunctionDef):
                    names[inner] = f"{statement.name.value}.{inner.name.value}"
    return names


def _difference(before: str, after: str) -> tuple[str, str]:
    lines = list(difflib.ndiff(before.splitlines(), after.splitlines()))
    gone, come = ([line[2:].strip() for line in lines if line.startswith(mark)] for mark in "-+")
    return " ".join(gone), " ".join(come)
