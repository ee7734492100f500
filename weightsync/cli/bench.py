"""``weightsync bench``: measure the schemes against the physical floors on this machine."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weightsync.bench import Device, Results, SchemeName, Settings
from weightsync.bench.reporting import compared_rows, require_matplotlib
from weightsync.bench.reporting import plot as draw
from weightsync.bench.results import describe
from weightsync.bench.settings import DEFAULT_VERIFY, listed, members, numbers, payloads
from weightsync.cli._app import Report, console, ended_by_signals, is_printed, refuse_unwritable, write_report
from weightsync.cli._bench_display import Display, show, show_compared
from weightsync.errors import ConfigurationError

_INTERRUPTED = 128 + signal.SIGINT
#: The names in JSON of the columns of a comparison.
_COMPARED = ("payload", "workers", "contender", "first", "second", "factor", "judgement")
_ALL = ",".join(name.value for name in SchemeName)


def bench(  # noqa: PLR0917
    payload_names: Annotated[
        str | None,
        typer.Option(
            "--payloads", metavar="E,S,M,L,T,G", help="What to send.", show_default="all but G, unless --model is given"
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODULE:FACTORY", help="Send a model of your own: what this function returns.")
    ] = None,
    workers: Annotated[str, typer.Option(metavar="N,...", help="The numbers of workers.")] = "2",
    schemes: Annotated[str, typer.Option(metavar="NAME,...", help="What to measure.")] = _ALL,
    verify: Annotated[
        str, typer.Option(metavar="WORD,...", help="Values of verify=, each measured on its own.")
    ] = f"{DEFAULT_VERIFY},layout,digest",
    device: Annotated[Device, typer.Option(help="Where the trainer's and the workers' models are.")] = Device.CPU,
    threads: Annotated[int, typer.Option(help="torch's threads in the trainer, and memcpy's. A worker has one.")] = 1,
    seconds: Annotated[
        float, typer.Option(help="How long to measure each payload with each number of workers.")
    ] = 20.0,
    rounds: Annotated[int, typer.Option(help="The most sends of each contender in that time.")] = 50,
    noise_limit: Annotated[
        float, typer.Option(help="Relative interquartile range above which a floor counts as noisy.")
    ] = 0.25,
    report: Report = None,
    append: Annotated[
        bool, typer.Option("--append", help="Keep what the --json file has of other cases on the same machine.")
    ] = False,
    note: Annotated[str, typer.Option(help="A note on the machine, kept with the results.")] = "",
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help=r"Draw cost against size and against workers. Needs weightsync\[plot]."),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="A.json B.json", help="Compare two results and measure nothing.")
    ] = None,
) -> None:
    """Measure weightsync, TorchRL, and the same bytes by memcpy and bare pipes, interleaved in one run.

    Memcpy and bare calls are the floors: they have no protocol and no checks, so no library is faster on their path.

    A send ends when every worker has applied the version and acked it. Before and after, each worker proves by digest
    that it has the trainer's weights. What is not installed is left out, and named.

    The exit code is 0 if everything was measured or compared, even if a target was missed or the machine was too noisy
    to tell; 1 if a worker ended or did not answer, weights did not arrive, or an option or a file is wrong; 2 for a
    usage error; and 130 after Ctrl-C. In every case all processes have ended.
    """
    screen = console(report)
    if compare is not None:
        _compare(compare, report, screen)
        return
    if append and (report is None or is_printed(report)):
        raise ConfigurationError("--append needs --json FILE: the file to which the new results are added.")
    if plot is not None:
        require_matplotlib()
        refuse_unwritable(plot, "picture")
    settings = Settings(
        payloads(payload_names, model),
        numbers(workers),
        members(SchemeName, schemes),
        tuple(listed(verify)),
        device,
        threads,
        seconds,
        rounds,
        noise_limit,
    )
    former = Results.read(report) if append and report is not None and report.exists() else None
    if former is not None:
        former.joined(replace(former, machine=describe(device.value), cases=()))  # before minutes of measuring
    results = _measured(settings, note, Display(screen))
    if former is not None:
        results = former.joined(results)
    _write(results, report, plot, screen)


def _compare(files: tuple[Path, Path], report: Path | None, screen: Console) -> None:
    """Show two results side by side."""
    first, second = Results.read(files[0]), Results.read(files[1])
    write_report([dict(zip(_COMPARED, row, strict=True)) for row in compared_rows(first, second)], report)
    show_compared(screen, first, second)


def _write(results: Results, report: Path | None, plot: Path | None, screen: Console) -> None:
    """Write the results into the files that were asked for, and show them."""
    try:
        write_report(results.record(), report)
        if plot is not None:
            draw(results, plot)
    finally:  # what took minutes is shown, and why nothing was measured, even if a file cannot be written
        show(screen, results)


def _measured(settings: Settings, note: str, display: Display) -> Results:
    # torch's RPC logs a line for each connection that ends, in every process; read when torch is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        with ended_by_signals(), display:
            # Importing torch takes seconds, and wrong options are reported before that.
            from weightsync.bench.running import run  # noqa: PLC0415

            return run(settings, display, note)
    except KeyboardInterrupt:
        typer.echo("weightsync: interrupted; all workers have ended.", err=True)
        raise typer.Exit(_INTERRUPTED) from None
