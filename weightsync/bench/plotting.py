"""A picture of results: cost against size, and against the number of workers. Floors are dashed lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from weightsync.bench.results import Case, Kind, Label, Results
from weightsync.errors import ConfigurationError, MissingExtraError

#: A payload of more tensors costs more than its size says, and is no point of the curve over sizes.
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
