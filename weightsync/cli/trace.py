"""``weightsync trace``: show recorded runs as sequence charts, and export them."""

from __future__ import annotations

import enum
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weightsync.cli._app import PLAIN_WIDTH, Report, is_printed, write_report
from weightsync.cli._trace_display import drawn, perfetto, svg
from weightsync.errors import ConfigurationError
from weightsync.verify import Run, UnreadableTraceError
from weightsync.verify import verify as judged
from weightsync.verify.chart import Chart, chart_of

#: The exit code if a trace cannot be read, or has no such run.
CANNOT_READ = 2
_MOST_ROWS = 200

Places = Annotated[
    list[Path], typer.Argument(metavar="TRACE...", help="Trace files, or folders of them.", show_default=False)
]
Number = Annotated[int, typer.Option("--run", help="Which run, counted from 1 in order of time.")]


class Format(enum.StrEnum):
    """What to export."""

    SVG = "svg"
    PERFETTO = "perfetto"


trace = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Show recorded runs as sequence charts, and export them as SVG or for Perfetto.",
)


@trace.command()
def show(
    places: Places,
    run: Number = 1,
    limit: Annotated[int, typer.Option("--limit", help="How many rows to show; 0 shows all.")] = _MOST_ROWS,
    report: Report = None,
) -> None:
    """Show a run as a sequence chart: time in milliseconds, one lane per machine, arrows for messages.

    With --json, all rows are data. The exit code is 0, or 2 if a trace cannot be read or has no such run. `weightsync
    verify` says whether the run conforms.
    """
    chart, count = _chart(places, run)
    write_report(chart.record(), report)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PLAIN_WIDTH
    console = Console(width=max(width, PLAIN_WIDTH), stderr=is_printed(report))
    lines = list(drawn(chart, width))
    shown = lines if limit <= 0 else lines[: limit + 1]
    for line in shown:
        console.print(line, soft_wrap=True)
    if len(shown) < len(lines):
        console.print(f"{len(lines) - len(shown)} more rows: --limit 0 shows all.", style="dim")
    if count > 1:
        console.print(f"Run {run} of {count}: --run shows another.", style="dim")


@trace.command()
def export(
    places: Places,
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="The file to write.", show_default=False)],
    kind: Annotated[
        Format | None,
        typer.Option("--format", help="Default: perfetto for a file that ends in .json, otherwise svg."),
    ] = None,
    run: Number = 1,
    report: Report = None,
) -> None:
    """Write a run as an SVG drawing, or as JSON that Perfetto and Chrome's tracing page open.

    With --json, the result is a record of what was written: the file, its format, its rows and its machines.
    The exit code is 0, or 2 if a trace cannot be read or has no such run.
    """
    chosen = kind or (Format.PERFETTO if to.suffix == ".json" else Format.SVG)
    chart, _ = _chart(places, run)
    try:
        to.write_text(svg(chart) if chosen is Format.SVG else perfetto(chart), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"the run cannot be written to {to}: {error}.") from error
    written = {"file": str(to), "format": chosen.value, "rows": len(chart.rows), "machines": list(chart.lanes)}
    write_report(written, report)
    typer.echo(f"{len(chart.rows)} rows of {len(chart.lanes)} machines written to {to}.", err=is_printed(report))


def _chart(places: list[Path], number: int) -> tuple[Chart, int]:
    try:
        runs = judged(places).runs
    except UnreadableTraceError as error:
        raise _error_exit(str(error)) from error
    if not 1 <= number <= len(runs):
        raise _error_exit(f"there is no run {number}: these traces have {len(runs)}.")
    chosen: Run = runs[number - 1]
    return chart_of(chosen), len(runs)


def _error_exit(why: str) -> typer.Exit:
    typer.echo(f"weightsync: {why}", err=True)
    return typer.Exit(CANNOT_READ)
