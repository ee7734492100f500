"""Runs TLC on the model in `tla/` and judges what it says. Standard library only."""

from weightsync.checker.manifest import Configuration, Expected, Manifest, Purpose, Tier, find_model
from weightsync.checker.output import Counts, Progress
from weightsync.checker.process import Coverage
from weightsync.checker.record import record
from weightsync.checker.suite import Observer, Suite
from weightsync.checker.toolchain import Toolchain, ToolMissingError, find_toolchain
from weightsync.checker.verdict import Verdict, due, explain, idle, vacuity

__all__ = [
    "Configuration",
    "Counts",
    "Coverage",
    "Expected",
    "Manifest",
    "Observer",
    "Progress",
    "Purpose",
    "Suite",
    "Tier",
    "ToolMissingError",
    "Toolchain",
    "Verdict",
    "due",
    "explain",
    "find_model",
    "find_toolchain",
    "idle",
    "record",
    "vacuity",
]
