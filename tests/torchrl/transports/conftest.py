"""Both schemes over pipes, in turn; workers by forkserver."""

from fleet import crew, pair, scheme_class, three

__all__ = ["crew", "pair", "scheme_class", "three"]
