"""Checks traces against the protocol: standard library and the shipped pure halves only."""

from weightsync.checker.traces.judging import Judgement, Run, Verdict, verify
from weightsync.checker.traces.lines import Finding, Line, UnreadableTraceError
from weightsync.checker.traces.tlc import Followed, TlcFailedError, follow
from weightsync.checker.traces.words import shown

__all__ = [
    "Finding",
    "Followed",
    "Judgement",
    "Line",
    "Run",
    "TlcFailedError",
    "UnreadableTraceError",
    "Verdict",
    "follow",
    "shown",
    "verify",
]
