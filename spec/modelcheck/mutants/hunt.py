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

#: A mutant's graph may be larger than the model's; a run that takes longer than this is undecided.
PATIENCE = 120.0


class Fate(Enum):
    """The result for a mutant, with the values that the ledger uses."""

    PROPERTY = "property"  #: a property is violated
    CANARY = "canary"  #: a situation that the model reaches is never reached
    INVALID = "invalid"  #: TLC cannot evaluate it
    EQUIVALENT = "equivalent"  #: all counts and situations equal the model's, within the bounds
    SURVIVED = "survived"  #: the graph differs, and no check notices
    UNDECIDED = "undecided"  #: the search did not end in time

    @property
    def killed(self) -> bool:
        """Whether some check notices the mutant."""
        return self in (Fate.PROPERTY, Fate.CANARY)


@dataclass(frozen=True, slots=True)
class Baseline:
    """A hunting configuration, and the results of the unchanged model in it.

    Attributes:
        configuration: the configuration.
        counts: the model's counts.
        met: the situations that the model reaches.
    """

    configuration: Configuration
    counts: Counts
    met: frozenset[str]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result for a mutant, and what decided it.

    Attributes:
        fate: the result.
        by: the property or the situation, or TLC's message.
        where: the configuration that decided; empty if all of them were needed.
    """

    fate: Fate
    by: str = ""
    where: str = ""


@contextmanager
def placed(mutant: Mutant, source: Source, folder: Path) -> Iterator[Path]:
    """Copy a model's modules, with a mutant applied, to their own folder.

    Args:
        mutant: the mutant.
        source: the module that it changes.
        folder: the model's folder.
    """
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as name:
        place = Path(name)
        for path in folder.glob("*.tla"):
            shutil.copy(path, place)
        (place / f"{source.module.name}.tla").write_text(source.text(mutant.definition, mutant.tree), encoding="utf-8")
        yield place


class Hunter:
    """Runs mutants, each in a new JVM.

    Args:
        toolchain: Java and TLC.
        source: the module that is changed.
        folder: where the model lies.
        baselines: the hunting configurations, the likeliest to kill first.
    """

    def __init__(self, toolchain: Toolchain, source: Source, folder: Path, baselines: Sequence[Baseline]) -> None:
        self._toolchain = toolchain
        self._source = source
        self.folder = folder
        self._baselines = {baseline.configuration.name: baseline for baseline in baselines}
        self._library = Library(folder)
        self._running: set[TlcRun] = set()
        self._stopped = False

    def hunt(self, mutant: Mutant, first: str = "") -> Finding:
        """Run a mutant until its result is decided.

        Args:
            mutant: the mutant.
            first: the configuration that decided last time.
        """
        order = sorted(self._baselines.values(), key=lambda baseline: baseline.configuration.name != first)
        found: list[Finding] = []
        with placed(mutant, self._source, self.folder) as folder:
            for baseline in order:
                finding = judge(baseline, self.run(folder, baseline.configuration), self._library)
                if finding.fate.killed:
                    return finding
                if finding.fate is Fate.INVALID and baseline.configuration.name == first:
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
        """End every JVM, from any thread; later runs end at once."""
        self._stopped = True
        for run in tuple(self._running):
            run.stop()


def job(folder: Path, configuration: Configuration) -> Job:
    """Return the run of one hunting configuration in a folder."""
    return Job(folder, configuration.module, configuration.config.text, timeout=PATIENCE, size=Size.SMALL)


def judge(baseline: Baseline, outcome: Outcome, library: Library) -> Finding:
    """Return the result of one run: a violation, else a situation not reached, else whether the graph is the same."""
    configuration = baseline.configuration
    if outcome.ending is not Ending.EXITED:
        return Finding(Fate.UNDECIDED, outcome.ending.value, configuration.name)
    findings = outcome.findings
    if findings.violations:
        by = named(findings.violations[0], configuration.module, configuration.config, library)
        return Finding(Fate.PROPERTY, by, configuration.name)
    if outcome.exit_code != 0 or not findings.completed or findings.errors or findings.counts is None:
        said = " ".join(" ".join([*findings.errors, *outcome.loose]).split())[:200]
        return Finding(Fate.INVALID, said, configuration.name)
    missing = sorted(baseline.met - set(outcome.met))
    if missing:
        return Finding(Fate.CANARY, missing[0], configuration.name)
    same = findings.counts == baseline.counts and baseline.met == set(outcome.met)
    return Finding(Fate.EQUIVALENT if same else Fate.SURVIVED, "", configuration.name)
