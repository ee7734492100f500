"""Mutants of the model: small changes, each of which some property or canary must find wrong."""

from weightsync.checker.mutants.complaints import changed_grounds, complaints, fallen, stale
from weightsync.checker.mutants.generate import Mutant, mutants
from weightsync.checker.mutants.hunt import Fate, Finding, Ground, Hunter
from weightsync.checker.mutants.ledger import Entry, Ledger, Score
from weightsync.checker.mutants.session import Hunted, Session, Share, draw
from weightsync.checker.mutants.source import Source

__all__ = [
    "Entry",
    "Fate",
    "Finding",
    "Ground",
    "Hunted",
    "Hunter",
    "Ledger",
    "Mutant",
    "Score",
    "Session",
    "Share",
    "Source",
    "changed_grounds",
    "complaints",
    "draw",
    "fallen",
    "mutants",
    "stale",
]
