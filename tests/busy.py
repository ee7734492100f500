"""Run a command on an overloaded machine, with two busy processes for each core: `make test-loaded`.

    python tests/busy.py pytest -m 'not slow'

A test that fails here, but passes on an idle machine, depends on the machine's speed.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys


def burn(parent: int) -> None:
    """Keep one core busy until the parent process has ended."""
    while os.getppid() == parent:
        sum(range(100_000))


def main(command: list[str]) -> int:
    """Run the command beside the busy processes, and return its exit status."""
    cores = len(os.sched_getaffinity(0))
    busy = [multiprocessing.Process(target=burn, args=(os.getpid(),), daemon=True) for _ in range(2 * cores)]
    for process in busy:
        process.start()
    try:
        return subprocess.run(command, check=False).returncode
    finally:
        for process in busy:
            process.kill()
            process.join()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
