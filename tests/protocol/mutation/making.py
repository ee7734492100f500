"""Make the mutants of a module with mutmut.

Each changes one function of the machines, their pure halves or the drivers in one place.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutated import PURE
from mutmut.mutation.file_mutation import Mutation, MutationVisitor
from mutmut.mutation.mutators import mutation_operators
from mutmut.mutation.pragma_handling import get_ignored_lines

from weightsync.protocol import machine


@dataclass(frozen=True)
class Mutant:
    """A function that is changed in one place.

    Attributes:
        module: the module of the function.
        function: its name, qualified by that of its class.
        was: the original lines.
        now: the lines in their place.
        text_only: whether only a text for people has changed.
        twin: how many mutants before it read the same (the same change to another of several equal lines).
        source: the source of the whole mutated module.
        spans: the original lines of what is changed, and those of its function.
    """

    module: str
    function: str
    was: str
    now: str
    text_only: bool
    twin: int
    source: str
    spans: tuple[range, range]

    @property
    def key(self) -> tuple[str, str, str, int]:
        """The key of the mutant in the files of survivors."""
        return f"{self.module}.{self.function}", self.was, self.now, self.twin

    def plant(self) -> None:
        """Replace the function's code in this process by the mutant's.

        Everything that holds a reference to the function then calls the mutant.
        """
        space = vars(importlib.import_module(self.module))
        function, mutated = self._find(space), self._find(self._executed())
        if function.__code__.co_freevars == mutated.__code__.co_freevars:
            function.__code__ = mutated.__code__
            function.__defaults__, function.__kwdefaults__ = mutated.__defaults__, mutated.__kwdefaults__
        else:
            self._put(space, function, mutated)
        if self.module == machine.__name__:
            _rebuild_tables()

    def _put(self, space: dict[str, Any], function: FunctionType, mutated: FunctionType) -> None:
        """Replace a method by another function object.

        This is needed for a mutant that has lost its `super()`, and with it the cell for its class.
        """
        owner, _, name = self.function.rpartition(".")
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        closure = tuple(cells[name] for name in mutated.__code__.co_freevars)
        other = FunctionType(mutated.__code__, space, name, mutated.__defaults__, closure)
        assert vars(space[owner])[name] is function, f"{self.function} is decorated"
        setattr(space[owner], name, other)

    def _executed(self) -> dict[str, Any]:
        code: CodeType = compile(self.source, f"<mutant of {self.module}>", "exec")
        space: dict[str, Any] = {"__name__": self.module}
        exec(code, space)
        return space

    def _find(self, space: dict[str, Any]) -> FunctionType:
        first, *rest = self.function.split(".")
        found: Any = space[first]
        for name in rest:
            found = found.fset if isinstance(found, property) else vars(found)[name]
        return _undecorated(found)


def _undecorated(found: Any) -> FunctionType:
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, classmethod | staticmethod):
        found = found.__func__
    function = inspect.unwrap(found)
    assert isinstance(function, FunctionType)
    return function


def _rebuild_tables() -> None:
    """Build the tables of the machines again, as their module does when it is imported."""
    for role in (machine.SenderMachine, machine.ReceiverMachine):
        role.shared = machine._shared(role.rows)
        role._events = machine._events(role.shared, role.inputs)


class _Decorated(MutationVisitor):
    """Also mutates decorated functions, and skips calls of the logger."""

    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef):
            return False
        logged = isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute)
        if logged and isinstance(node.func.value, cst.Name) and node.func.value.value == "logger":
            return True
        return super()._skip_node_and_children(node)


def mutants(module: str, wanted: Callable[[str], bool] = bool) -> Iterator[Mutant]:
    """All mutants of the functions of a module whose full names are wanted, in the order of their lines."""
    path = Path(str(importlib.import_module(module).__file__))
    tree, mutations, positions = _mutations(path, MutationVisitor if module in PURE else _Decorated)
    names, code, twins = _functions(tree), tree.code, Counter[tuple[str, str, str]]()
    text_of = cache(tree.code_for_node)  # cached, since many mutations change the same function
    for mutation in mutations:
        within = mutation.contained_by_top_level_function
        if within is None or within not in names or not wanted(f"{module}.{names[within]}"):
            continue
        text_only = isinstance(mutation.original_node, cst.SimpleString) and " " in mutation.original_node.value
        if text_only and module not in PURE:
            continue
        before = text_of(within)
        changed = within.deep_replace(mutation.original_node, mutation.mutated_node)
        assert isinstance(changed, cst.FunctionDef)
        after = tree.code_for_node(changed)
        same = names[within], *_difference(before, after)
        indent = "    " if "." in names[within] else ""
        whole = code.replace(*(textwrap.indent(each, indent) for each in (before, after)), 1)
        if whole == code:  # rarely needed, and ten times as slow: replace the function in the tree
            whole = _with(tree, within, changed)
        assert whole != code, f"{same} is no mutant"
        spans = _lines(positions, mutation.original_node), _lines(positions, within)
        yield Mutant(module, *same, text_only, twins[same], whole, spans)
        twins[same] += 1


def _lines(positions: Mapping[cst.CSTNode, Any], node: cst.CSTNode) -> range:
    at = positions.get(node)  # an operator may have none
    return range(at.start.line, at.end.line + 1) if at else range(0)


def _mutations(path: Path, kind: type[MutationVisitor]) -> tuple[cst.Module, list[Mutation], Mapping[cst.CSTNode, Any]]:
    code = path.read_text(encoding="utf-8")
    wrapper = MetadataWrapper(cst.parse_module(code))
    visitor = kind(mutation_operators, get_ignored_lines(str(path), code, wrapper))
    return wrapper.visit(visitor), visitor.mutations, wrapper.resolve(PositionProvider)


def _with(tree: cst.Module, within: cst.FunctionDef, changed: cst.FunctionDef) -> str:
    whole = tree.deep_replace(within, changed)
    assert isinstance(whole, cst.Module)
    return whole.code


def _functions(tree: cst.Module) -> dict[Any, str]:
    names: dict[Any, str] = {}
    for statement in tree.body:
        if isinstance(statement, cst.FunctionDef):
            names[statement] = statement.name.value
        elif isinstance(statement, cst.ClassDef):
            for inner in statement.body.body:
                if isinstance(inner, cst.FunctionDef):
                    setter = ".setter" if _is_setter(inner) else ""
                    names[inner] = f"{statement.name.value}.{inner.name.value}{setter}"
    return names


def _is_setter(function: cst.FunctionDef) -> bool:
    """Whether a function is the setter of a property."""
    decorators = [each.decorator for each in function.decorators]
    return any(isinstance(each, cst.Attribute) and each.attr.value == "setter" for each in decorators)


def _difference(before: str, after: str) -> tuple[str, str]:
    lines = list(difflib.ndiff(before.splitlines(), after.splitlines()))
    gone, come = ([line[2:].strip() for line in lines if line.startswith(mark)] for mark in "-+")
    return " ".join(gone), " ".join(come)
