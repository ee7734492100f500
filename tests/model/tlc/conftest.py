"""Fixtures for the tests of the checker: TLC, the small model, and captured output."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from skipping import require_tlc
from tlc_support import Recorder

from weightsync.model.manifest import Manifest
from weightsync.model.output import Findings, MessageReader
from weightsync.model.process import Ending, Job, Outcome, TlcRun, archived
from weightsync.model.toolchain import Toolchain

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def toolchain() -> Iterator[Toolchain]:
    """Java and TLC. If they are missing the test is skipped, or fails in CI."""
    with archived(require_tlc("THE CHECKER"), runs=100) as found:
        yield found


@pytest.fixture
def specs(tmp_path: Path) -> Path:
    """A copy of the small model, for a test to change."""
    return Path(shutil.copytree(HERE / "specs", tmp_path / "specs"))


@pytest.fixture
def captured() -> Callable[[str], tuple[Findings, tuple[str, ...]]]:
    """Reads captured output of TLC, by its name."""

    def read(name: str) -> tuple[Findings, tuple[str, ...]]:
        reader, findings = MessageReader(), Findings()
        for line in (HERE / "captured" / f"{name}.txt").read_text().splitlines(keepends=True):
            message = reader.feed(line)
            if message is not None:
                findings.take(message)
        return findings, tuple(reader.loose)

    return read


@pytest.fixture
def run_fault(toolchain: Toolchain) -> Callable[[str, int], Outcome]:
    """Runs one of the models on which TLC is known to be wrong."""

    def run(name: str, workers: int) -> Outcome:
        config = (HERE / "faults" / f"{name}.cfg").read_text()
        job = Job(HERE / "faults", name, config, workers=workers, timeout=60)
        outcome = TlcRun(toolchain, job).run(lambda _: None)
        assert outcome.ending is Ending.EXITED
        return outcome

    return run


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def manifest(specs: Path) -> Manifest:
    return Manifest.read(specs)
