"""Confirms the ledger's result for a mutant by checking only what decided it then, in a reused JVM.

This takes minutes for all mutants, where hunting them takes over an hour. A mutant that is not confirmed is hunted.
"""

from __future__ import annotations

import queue
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from modelcheck.kept import KeptTlc
from modelcheck.mutants.generate import Mutant
from modelcheck.mutants.hunt import Baseline, Fate, Finding, Hunter, job, judge, placed
from modelcheck.mutants.ledger import Entry, Ledger, deadliest
from modelcheck.mutants.source import Source
from weightsync.errors import ConfigurationError
from weightsync.model.config import Config
from weightsync.model.manifest import Configuration
from weightsync.model.process import Outcome
from weightsync.model.text import Library
from weightsync.model.toolchain import Toolchain


class Confirmer:
    """Confirms results for mutants, from many threads at once, each with its own JVM.

    Args:
        toolchain: Java and TLC.
        source: the module that is changed.
        ledger: the known results.
        baselines: the hunting configurations.
        hunter: runs what a reused JVM is not reliable for.
    """

    def __init__(
        self, toolchain: Toolchain, source: Source, ledger: Ledger, baselines: Sequence[Baseline], hunter: Hunter
    ) -> None:
        self._toolchain = toolchain
        self._source = source
        self._ledger = ledger
        self._baselines = {baseline.configuration.name: baseline for baseline in baselines}
        self._hunter = hunter
        self._library = Library(hunter.folder)
        self._temporal = {name: self._temporal_of(baseline) for name, baseline in self._baselines.items()}
        self._kills = ledger.kills()
        self._kept: list[KeptTlc] = []
        self._idle: queue.SimpleQueue[KeptTlc] = queue.SimpleQueue()

    def confirm(self, mutant: Mutant, entry: Entry) -> Finding | None:
        """Return the result in an entry if it is still correct.

        For a killed mutant, the configuration and the property that killed it are checked. For a surviving one, its
        graph must still have the same size in the configuration where most mutants of its definition die.
        """
        baseline = self._baselines.get(self._where(mutant, entry))
        if baseline is None:
            return None
        with placed(mutant, self._source, self._hunter.folder) as folder:
            found = self._life(folder, baseline) if entry.lives else self._death(folder, baseline, entry)
        same = found.fate is entry.fate and (found.by == entry.by or not entry.fate.killed)
        return Finding(entry.fate, entry.by, entry.where) if same else None

    def vouch(self) -> None:
        """Check that each JVM still finds the unchanged model correct, after all its runs.

        Raises:
            ConfigurationError: one does not, so none of its results is reliable.
        """
        baselines = [baseline for name, baseline in self._baselines.items() if not self._temporal[name]]
        for kept in self._kept:
            for baseline in baselines[:1]:
                outcome = kept.run(job(self._hunter.folder, baseline.configuration))
                if judge(baseline, outcome, self._library).fate is not Fate.EQUIVALENT:
                    raise ConfigurationError(
                        f"A JVM that was reused for many runs no longer finds the unchanged model correct in "
                        f"{baseline.configuration.name}, so its results are not reliable: "
                        "python spec/check.py mutants --share 1/1 hunts all without it."
                    )

    def close(self) -> None:
        """End all JVMs, from any thread."""
        for kept in tuple(self._kept):
            kept.close()

    def _where(self, mutant: Mutant, entry: Entry) -> str:
        return entry.where or deadliest(self._kills[mutant.definition]) or next(iter(self._baselines), "")

    def _death(self, folder: Path, baseline: Baseline, entry: Entry) -> Finding:
        if entry.fate is Fate.PROPERTY:
            return self._found(folder, replace(baseline, met=frozenset()), entry.by.split(" or "))
        if entry.fate is Fate.CANARY:
            return self._found(folder, replace(baseline, met=frozenset({entry.by})), [self._ledger.lookout])
        return self._found(folder, baseline, None)

    def _life(self, folder: Path, baseline: Baseline) -> Finding:
        """A graph with the model's counts is taken to be the model's, so no property needs to be checked."""
        found = self._found(folder, replace(baseline, met=frozenset()), ())
        return self._found(folder, baseline, None) if found.fate is Fate.SURVIVED else found

    def _found(self, folder: Path, baseline: Baseline, checked: Collection[str] | None) -> Finding:
        """Run a hunting configuration with all or only some of its checks."""
        if checked is not None:
            fewer = checking(baseline.configuration.config, checked)
            baseline = replace(baseline, configuration=replace(baseline.configuration, config=fewer))
        return judge(baseline, self._run(folder, baseline.configuration), self._library)

    def _run(self, folder: Path, configuration: Configuration) -> Outcome:
        if self._temporal[configuration.name].intersection(configuration.config.properties):
            return self._hunter.run(folder, configuration)
        with self._jvm() as kept:
            return kept.run(job(folder, configuration))

    @contextmanager
    def _jvm(self) -> Iterator[KeptTlc]:
        try:
            kept = self._idle.get_nowait()
        except queue.Empty:
            kept = KeptTlc(self._toolchain)
            self._kept.append(kept)
        try:
            yield kept
        finally:
            self._idle.put(kept)

    def _temporal_of(self, baseline: Baseline) -> frozenset[str]:
        configuration = baseline.configuration
        listed = configuration.config.properties
        return frozenset(name for name in listed if self._library.is_temporal(configuration.module, name))


def checking(config: Config, names: Collection[str]) -> Config:
    """Return a copy with only those of its invariants, properties and action constraints that are in `names`."""

    def kept(listed: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in listed if name in names)

    return replace(
        config,
        action_constraints=kept(config.action_constraints),
        invariants=kept(config.invariants),
        properties=kept(config.properties),
    )
