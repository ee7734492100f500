"""The page on what is proved follows from its sources, and names nothing that does not exist."""

from __future__ import annotations

import shutil
from pathlib import Path

import assurance
import pytest
from assurancegen import sources


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    """What the page is rendered from, to be spoilt."""
    for folder in ("spec", "tla", "tests", "weightsync/testing"):
        shutil.copytree(root / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    return tmp_path


def test_the_page_is_what_its_sources_say(root: Path) -> None:
    assert (root / "docs" / "assurance.md").read_text(encoding="utf-8") == assurance.render(root)


def test_every_guarantee_says_what_is_not_proved(root: Path) -> None:
    for guarantee in sources.read(root):
        assert guarantee.unproved
        assert guarantee.tests
        assert guarantee.properties


def _spoilt(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        ("spec/assurance.toml", "::test_fault_1_", "::test_fault_0_", "G1: no test is .*test_fault_0_"),
        (
            "spec/assurance.toml",
            '["ServingIsMonotone"]',
            '["ServingIsTonic"]',
            "G4: AckProtocol.tla has no ServingIsTonic",
        ),
        ("spec/assurance.toml", 'id = "G9"', 'id = "G99"', "G99"),
        ("tests/planted/test_planted.py", '"""G7: ', '"""H7: ', "G7: no fault is planted"),
        ("tests/schemes/test_sending.py", "def test_a_late_joiner_", "def test_the_late_joiner_", "G12: no test is"),
    ],
)
def test_a_name_that_does_not_exist_is_refused(copy: Path, file: str, old: str, new: str, told: str) -> None:
    _spoilt(copy / file, old, new)
    with pytest.raises(sources.SourceError, match=told):
        assurance.render(copy)


def test_a_count_that_changes_changes_the_page(copy: Path) -> None:
    before = assurance.render(copy)
    _spoilt(copy / "tla" / "manifest.toml", "distinct = 1409", "distinct = 1410")
    assert assurance.render(copy) != before
