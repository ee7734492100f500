"""A mutation run: first the unchanged model, then its mutants, in parallel on all cores."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from modelcheck.mutants.confirm import Confirmer
from modelcheck.mutants.generate import Mutant, mutants
from modelcheck.mutants.hunt import Baseline, Finding, Hunter
from modelcheck.mutants.ledger import Entry, Ledger, deadliest
from modelcheck.mutants.source import Source
from weightsync.errors import ConfigurationError
from weightsync.model.manifest import Configuration, Manifest
from weightsync.model.process import Ending
from weightsync.model.suite import cores
from weightsync.model.text import Library
from weightsync.model.toolchain import Toolchain

_Given = TypeVar("_Given")
_Made = TypeVar("_Made")
_MOST_AT_ONCE = 2
_WAKE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Hunted:
    """A mutant and its result."""

    mutant: Mutant
    finding: Finding

    @property
    def entry(self) -> Entry:
        """Its entry for the ledger."""
        return Entry(self.mutant.name, self.finding.fate, self.finding.by, self.finding.where)


def source_of(manifest: Manifest, ledger: Ledger) -> Source:
    """Return the definitions that the ledger has changed.

    Raises:
        ConfigurationError: if the module is not there.
    """
    module = Library(manifest.folder).module(ledger.module)
    if module is None:
        raise ConfigurationError(f"The ledger names the module {ledger.module}, which {manifest.folder} lacks.")
    return Source(module, ledger.roots, manifest.planted)


@dataclass(frozen=True, slots=True)
class Share:
    """The mutants that are hunted from scratch: every N-th one, and those without an entry.

    Attributes:
        which: the position of the first, from 1; 0 for only those without an entry.
        of: N.
    """

    which: int = 0
    of: int = 1

    @classmethod
    def read(cls, text: str) -> Share:
        """Read a share that is written as `2/14`.

        Raises:
            ValueError: it is not a share.
        """
        which, _, of = text.partition("/")
        share = cls(int(which), int(of))
        if not 1 <= share.which <= share.of:
            raise ValueError(f"{text} is not a share")
        return share

    def taken(self, whole: Sequence[Mutant], ledger: Ledger) -> tuple[Mutant, ...]:
        """Return the mutants that are hunted from scratch, in their order."""
        return tuple(
            mutant
            for place, mutant in enumerate(whole)
            if place % self.of == self.which - 1 or ledger.known(mutant.name) is None
        )


def draw(manifest: Manifest, ledger: Ledger) -> tuple[Mutant, ...]:
    """Return the mutants that the ledger is about.

    Raises:
        ConfigurationError: if the module cannot be read.
    """
    return mutants(source_of(manifest, ledger), ledger.untouched)


class Session:
    """Runs mutants.

    Args:
        toolchain: Java and TLC.
        manifest: the model's configurations; the hunting ones are pinned there.
        ledger: which configurations hunt, and what decided last time.
    """

    def __init__(self, toolchain: Toolchain, manifest: Manifest, ledger: Ledger) -> None:
        self._toolchain = toolchain
        self._manifest = manifest
        self._ledger = ledger
        self._source = source_of(manifest, ledger)
        #: For each definition, the number of its mutants killed in each configuration: the deadliest is tried first.
        self._kills = ledger.kills()

    def measure(self) -> tuple[Baseline, ...]:
        """Run the unchanged model in each hunting configuration.

        Raises:
            ConfigurationError: a check fails, or its counts differ from the pinned ones.
        """
        configurations = {found.name: found for found in self._manifest.select(self._ledger.hunts)}
        ordered = [configurations[name] for name in self._ledger.hunts]
        hunter = self._hunter(())
        return _side_by_side([hunter.stop], partial(self._measured, hunter), ordered, lambda _: None)

    def _measured(self, hunter: Hunter, configuration: Configuration) -> Baseline:
        outcome = hunter.run(self._manifest.folder, configuration)
        findings = outcome.findings
        held = outcome.ending is Ending.EXITED and outcome.exit_code == 0 and findings.completed
        if not held or findings.counts is None or findings.counts != configuration.pinned:
            raise ConfigurationError(
                f"{configuration.name} does not give for the model itself what the manifest says: "
                f"see weightsync check {configuration.name}, then try again."
            )
        return Baseline(configuration, findings.counts, frozenset(outcome.met))

    def hunt(
        self,
        baselines: Sequence[Baseline],
        wanted: Iterable[Mutant],
        afresh: Collection[Mutant],
        report: Callable[[Hunted], None],
    ) -> tuple[Hunted, ...]:
        """Run mutants and return their results, in their order.

        Args:
            baselines: the results of the unchanged model.
            wanted: the mutants. The ledger's result is confirmed; a mutant that cannot be confirmed is hunted.
            afresh: the mutants that are hunted whatever the ledger says.
            report: called with each result, in the caller's thread.

        Raises:
            ConfigurationError: confirmed results are not reliable.
        """
        hunter = self._hunter(baselines)
        confirmer = Confirmer(self._toolchain, self._source, self._ledger, baselines, hunter)
        unasked = {mutant.name for mutant in afresh}

        def run(mutant: Mutant) -> Hunted:
            entry = None if mutant.name in unasked else self._ledger.known(mutant.name)
            confirmed = confirmer.confirm(mutant, entry) if entry else None
            return Hunted(mutant, confirmed or self._hunted(hunter, mutant))

        try:
            found = _side_by_side([hunter.stop, confirmer.close], run, wanted, report)
            confirmer.vouch()
        finally:
            confirmer.close()
        return found

    def _hunted(self, hunter: Hunter, mutant: Mutant) -> Finding:
        entry = self._ledger.known(mutant.name)
        kills = self._kills[mutant.definition]
        finding = hunter.hunt(mutant, entry.where if entry else deadliest(kills))
        if finding.fate.killed:
            kills[finding.where] += 1
        return finding

    def _hunter(self, baselines: Sequence[Baseline]) -> Hunter:
        return Hunter(self._toolchain, self._source, self._manifest.folder, baselines)


def _side_by_side(
    ends: Sequence[Callable[[], None]],
    task: Callable[[_Given], _Made],
    given: Iterable[_Given],
    report: Callable[[_Made], None],
) -> tuple[_Made, ...]:
    """Run a task for each item, in parallel. If this ends early, call `ends`, to end the JVMs."""
    pool = ThreadPoolExecutor(min(_MOST_AT_ONCE, cores()), thread_name_prefix="mutants")
    futures = [pool.submit(task, each) for each in given]
    try:
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, timeout=_WAKE_SECONDS, return_when=FIRST_COMPLETED)
            for future in done:
                report(future.result())
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for end in ends:
            end()
        raise
    finally:
        pool.shutdown()
    return tuple(future.result() for future in futures)
