"""What a mutation run comes to: its score, by killer, and what is not as the ledger says it must be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from weightsync.checker.mutants.generate import Mutant
from weightsync.checker.mutants.hunt import Fate, Ground
from weightsync.checker.mutants.ledger import Entry, Ledger
from weightsync.checker.mutants.session import Hunted


@dataclass(frozen=True)
class Score:
    """A mutation run, counted.

    Attributes:
        hunted: the mutants and their fates.
    """

    hunted: Sequence[Hunted]

    @cached_property
    def fates(self) -> Counter[Fate]:
        """How many mutants met each fate."""
        return Counter(each.finding.fate for each in self.hunted)

    @property
    def killed(self) -> int:
        """How many were killed."""
        return sum(count for fate, count in self.fates.items() if fate.killed)

    @property
    def valid(self) -> int:
        """How many TLC could evaluate."""
        return len(self.hunted) - self.fates[Fate.INVALID]

    @property
    def percent(self) -> float:
        """How many of the valid ones were killed; those that change nothing within the bounds count as alive."""
        return 100.0 * self.killed / self.valid if self.valid else 0.0

    @property
    def killers(self) -> tuple[tuple[str, Fate, int], ...]:
        """Who killed, the most deadly first."""
        found = Counter((each.finding.by, each.finding.fate) for each in self.hunted if each.finding.fate.killed)
        return tuple((by, fate, count) for (by, fate), count in found.most_common())

    @property
    def entries(self) -> tuple[Entry, ...]:
        """What is now known of each mutant."""
        return tuple(
            Entry(each.mutant.name, each.finding.fate, each.finding.by, each.finding.where) for each in self.hunted
        )


def changed_grounds(ledger: Ledger, grounds: Sequence[Ground]) -> Iterator[str]:
    """Yield each hunting configuration that no longer meets the situations it must."""
    for ground in grounds:
        name = ground.configuration.name
        missing = sorted(ledger.hunts[name] - ground.met)
        more = sorted(ground.met - ledger.hunts[name])
        if missing:
            yield f"{name}: the model itself never meets: {', '.join(missing)}"
        if more:
            yield f"{name}: met, but not in the ledger: {', '.join(more)} (weightsync check --mutants --pin)"


def stale(ledger: Ledger, wanted: Sequence[Mutant]) -> Iterator[str]:
    """Yield each entry about a mutant that there is no more, and each mutant without an entry."""
    names = {mutant.name for mutant in wanted}
    for name in ledger.entries:
        if name not in names:
            yield f"stale entry, there is no such mutant any more: {name}"
    for name in names - set(ledger.entries):
        yield f"not in the ledger (weightsync check --mutants --pin): {name}"


def complaints(ledger: Ledger, score: Score, whole: Sequence[Mutant]) -> Iterator[str]:
    """Yield what is not as it must be.

    Args:
        ledger: what was known.
        score: what was seen; of all mutants, or of a slice of them.
        whole: all mutants.
    """
    for each in score.hunted:
        entry = ledger.known(each.mutant.name)
        if entry is not None:
            yield from _compared(entry, each)
    if len(score.hunted) == len(whole) and score.percent < ledger.ratchet:
        yield f"the score is {score.percent:.1f} %, and it was {ledger.ratchet} %: it may not fall"


def _compared(entry: Entry, hunted: Hunted) -> Iterator[str]:
    fate = hunted.finding.fate
    if fate.killed and entry.reason:
        yield f"killed by {hunted.finding.by}, so its reason to live is stale: {entry.name}"
    if fate is Fate.INVALID and entry.fate is not Fate.INVALID:
        yield f"TLC can no longer evaluate it ({hunted.finding.by}): {entry.name}"
    if not fate.killed and fate is not Fate.INVALID:
        if entry.fate.killed:
            yield f"killed no more ({fate.value}), formerly by {entry.by} in {entry.where}: {entry.name}"
        elif not entry.reason:
            yield f"lives ({fate.value}) without a reason in the ledger: {entry.name}"
