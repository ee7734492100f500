"""Fixtures of the conformance tests: workers started by forkserver."""

from fleet import crew

__all__ = ["crew"]
