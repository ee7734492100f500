"""Runs TLC on the model in `tla/` and compares its results with the manifest. Standard library only."""

from weightsync.model.manifest import Configuration, Expected, Manifest, Purpose, Tier, find_model
from weightsync.model.output import Counts, Progress
from weightsync.model.process import Coverage
from weightsync.model.suite import Observer, Suite
from weightsync.model.toolchain import Toolchain, ToolMissingError, find_toolchain
from weightsync.model.verdict import Verdict, described, due, explain, idle, record, vacuity

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
    "described",
    "due",
    "explain",
    "find_model",
    "find_toolchain",
    "idle",
    "record",
    "vacuity",
]
