"""Work on a large buffer in several threads at once: each takes one contiguous part of it.

The threads live for one call. They are as many as torch uses for its own kernels (`torch.get_num_threads`), and every
part is large, so that starting them costs little beside the work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

#: The least number of bytes that are worth a thread of their own.
LEAST: Final = 4 << 20

Part = tuple[int, int]


def shares(nbytes: int, unit: int, threads: int) -> list[Part]:
    """Cut ``0:nbytes`` into parts of about equal size, one for each thread; all but the last end at a whole `unit`."""
    count = max(1, min(threads, nbytes // LEAST))
    cuts = [nbytes * number // count // unit * unit for number in range(count)] + [nbytes]
    return list(pairwise(cuts))


def in_threads(work: Callable[[int, int], None], parts: Sequence[Part]) -> None:
    """Call ``work(start, end)`` for each part: for the first in this thread, for each other in one of its own.

    Returns once all have ended. A part for which no thread can be started is worked on in this one.

    Raises:
        Exception: the first error that `work` raised. The other parts were worked on all the same.
    """
    errors: list[BaseException] = []

    def guarded(part: Part) -> None:
        try:
            work(*part)
        except BaseException as error:  # noqa: BLE001 - it is raised in the calling thread
            errors.append(error)

    started: list[threading.Thread] = []
    for part in parts[1:]:
        thread = threading.Thread(target=guarded, args=(part,), name="weightsync-copy")
        try:
            thread.start()
        except RuntimeError:  # no thread can be started now
            guarded(part)
        else:
            started.append(thread)
    guarded(parts[0])
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]
