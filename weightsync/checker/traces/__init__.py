"""Checks traces against the protocol: standard library and the shipped pure halves only."""

from weightsync.checker.traces.judging import Judgement, Run, Verdict, verify
from weightsync.checker.traces.lines import Finding, Line, UnreadableTraceError
from weightsync.checker.traces.words import story

__all__ = ["Finding", "Judgement", "Line", "Run", "UnreadableTraceError", "Verdict", "story", "verify"]
