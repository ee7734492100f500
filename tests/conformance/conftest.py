"""Workers by forkserver; stores without the DNS."""

import os

from fleet import crew

__all__ = ["crew"]

# torch asks the DNS for a name of each address it connects to. A test machine's may not answer. This is read once, so
# what needs it runs in processes of its own.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
