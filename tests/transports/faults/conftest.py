"""Fixtures of the faults: both schemes for pipes, and workers started by forkserver."""

from fleet import crew, pair, scheme_class, three

__all__ = ["crew", "pair", "scheme_class", "three"]
