"""Measures what a fleet of many workers costs the trainer, and renders `docs/cluster.md` from the results.

    python spec/scale.py --measure NAME     # a few minutes: writes docs/scale/NAME.json
    python spec/scale.py                    # renders the page
    python spec/scale.py --check            # compares it byte for byte

Exit status: 0 the page is up to date, 1 the page differs, 2 results or the page cannot be read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from protocolgen.docs import fill, keep
from protocolgen.source import SpecError

from weightsync.bench.reporting import markdown
from weightsync.bench.settings import MIB

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/cluster.md"
RESULTS = "docs/scale"
#: The number of workers on one host, in the calculated table.
_A_HOST = 8
#: The fan-outs in the calculated table.
_WIDTHS = (8, 2)
_GB = 1e9


def read(root: Path = ROOT) -> dict[str, Any]:
    """All stored results, by the names of their files.

    Raises:
        SpecError: there is none, or one cannot be read.
    """
    try:
        found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (root / RESULTS).glob("*.json")}
    except ValueError as error:
        raise SpecError([f"{RESULTS}: {error}"]) from error
    if not found:
        raise SpecError([f"{RESULTS} has no results: `python spec/scale.py --measure NAME` writes them"])
    return dict(sorted(found.items()))


def measured(found: dict[str, Any]) -> str:
    """The measurements, for each machine separately."""
    return "\n".join(line for name, results in found.items() for line in _measured(name, results))


def _measured(name: str, results: dict[str, Any]) -> Iterator[str]:
    yield f"### Machine: {name}\n"
    yield markdown(("", ""), [*results["machine"].items(), ("memcpy, one thread", f"{results['memcpy_gb_s']} GB/s")])
    yield "One answer in the sender's pure half:\n"
    answers: list[tuple[str, ...]] = [
        (f"{row['workers']:,}", f"{row['us']}", f"{row['calls']}") for row in results["step"]
    ]
    yield markdown(("workers", "µs", "Python calls"), answers)
    yield f"Each time that the trainer wakes, the kernel looks at all links: at 300 in {results['poll_us']} µs.\n"
    yield "A send of 256 KiB over shared memory to worker processes on this machine:\n"
    columns = "workers", "send, ms", "trainer's CPU, ms", "a worker, ms", "Python calls a worker"
    yield markdown(columns, [_fleet_row(row) for row in results["fleet"]])
    yield "Memory at the peak, in addition to the models themselves, in multiples of the payload:\n"
    held = ("scheme", "trainer's own", "shared, once per host", "each worker's own")
    peaks = [(row["scheme"], *(f"{row[key]}" for key in ("trainer", "shared", "worker"))) for row in results["memory"]]
    yield markdown(held, peaks)


def _fleet_row(row: dict[str, Any]) -> tuple[str, ...]:
    workers = row["workers"]
    each = f"{row['trainer_ms'] / workers:.2f}", f"{row['calls'] / workers:.0f}"
    whole = f"{row['send_ms']}", f"{row['trainer_ms']}"
    return str(workers), *whole, *each


def per_worker(results: dict[str, Any]) -> float:
    """The trainer's time in seconds for one more worker, on average between the smallest and the largest fleet."""
    first, last = results["fleet"][0], results["fleet"][-1]
    more: float = last["trainer_ms"] - first["trainer_ms"]
    return more / 1e3 / float(last["workers"] - first["workers"])


def seconds(results: dict[str, Any], nbytes: float, links: int, copies: float, rate: float) -> float:
    """The calculated time of a send, in seconds.

    Args:
        results: the measurements, which give the constants.
        nbytes: the size of the payload.
        links: the number of workers to which the trainer itself is connected.
        copies: how many times the payload leaves the trainer's host.
        rate: the rate of the trainer's network link, in bytes per second.
    """
    copied: float = nbytes / (results["memcpy_gb_s"] * _GB)
    return copied + copies * nbytes / rate + links * per_worker(results)


def calculated(found: dict[str, Any]) -> str:
    """The table of calculated times, with the constants of the first machine."""
    name, results = next(iter(found.items()))
    lines = [f"Constants of `{name}`: {results['memcpy_gb_s']} GB/s, {1e3 * per_worker(results):.2f} ms a worker.\n"]
    rows = []
    for workers in (8, 64, 256, 1000):
        hosts = max(1, workers // _A_HOST)
        for title, nbytes in (("256 MiB", 256 * MIB), ("2 GiB", 2048 * MIB), ("14 GB", 14 * _GB)):
            row = [f"{workers:,}", f"{hosts:,}", title, _duration(seconds(results, nbytes, workers, 0, 1))]
            trees = ((min(width, workers), workers) for width in _WIDTHS)
            for copies, links in ((workers, workers), (hosts, hosts), *trees, (1, workers)):
                row += [_duration(seconds(results, nbytes, links, copies, gbit * 1e9 / 8)) for gbit in (10, 100)]
            if workers > 64:
                row[3] = ""
            rows.append(tuple(row))
    columns = (
        *("workers", "hosts", "payload", "all on one host, shared memory"),
        *("to each worker, 10 Gbit/s", "100 Gbit/s", "to each host, 10 Gbit/s", "100 Gbit/s"),
        *(f"{column}{gbit} Gbit/s" for width in _WIDTHS for column, gbit in ((f"fanout={width}, ", 10), ("", 100))),
        *("once, 10 Gbit/s", "100 Gbit/s"),
    )
    return "\n".join([*lines, markdown(columns, rows)])


def _duration(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s" if value >= 1 else f"{1e3 * value:.0f} ms"


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Run the command; returns its exit status."""
    if "--measure" in arguments:
        from scalegen.measuring import measure  # noqa: PLC0415 - it imports torch

        target = root / RESULTS / f"{arguments[-1]}.json"
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    page = root / PAGE
    try:
        found = read(root)
        sections = {"measured": measured(found), "calculated": calculated(found)}
        text = fill(PAGE, page.read_text(encoding="utf-8"), sections)
    except SpecError as error:
        print(f"nothing was written:\n{error}", file=sys.stderr)
        return 2
    return keep(page, text, arguments, f"{PAGE} is not what {RESULTS} gives: run `python spec/scale.py`.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
