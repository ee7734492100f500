"""A machine's data changes only by steps of its pure half."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import weightsync

ROOT = Path(weightsync.__file__).parent
#: The allowed assignments: in a new driver, and in the one place where a machine takes a step.
ALLOWED = {
    ("engine/driver.py", "__init__", "self.data = data"),
    ("engine/driver.py", "_step", "self.data = step.data"),
}


def assigned(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Each statement that sets an attribute named ``data``, with the name of its function."""
    for function in ast.walk(module):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in ast.walk(function):
                if isinstance(statement, ast.stmt) and statement is not function and any(map(_sets, _parts(statement))):
                    yield function.name, ast.unparse(statement)


def _parts(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement, without the statements in it."""
    todo = [child for child in ast.iter_child_nodes(statement) if not isinstance(child, ast.stmt)]
    while todo:
        part = todo.pop()
        yield part
        todo += [child for child in ast.iter_child_nodes(part) if not isinstance(child, ast.stmt)]


def _sets(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        named = any(isinstance(each, ast.Constant) and each.value == "data" for each in node.args)
        return named and ast.unparse(node.func).rpartition(".")[2] in ("setattr", "__setattr__", "delattr")
    return isinstance(node, ast.Attribute) and node.attr == "data" and isinstance(node.ctx, ast.Store | ast.Del)


def test_a_drivers_data_is_assigned_only_from_the_result_of_a_step() -> None:
    found = set()
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        for function, statement in assigned(ast.parse(path.read_text(encoding="utf-8"))):
            # Outside of the engine, tensors have an attribute of this name too.
            if place.startswith("engine/") or "driver" in statement:
                found.add((place, function, statement))

    assert found == ALLOWED


def test_every_syntax_that_assigns_or_deletes_data_is_found() -> None:
    ways = ["self.data = x", "self.data: int = x", "a, b.driver.data = x", "del self.data", "setattr(self, 'data', x)"]
    ways += [
        "self.data += x",
        "for self.data in x: pass",
        "with x as self.data: pass",
        "object.__setattr__(s, 'data', x)",
    ]

    assert [len(list(assigned(ast.parse(f"def f(self):\n    {way}")))) for way in ways] == [1] * len(ways)
