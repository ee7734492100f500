"""Measures the costs and savings of deltas on this machine, for docs/guide.md: `python spec/delta.py [MIB]`.

Each row changes a share of a model's elements at random. The link speed below which a delta is faster follows from the
bytes that it saves and its time at both ends. That speed is calculated, not measured.
"""

from __future__ import annotations

import os
import statistics
import sys
from time import perf_counter

import numpy
import torch

from weightsync.weights.delta import apply, encode

SHARES = (0.0001, 0.001, 0.01, 0.05, 0.2)
#: The size in bytes of the words that are compared, by the dtype's name.
WORDS = {"float32": 4, "bfloat16": 2}
REPEATS = 5
HEAD = "| changed | dtype | sent | encode | apply | faster below |\n| --- | --- | --- | --- | --- | --- |"


def row(nbytes: int, dtype: str, share: float) -> str:
    """One row of the table."""
    word, rng = WORDS[dtype], numpy.random.default_rng(1)
    base = rng.integers(0, 256, nbytes, numpy.uint8)
    changed = base.copy()
    words = changed.view(f"<u{word}")
    words[rng.random(len(words)) < share] += 1
    encoding, applying, delta = [], [], b""
    for _ in range(REPEATS):
        began = perf_counter()
        delta = encode(base.data, changed.data, word, nbytes) or b""
        encoding.append(perf_counter() - began)
        held = base.copy()
        began = perf_counter()
        apply(memoryview(delta), held.data)
        applying.append(perf_counter() - began)
        assert numpy.array_equal(held, changed)
    seconds = statistics.median(encoding), statistics.median(applying)
    rate = (nbytes - len(delta)) / sum(seconds) / 1e9
    columns = f"{len(delta) / nbytes:.2%}", *(f"{each * 1e3:.0f} ms" for each in seconds), f"{rate:.1f} GB/s"
    return f"| {share:.2%} | {dtype} | {' | '.join(columns)} |"


def main() -> None:
    """Print the table."""
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    print(f"{mib} MiB, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads, median of {REPEATS}\n\n{HEAD}")
    for dtype in WORDS:
        for share in SHARES:
            print(row(mib << 20, dtype, share), flush=True)


if __name__ == "__main__":
    main()
