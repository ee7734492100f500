"""Limit the file descriptors of this process during a block."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def limit_descriptors(count: int) -> Iterator[None]:
    """Let this process open at most ``count`` descriptors inside the block, with garbage collection disabled."""
    gc.collect()
    gc.disable()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY)]
    # Take all numbers below the limit, including the free ones below the highest descriptor that is open.
    limit = max(int(name) for name in os.listdir("/proc/self/fd")) + 8 + count
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(held[0]))
        for _ in range(count):
            os.close(held.pop())
        yield
    finally:
        gc.enable()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)
