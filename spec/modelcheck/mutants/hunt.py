"""One mutant against the hunting configurations: what kills it, if anything does."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from modelcheck.mutants.generate import Mutant
from modelcheck.mutants.source import Source
from weightsync.model.manifest import Configuration
from weightsync.model.output import Counts
from weightsync.model.process import FOLDER_PREFIX, Ending, Job, Outcome, Size, TlcRun
from weightsync.model.text import Library
from weightsync.model.toolchain import Toolchain
from weightsync.model.verdict import named

#: A mutant's graph may be larger than the model's; one that takes longer than this is not decided.
PATIENCE = 120.0


class Fate(Enum):
    """What becomes of a mutant. Values are the ledger's words."""

    PROPERTY = "property"  #: a property is violated
    CANARY = "canary"  #: a situation is never met that the model meets
    INVALID = "invalid"  #: TLC cannot evaluate it
    EQUIVALENT = "equivalent"  #: every count and every situation is the model's, within the bounds
    SURVIVED = "survived"  #: the graph is another one, and nothing says that it is wrong
    UNDECIDED = "undecided"  #: the search did not end in time

    @property
    def killed(self) -> bool:
        """Whether something says that the mutant is wrong."""
        return self in (Fate.PROPERTY, Fate.CANARY)


@dataclass(frozen=True, slots=True)
class Ground:
    """A hunting configuration, and what the model itself gives there.

    Attributes:
        configuration: which.
        counts: its states.
        met: the situations that are met.
    """

    configuration: Configuration
    counts: Counts
    met: frozenset[str]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of a mutant.

    Attributes:
        fate: what became of it.
        by: the property or the situation, or what TLC said.
        where: the configuration that decided; empty where it took all of them.
    """

    fate: Fate
    by: str = ""
    where: str = ""


@contextmanager
def placed(mutant: Mutant, source: Source, folder: Path) -> Iterator[Path]:
    """Lay a model's modules out in a folder of their own, with a mutant in them.

    Args:
        mutant: which.
        source: the module that it changes.
        folder: where the model lies.
    """
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as name:
        place = Path(name)
        for path in folder.glob("*.tla"):
            shutil.copy(path, place)
        (place / f"{source.module.name}.tla").write_text(source.text(mutant.definition, mutant.tree), encoding="utf-8")
        yield place


class Hunter:
    """Runs mutants, each time in a JVM of its own.

    Args:
        toolchain: Java and TLC.
        source: the module that is changed.
        folder: where the model lies.
        grounds: the hunting configurations, the likeliest to kill first.
    """

    def __init__(self, toolchain: Toolchain, source: Source, folder: Path, grounds: Sequence[Ground]) -> None:
        self._toolchain = toolchain
        self._source = source
        self.folder = folder
        self._grounds = {ground.configuration.name: ground for ground in grounds}
        self._library = Library(folder)
        self._running: set[TlcRun] = set()
        self._stopped = False

    def hunt(self, mutant: Mutant, first: str = "") -> Finding:
        """Run a mutant until something decides.

        Args:
            mutant: which.
            first: the configuration that decided last time.
        """
        order = sorted(self._grounds.values(), key=lambda ground: ground.configuration.name != first)
        found: list[Finding] = []
        with placed(mutant, self._source, self.folder) as folder:
            for ground in order:
                finding = judge(ground, self.run(folder, ground.configuration), self._library)
                if finding.fate.killed:
                    return finding
                if finding.fate is Fate.INVALID and ground.configuration.name == first:
                    return finding
                found.append(finding)
        for fate in (Fate.INVALID, Fate.UNDECIDED, Fate.SURVIVED):
            for finding in found:
                if finding.fate is fate:
                    return finding
        return Finding(Fate.EQUIVALENT)

    def run(self, folder: Path, configuration: Configuration) -> Outcome:
        """Run one configuration in a folder."""
        run = TlcRun(self._toolchain, job(folder, configuration))
        self._running.add(run)
        if self._stopped:
            run.stop()
        try:
            return run.run(lambda _: None)
        finally:
            self._running.discard(run)

    def stop(self) -> None:
        """End every JVM, from any thread; what is run later ends at once."""
        self._stopped = True
        for run in tuple(self._running):
            run.stop()


def job(folder: Path, configuration: Configuration) -> Job:
    """Return the run of one hunting configuration in a folder."""
    return Job(folder, configuration.module, configuration.config.text, timeout=PATIENCE, size=Size.SMALL)


def judge(ground: Ground, outcome: Outcome, library: Library) -> Finding:
    """Say what one run decides: what is violated, or else what is not met, or else whether the graph is the same."""
    configuration = ground.configuration
    if outcome.ending is not Ending.EXITED:
        return Finding(Fate.UNDECIDED, outcome.ending.value, configuration.name)
    findings = outcome.findings
    if findings.violations:
        by = named(findings.violations[0], configuration.module, configuration.config, library)
        return Finding(Fate.PROPERTY, by, configuration.name)
    if outcome.exit_code != 0 or not findings.completed or findings.errors or findings.counts is None:
        said = " ".join(" ".join([*findings.errors, *outcome.loose]).split())[:200]
        return Finding(Fate.INVALID, said, configuration.name)
    missing = sorted(ground.met - set(outcome.met))
    if missing:
        return Finding(Fate.CANARY, missing[0], configuration.name)
    same = findings.counts == ground.counts and ground.met == set(outcome.met)
    return Finding(Fate.EQUIVALENT if same else Fate.SURVIVED, "", configuration.name)
