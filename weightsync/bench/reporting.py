"""Results as rows of text, for the terminal and for `docs/performance.md`."""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.bench.judging import Compared, Floor, Line, Verdict, compare, ratio, targets
from weightsync.bench.results import Case, Kind, Measured, Results

Rows = list[tuple[str, ...]]
#: The columns of `case_rows`, `target_rows` and `compared_rows`.
CASE_COLUMNS = ("", "median", "quartiles", "x memcpy", "x its floor", "its floor", "calls: trainer", "worker")
TARGET_COLUMNS = ("payload", "workers", "scheme", "measured", "target", "")
COMPARED_COLUMNS = ("payload", "workers", "", "first", "second", "factor", "")
_ORDER = list(Kind)


def title(case: Case) -> str:
    """What a case is about, in a line."""
    workers = "1 worker" if case.workers == 1 else f"{case.workers} workers"
    threads = "1 thread" if case.threads == 1 else f"{case.threads} threads"
    tensors = "1 tensor" if case.tensors == 1 else f"{case.tensors:,} tensors"
    return f"{case.payload}: {size(case.nbytes)} in {tensors}, {workers}, {case.device}, {threads} in the trainer"


def size(nbytes: int) -> str:
    """A number of bytes in words."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes} bytes"


def ms(seconds: float) -> str:
    """A time in milliseconds, with three digits."""
    value = seconds * 1000
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def case_rows(case: Case, noise_limit: float) -> Rows:
    """One row a contender: floors first, then weightsync, then TorchRL. A ratio to a noisy floor is in brackets."""
    memcpy = case.find(Floor.MEMCPY.value, Kind.FLOOR)
    ordered = sorted(case.measured, key=lambda each: _ORDER.index(each.label.kind))
    return [_case_row(case, each, memcpy, noise_limit) for each in ordered]


def _case_row(case: Case, measured: Measured, memcpy: Measured | None, noise_limit: float) -> tuple[str, ...]:
    floors = ("", "", "")
    if measured.label.kind is not Kind.FLOOR:
        found = ratio(case, measured, noise_limit)
        copies = _times(measured.median / memcpy.median, memcpy.spread > noise_limit) if memcpy else ""
        floors = (copies, _times(found.value, found.noisy), str(found.floor.label) if found.floor else "")
    quartiles = f"{ms(measured.low)} to {ms(measured.high)}"
    calls = ("" if each is None else f"{each:,}" for each in (measured.trainer_calls, measured.worker_calls))
    return (str(measured.label), ms(measured.median), quartiles, *floors, *calls)


def _times(value: float | None, noisy: bool) -> str:
    if value is None:
        return ""
    said = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"({said})" if noisy else said


def target_rows(results: Results) -> Rows:
    """One row for each target that the results speak about."""
    return [_target_row(line) for line in targets(results)]


def _target_row(line: Line) -> tuple[str, ...]:
    value = f"{line.value:,.0f}" if line.value >= 100 else f"{line.value:.3g}"
    where = f"{line.case.payload}" + (f", {line.case.device}" if line.case.device != "cpu" else "")
    target = f"at most {line.limit:g} {line.unit}"
    return (where, str(line.case.workers), str(line.label), value, target, line.verdict.value)


def reached(results: Results) -> str:
    """How many targets are reached, in a line."""
    verdicts = [line.verdict for line in targets(results)]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict.value}" for verdict in Verdict if verdict in verdicts)
    return f"targets: {counts}" if counts else "no target speaks about these cases"


def left_out(results: Results) -> list[str]:
    """What was not measured, and why, each reason once."""
    said = []
    for case in results.cases:
        for name, why in case.left_out.items():
            what = f"{case.payload} with {case.workers} workers" if name == "all" else name
            said.append(f"left out: {what}: {why}.")
    return list(dict.fromkeys(said))


def compared_rows(first: Results, second: Results) -> Rows:
    """One row for each contender that both measured."""
    return [_compared_row(each) for each in compare(first, second)]


def _compared_row(each: Compared) -> tuple[str, ...]:
    factor = f"{each.factor:.2f}" + (" (in floors)" if each.in_floors else "")
    times = (ms(each.first.median), ms(each.second.median))
    return (each.case.payload, str(each.case.workers), str(each.first.label), *times, factor, each.change.value)


def markdown(columns: Sequence[str], rows: Rows) -> str:
    """A table of a Markdown page."""
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows), ""])
