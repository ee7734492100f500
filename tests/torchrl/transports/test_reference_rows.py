"""The table of the reference API is complete: each row has existing tests, and each test of names has a row."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest
from reference_rows import FAULTS, FAULTS_IN, ROWS

TESTS = Path(__file__).parents[2]
#: The modules whose every test must be in a row.
NAMES = sorted(
    path.stem for path in TESTS.rglob("test_*names*.py") if path.stem not in ("test_names_a", "test_public_names")
)


@functools.cache
def names_in(module: str) -> set[str]:
    """The names of the tests in a module."""
    (path,) = TESTS.rglob(f"{module}.py")
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("row", list(ROWS))
def test_every_row_has_tests_that_exist(row: str) -> None:
    named = {(module, test) for module, tests in ROWS[row].items() for test in tests}

    assert named
    assert {(module, test) for module, test in named if test not in names_in(module)} == set()


@pytest.mark.parametrize("module", NAMES)
def test_every_test_of_names_is_in_a_row(module: str) -> None:
    in_rows = {test for tests in ROWS.values() for test in tests.get(module, ())}

    assert names_in(module) - in_rows == set()


@pytest.mark.parametrize("prefix", FAULTS)
def test_every_fault_has_a_test(prefix: str) -> None:
    assert [test for module in FAULTS_IN for test in names_in(module) if test.startswith(prefix)]
