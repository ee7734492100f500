"""Fixtures: both schemes over pipes, and worker processes by forkserver."""

from fleet import crew, pair, scheme_class, three

__all__ = ["crew", "pair", "scheme_class", "three"]
