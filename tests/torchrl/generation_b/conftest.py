"""Both schemes over pipes, in the second generation's API; both sides in one process, or workers by forkserver."""

from duo import duo
from fleet import crew, scheme_class

__all__ = ["crew", "duo", "scheme_class"]
