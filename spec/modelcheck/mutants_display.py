"""`spec/check.py mutants`: small changes are applied to the model, and a check must notice each of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from modelcheck.mutants import (
    Entry,
    Hunted,
    Ledger,
    Score,
    Session,
    Share,
    changed_baselines,
    complaints,
    draw,
    fallen,
    stale,
)
from weightsync.model import Manifest, Toolchain

_EVERY = 25


def hunt_mutants(
    manifest: Manifest, known: Path, toolchain: Toolchain, console: Console, share: Share, *, repin: bool
) -> bool:
    """Confirm what the ledger says about the mutants, print the score, and return whether the ledger is right.

    Args:
        manifest: the model.
        known: the ledger of its mutants.
        toolchain: Java and TLC.
        console: where to print.
        share: the mutants to hunt from scratch.
        repin: whether to write the results into the ledger, even if the run ends early.

    Raises:
        ConfigurationError: if the ledger or the model cannot be read, or the model itself is not as pinned.
    """
    started = time.monotonic()
    ledger = Ledger.read(known)
    whole = draw(manifest, ledger)
    afresh = share.taken(whole, ledger)
    console.print(f"{len(whole)} mutants, {len(afresh)} of them afresh, after the model itself", markup=False)
    session = Session(toolchain, manifest, ledger)
    baselines = session.measure()
    progress = _Progress(console, len(whole))
    try:
        session.hunt(baselines, whole, afresh, progress.report)
    finally:
        seen = progress.seen
        after = ledger.after(seen, [mutant.name for mutant in whole])
        if repin:
            after.write({baseline.configuration.name: baseline.met for baseline in baselines})
            ledger = Ledger.read(known)
    found = [*changed_baselines(ledger, baselines), *stale(ledger, whole), *complaints(ledger, seen), *fallen(after)]
    console.print(_killers(Score(seen)))
    for line in _summary(Score(seen), after, time.monotonic() - started):
        console.print(line, soft_wrap=True)
    for complaint in found:
        console.print(Text(complaint, style="red"), soft_wrap=True)
    return not found


class _Progress:
    """Reports the progress of the run from time to time, and the name of each mutant that survives."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self.seen: list[Entry] = []

    def report(self, hunted: Hunted) -> None:
        """Record one result."""
        self.seen.append(hunted.entry)
        done = len(self.seen)
        if not hunted.finding.fate.killed:
            line = f"[{done}/{self._total}] {hunted.finding.fate.value}: {hunted.mutant.name}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif done % _EVERY == 0:
            self._console.print(f"[{done}/{self._total}]", markup=False, highlight=False)


def _killers(score: Score) -> Table:
    table = Table(title="Who kills the mutants", title_justify="left", header_style="bold")
    for heading in ("killer", "what it is"):
        table.add_column(heading, overflow="fold")
    table.add_column("killed first", justify="right")
    for by, fate, count in score.killers:
        table.add_row(Text(by), fate.value, str(count))
    return table


def _summary(run: Score, known: Ledger, seconds: float) -> Iterator[Text]:
    kinds = ", ".join(f"{count} {fate.value}" for fate, count in run.fates.most_common())
    yield Text(f"{len(run.entries)} mutants run, in {seconds:.0f} s: {kinds}")
    whole = known.score
    style = "bold green" if whole.percent >= known.ratchet else "bold red"
    yield Text(
        f"{whole.killed} of all {whole.valid} that TLC can evaluate are killed: {whole.percent:.1f} % "
        f"(it may not fall below {known.ratchet} %)",
        style=style,
    )
