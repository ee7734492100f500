"""How a flat buffer is divided: into steps, each of which is copied in one way, and into parts for several threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple

from weightsync.weights.layout import Entry, Layout
from weightsync.weights.threads import Part, shares, threads_for
from weightsync.weights.tree_digest import CHUNK

#: Tensors of this size or more are copied without the GIL, on several threads. Smaller ones are copied in runs by one
#: thread that holds the GIL: releasing it and waiting for it again would take longer than the copy.
LARGE: Final = 32 << 10


class Move(Enum):
    """How a part of a buffer is copied."""

    #: One large tensor, as bytes.
    BYTES = "bytes"
    #: A run of small tensors, as bytes. They are moved so if that was planned.
    JOINED = "joined"
    #: One tensor or a run of them, by torch: what is no plain memory, is cast, or is a bool, which arrives as 0 or 1.
    BY_TORCH = "by torch"


class Step(NamedTuple):
    """A part of a buffer that is copied in one go, without gaps."""

    start: int
    end: int
    first: int
    last: int
    move: Move


def steps_of(layout: Layout, movable: frozenset[int]) -> tuple[Step, ...]:
    """All entries, in the order of the buffer; `movable`: those whose bytes are moved."""
    steps: list[Step] = []
    for index, entry in enumerate(layout.entries):
        end, before = entry.offset + entry.nbytes, steps[-1] if steps else None
        move = Move.BY_TORCH if index not in movable else Move.BYTES if entry.nbytes >= LARGE else Move.JOINED
        alone = entry.nbytes >= LARGE and entry.dtype != "bool"
        if alone or before is None or not _continues(before, entry, move):
            steps.append(Step(entry.offset, end, index, index + 1, move))
        else:
            steps[-1] = before._replace(end=end, last=index + 1)
    return tuple(steps)


def _continues(run: Step, entry: Entry, move: Move) -> bool:
    """Whether an entry can be copied together with the run of small ones before it."""
    small = run.last - run.first > 1 or run.end - run.start < LARGE
    touches = move is Move.BY_TORCH or run.end == entry.offset
    return small and run.move is move and touches and entry.offset + entry.nbytes - run.start <= CHUNK


def _parts(layout: Layout, steps: Sequence[Step], threads: int) -> Iterator[Part]:
    """The parts of a buffer for that many threads. Only what is moved as bytes is cut anywhere."""
    at, runs = 0, [step for step in steps if step.move is not Move.BYTES]
    for _, cut in shares(layout.nbytes, CHUNK, threads):
        run = next((step for step in runs if step.start < cut < step.end), None)
        end = cut if run is None else run.end
        if at < end or not layout.nbytes:
            yield at, end
        at = max(at, end)


class Cut(NamedTuple):
    """What is copied in one go: a step, or some bytes of one large tensor."""

    start: int
    end: int
    step: Step
    #: The address of its bytes in their tensor; 0 if it is no large tensor.
    source: int


class Divided(NamedTuple):
    """A buffer as parts that several threads copy, each with what is copied in one go."""

    parts: Mapping[Part, Sequence[Cut]]
    threads: int


def divided(layout: Layout, steps: Sequence[Step], places: Mapping[int, int], *, unit: int, least: int) -> Divided:
    """Divide a buffer for as many threads as its size is worth.

    Args:
        steps: what is copied, in the order of the buffer.
        places: the address of each large tensor that is moved.
        unit: large tensors are cut where one ends.
        least: smaller steps are not worth more threads, nor is what is copied with the GIL.
    """
    sizes = [step.end - step.start for step in steps if step.move is not Move.JOINED]
    threads = threads_for(sum(size for size in sizes if size >= least))
    parts: dict[Part, list[Cut]] = {part: [] for part in _parts(layout, steps, threads)}
    walk = iter(parts.items())
    (_, last), cuts = next(walk)
    for step in steps:
        source, low = places[step.first] if step.move is Move.BYTES else 0, step.start
        while low < step.end:
            while last <= low:
                (_, last), cuts = next(walk)
            high = min(step.end, last, low // unit * unit + unit) if source else step.end
            cuts.append(Cut(low, high, step, source and source + low - step.start))
            low = high
    return Divided(parts, threads)
