"""Checks traces against the protocol, using only the standard library and the shipped pure halves."""

from weightsync.verify.judging import Judgement, Run, Verdict, verify
from weightsync.verify.lines import Finding, Line, UnreadableTraceError
from weightsync.verify.tlc import Followed, TlcFailedError, follow
from weightsync.verify.words import shown

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
