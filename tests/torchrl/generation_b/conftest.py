"""Fixtures: both schemes over pipes, a trainer and a worker in one process, and worker processes by forkserver."""

from duo import duo
from fleet import crew, scheme_class

__all__ = ["crew", "duo", "scheme_class"]
