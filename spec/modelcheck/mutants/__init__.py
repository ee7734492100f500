"""Mutants of the model: small changes, each of which must violate some property or canary."""

from modelcheck.mutants.complaints import changed_baselines, complaints, fallen, stale
from modelcheck.mutants.generate import Mutant, mutants
from modelcheck.mutants.hunt import Baseline, Fate, Finding, Hunter
from modelcheck.mutants.ledger import LEDGER, Entry, Ledger, Score
from modelcheck.mutants.session import Hunted, Session, Share, draw
from modelcheck.mutants.source import Source

__all__ = [
    "LEDGER",
    "Baseline",
    "Entry",
    "Fate",
    "Finding",
    "Hunted",
    "Hunter",
    "Ledger",
    "Mutant",
    "Score",
    "Session",
    "Share",
    "Source",
    "changed_baselines",
    "complaints",
    "draw",
    "fallen",
    "mutants",
    "stale",
]
