"""The docs site builds without warnings, and its reference has every public name."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import weightsync
from weightsync import errors

ROOT = Path(__file__).parents[2]
SITE = ROOT / "spec" / "site"


BROKEN_LINK = "\n[nowhere](nowhere.md)\n"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The site of a copy of the docs with one broken link, which fails the build after all pages are written."""
    copied, site = tmp_path_factory.mktemp("copied"), tmp_path_factory.mktemp("site")
    for name in ("docs", "spec/site", "tla/README.md", "spec/README.md", *(path.name for path in ROOT.glob("*.md"))):
        source, to = ROOT / name, copied / name
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, to) if source.is_dir() else shutil.copy(source, to)
    guide = copied / "docs" / "guide.md"
    guide.write_text(guide.read_text(encoding="utf-8") + BROKEN_LINK, encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "-f", str(copied / "spec/site/mkdocs.yml"), "-d", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    return site, subprocess.run(command, capture_output=True, text=True, env=environment, timeout=110, check=False)


@pytest.fixture
def site(built: tuple[Path, Any]) -> Path:
    return built[0]


def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", SITE / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_in_the_reference_with_its_docstring(site: Path) -> None:
    pages = {page.stem: page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html")}
    named = set(re.findall(r'id="weightsync\.[\w.]*?(\w+)"', "".join(pages.values())))
    public = {name for name in weightsync.__all__ if not name.startswith("_")}

    assert public - named == {"WeightSyncBackend"}, "that is a Literal, which has no docstring"
    assert "A strict state machine" in pages["sender"]


def test_pages_outside_docs_are_on_the_site_and_linked(site: Path) -> None:
    for place in hooks().PROJECT.values():
        assert (site / place).with_suffix(".html").exists() or (site / place).parent.joinpath("index.html").exists()
    assert 'href="project/index.html"' in (site / "index.html").read_text(encoding="utf-8")


def test_the_build_fails_for_a_broken_link_and_has_no_other_warning(
    built: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    _, done = built
    assert done.returncode != 0
    (warned,) = re.findall(r"^(?:WARNING|ERROR) .*", done.stderr, re.MULTILINE)
    assert "'guide.md' contains a link 'nowhere.md'" in warned


#: Errors that no caller ever sees, and how they are handled.
INTERNAL = {
    "AdapterFault": "the link is given up, and the worker LOST",
    "Challenged": "the call is repeated",
    "EngineInDoubtError": "the engine is LOST",
    "ClosedByPeer": "the link's worker is LOST",
    "FunctionalCallError": "the version waits",
    "NoRoom": "the worker refuses",
    "NotDoneError": "the engine is LOST, or a warning says that its prefix cache was not reset",
    "UnreachedError": "the engine is LOST",
    "SwapBroken": "the receiver is closed, and the worker LOST",
    "LocalWorkerError": "bench, demo and soak say what became of a worker that they started",
    "DeviceError": "weights travel through the host's memory, or the worker refuses",
}


def public_errors() -> set[str]:
    """The names of all public subclasses of `WeightSyncError` in the package, in any module."""
    bases: dict[str, set[str]] = {}
    for path in (ROOT / "weightsync").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases.setdefault(node.name, set()).update(ast.unparse(base).split(".")[-1] for base in node.bases)
    found = {"WeightSyncError"}
    while more := {name for name, derived_from in bases.items() if derived_from & found} - found:
        found |= more
    return {name for name in found if not name.startswith("_")} - {"WeightSyncError"}


def test_each_public_error_is_under_troubleshooting_with_what_to_do() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    exported = {name for name in weightsync.__all__ if name in vars(errors)} - {"WeightSyncError"}
    kinds = public_errors()

    assert exported < kinds - INTERNAL.keys()
    for kind in kinds - INTERNAL.keys():
        section = page.partition(f"### {kind}\n")[2].partition("\n### ")[0]
        assert "**What to do:** " in section, kind


def test_every_error_of_the_package_that_is_raised_to_callers_is_exported() -> None:
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, RuntimeError)}

    assert kinds - {"RuntimeError"} == {name for name in weightsync.__all__ if name in kinds}
