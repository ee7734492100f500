"""The built packages work outside the tree, and the matrix of releases reports a missing Python."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import packages
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_wheel_and_sdist_work_in_an_empty_environment() -> None:
    found = subprocess.run([sys.executable, "spec/packages.py", "smoke"], cwd=ROOT, check=False, capture_output=True)

    assert found.returncode == 0, found.stderr.decode()
    assert found.stdout.decode().count("works in an empty environment") == 2


@pytest.mark.parametrize(("ci", "status"), [("true", 1), ("", 0)])
def test_a_missing_python_is_reported_and_fails_in_ci(
    ci: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(packages, "_interpreter", lambda version: None if version == "3.12" else "/python")
    monkeypatch.setattr(packages, "_releases", lambda python: [["torch==1"], ["torch==0"]])
    monkeypatch.setattr(packages, "_tested", lambda *_: "passed")

    assert packages.matrix([]) == status
    said = capsys.readouterr().out
    assert "Python 3.12: MISSING" in said
    assert re.findall(r"^Python (\S+), torch==(\d+)\S*.*: passed$", said, re.MULTILINE) == [
        *(("3.11", each) for each in ("1", "0", "2")),
        *((version, each) for version in ("3.13", "3.14") for each in ("1", "0")),
    ]

    monkeypatch.setattr(packages, "_tested", lambda *_: "FAILED")
    assert packages.matrix([]) == 1


def test_lowest_releases_cover_the_dependencies_of_the_tests() -> None:
    found = packages._lowest()

    assert {each.partition("==")[0] for each in found} >= {
        "torch",
        "tensordict",
        "numpy",
        "msgspec",
        "typer",
        "gymnasium",
    }
    assert all(re.fullmatch(r"[a-z-]+==\d+(\.\d+)+\.\*", each) for each in found)


def test_no_test_imports_a_conftest() -> None:
    """Several modules have this name, and the folders on the command line decide which one would be imported."""
    importing = re.compile(r"^\s*(?:from|import) conftest\b", re.MULTILINE)
    found = [path.name for path in (ROOT / "tests").rglob("*.py") if importing.search(path.read_text(encoding="utf-8"))]
    assert found == []
