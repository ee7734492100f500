"""Results as rows of text and as a chart, for the terminal and for `docs/performance.md`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from weightsync.bench.judging import Compared, Floor, Line, Verdict, compare, ratio, targets
from weightsync.bench.results import Case, Kind, Label, Measured, Results, counted
from weightsync.errors import ConfigurationError, MissingExtraError

Rows = list[tuple[str, ...]]
#: The columns of `case_rows`, `target_rows` and `compared_rows`.
CASE_COLUMNS = ("", "median", "quartiles", "x memcpy", "x its floor", "its floor", "calls: trainer", "worker")
TARGET_COLUMNS = ("payload", "workers", "scheme", "measured", "target", "")
COMPARED_COLUMNS = ("payload", "workers", "", "first", "second", "factor", "")
_ORDER = list(Kind)


def title(case: Case) -> str:
    """What a case is about, in a line."""
    what = f"{case.payload}: {size(case.nbytes)} in {counted(case.tensors, 'tensor')}"
    threads = counted(case.threads, "thread")
    return f"{what}, {counted(case.workers, 'worker')}, {case.device}, {threads} in the trainer"


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
    return f"targets: {counts}" if counts else "no target covers these cases"


def left_out(results: Results) -> list[str]:
    """What was not measured, and why, each reason once."""
    said = []
    for case in results.cases:
        for name, why in case.left_out.items():
            what = f"{case.payload} with {counted(case.workers, 'worker')}" if name == "all" else name
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


#: A payload of more tensors costs more than its size says, and does not belong on the curve over sizes.
_FEW_TENSORS = 1000
_STYLES = {Kind.FLOOR: "--", Kind.SCHEME: "-", Kind.ASYNC: ":", Kind.TORCHRL: "-."}


def require_matplotlib() -> Any:
    """The module that draws. Raises MissingExtraError: matplotlib is not installed."""
    try:
        import matplotlib  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise MissingExtraError("plot", "weightsync bench --plot") from error
    matplotlib.use("agg")  # draws into a file, and needs no screen
    return matplotlib


def plot(results: Results, path: Path) -> None:
    """Draw the results into a PNG file.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ConfigurationError: there is nothing to draw, or the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure  # noqa: PLC0415

    cases = [case for case in results.cases if case.measured]
    if not cases:
        raise ConfigurationError("there is nothing to draw: no case was measured.")
    figure = Figure(figsize=(15, 7), layout="constrained")
    most, largest = max(case.workers for case in cases), max(cases, key=lambda case: case.nbytes).payload
    sizes = [case for case in cases if case.workers == most and case.tensors <= _FEW_TENSORS]
    counts = [case for case in cases if case.payload == largest]
    left, right = figure.subplots(1, 2)
    _draw(left, f"{most} workers", "bytes", sizes, lambda case: case.nbytes)
    _draw(right, f"payload {largest}", "workers", counts, lambda case: case.workers)
    handles = {label: handle for axes in (left, right) for handle, label in zip(*_legend(axes), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside right center", fontsize="small")
    figure.suptitle(f"weightsync bench: {results.machine.get('processor', '')}, {results.machine.get('note', '')}")
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigurationError(f"the picture cannot be written to {path}: {error}.") from error


def _legend(axes: Any) -> tuple[list[Any], list[str]]:
    handles, labels = axes.get_legend_handles_labels()
    return list(handles), list(labels)


def _draw(axes: Any, name: str, unit: str, cases: Iterable[Case], place: Callable[[Case], int]) -> None:
    lines: dict[Label, list[tuple[int, float, float, float]]] = {}
    for case in cases:
        for each in case.measured:
            row = (place(case), each.median * 1000, each.low * 1000, each.high * 1000)
            lines.setdefault(each.label, []).append(row)
    colours = {name: f"C{index}" for index, name in enumerate(sorted({label.name for label in lines}))}
    kinds = sorted({label.verify or "" for label in lines})
    for label, rows in lines.items():
        at, median, low, high = zip(*sorted(rows), strict=True)
        colour = colours[label.name]
        marker = ".xs^v"[kinds.index(label.verify or "") % 5]
        axes.plot(at, median, _STYLES[label.kind], marker=marker, color=colour, label=str(label))
        axes.fill_between(at, low, high, color=colour, alpha=0.1)
    axes.set(title=name, xlabel=unit, ylabel="ms", xscale="log" if unit == "bytes" else "linear", yscale="log")
    axes.grid(visible=True, which="both", alpha=0.2)
