"""Fixtures for tests over both schemes, with workers from a forkserver."""

from fleet import crew, pair, scheme_class, three

__all__ = ["crew", "pair", "scheme_class", "three"]
