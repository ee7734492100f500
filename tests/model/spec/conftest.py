"""Fixtures for tests of the generator: the repository, `protocol.toml`, and a copy of the files that it uses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

#: Everything that the generator reads or writes.
FILES = (
    "spec/protocol.toml",
    "weightsync/protocol/_tables.py",
    "weightsync/protocol/_actions.py",
    "tla/AckProtocol.tla",
    "tla/Tables.tla",
    "docs/protocol.md",
    "README.md",
)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def text() -> str:
    """The contents of `protocol.toml`."""
    return (ROOT / "spec" / "protocol.toml").read_text(encoding="utf-8")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the repository's protocol files, on which the generator works."""
    for name in FILES:
        if (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setattr("generate.ROOT", tmp_path)
    return tmp_path
