"""Count the buffers in a pool of payload buffers."""

from __future__ import annotations

from typing import NamedTuple

from weightsync.transports.buffers import Pool


class PoolStatistics(NamedTuple):
    """The numbers of buffers in a pool by kind, and their bytes, without retired buffers."""

    buffers: int
    pinned: int
    segments: int
    nbytes: int


def statistics(pool: Pool) -> PoolStatistics:
    """The current statistics of a pool."""
    held = [buffer for buffer in pool._buffers if not buffer.retired]
    return PoolStatistics(
        buffers=len(held),
        pinned=sum(buffer.pinned for buffer in held),
        segments=sum(buffer.segment is not None for buffer in held),
        nbytes=sum(buffer.nbytes for buffer in held),
    )
