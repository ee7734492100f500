"""Differences between the results of a mutation run and the ledger."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from modelcheck.mutants.generate import Mutant
from modelcheck.mutants.hunt import Baseline, Fate
from modelcheck.mutants.ledger import Entry, Ledger


def changed_baselines(ledger: Ledger, baselines: Sequence[Baseline]) -> Iterator[str]:
    """Yield each hunting configuration whose reached situations differ from the ledger's."""
    for baseline in baselines:
        name = baseline.configuration.name
        missing = sorted(ledger.hunts[name] - baseline.met)
        more = sorted(baseline.met - ledger.hunts[name])
        if missing:
            yield f"{name}: the model itself never meets: {', '.join(missing)}"
        if more:
            yield f"{name}: met, but not in the ledger: {', '.join(more)} (python spec/check.py mutants --pin)"


def stale(ledger: Ledger, whole: Sequence[Mutant]) -> Iterator[str]:
    """Yield each entry whose mutant no longer exists, and each mutant without an entry."""
    names = {mutant.name for mutant in whole}
    for name in ledger.entries:
        if name not in names:
            yield f"stale entry, there is no such mutant any more: {name}"
    for name in names - set(ledger.entries):
        yield f"not in the ledger (python spec/check.py mutants --pin): {name}"


def complaints(ledger: Ledger, seen: Iterable[Entry]) -> Iterator[str]:
    """Yield each result that differs from the ledger."""
    for entry in seen:
        before = ledger.known(entry.name)
        if before is not None:
            yield from _compared(before, entry)


def fallen(ledger: Ledger) -> Iterator[str]:
    """Yield a complaint if the score of all mutants is below the ratchet."""
    if ledger.score.percent < ledger.ratchet:
        yield f"the score is {ledger.score.percent:.1f} %, and it was {ledger.ratchet} %: it may not fall"


def _compared(before: Entry, now: Entry) -> Iterator[str]:
    if now.fate.killed and before.reason:
        yield f"killed by {now.by}, so its reason to live is stale: {now.name}"
    if now.fate is Fate.INVALID and before.fate is not Fate.INVALID:
        yield f"TLC can no longer evaluate it ({now.by}): {now.name}"
    if now.lives and before.fate.killed:
        yield f"killed no more ({now.fate.value}), formerly by {before.by} in {before.where}: {now.name}"
    elif now.lives and not before.reason:
        yield f"lives ({now.fate.value}) without a reason in the ledger: {now.name}"
