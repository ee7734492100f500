"""Workers by forkserver."""

from fleet import crew

__all__ = ["crew"]
