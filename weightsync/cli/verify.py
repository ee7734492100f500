"""``weightsync verify``: check recorded traces against the protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from weightsync.cli._app import Report, console, write_report
from weightsync.cli.check import tools
from weightsync.protocol.machine import Role
from weightsync.verify import Followed, Judgement, Run, TlcFailedError, UnreadableTraceError, Verdict, follow, shown
from weightsync.verify import verify as judged

_DOES_NOT_CONFORM = 1
_CANNOT_SAY = 2
#: How many wrong lines to show; the others are only counted.
_SHOWN = 5
#: How many rows of the table to show.
_ROWS = 40
_STYLES = {Judgement.CONFORMS: "green", Judgement.DOES_NOT: "red"}


def verify(
    places: Annotated[
        list[Path],
        typer.Argument(metavar="TRACE...", help="Trace files, or folders of them.", show_default=False),
    ],
    report: Report = None,
    complete: Annotated[
        bool,
        typer.Option("--complete", help="Fail if the file of a machine is missing or ends before its machine did."),
    ] = False,
    tlc: Annotated[bool, typer.Option("--tlc", help="Also let TLC follow the runs, action by action.")] = False,
) -> None:
    """Check whether recorded runs conformed to the protocol.

    For a run that did not conform, this shows the first wrong line and what the model allows there.
    The exit code is 0 if all runs conform, 1 if one does not (or, with --complete, if a file is missing), and 2 if the
    traces cannot be judged.
    """
    screen = console(report)
    try:
        verdict = judged(places)
    except UnreadableTraceError as error:
        typer.echo(f"weightsync: {error}", err=True)
        raise typer.Exit(_CANNOT_SAY) from error
    followed = _follow(verdict) if tlc else None
    missing = verdict.missing if complete else ()
    wrong = verdict.findings + missing + (() if followed is None else tuple(followed.findings))
    _write(verdict, followed, report)
    screen.print(results(verdict))
    for finding in wrong[:_SHOWN]:
        screen.print()
        for line in shown(finding):
            screen.print(line, markup=False, highlight=False, soft_wrap=True)
    if missing:
        screen.print(f"{len(missing)} links lead to machines whose trace is missing; --complete requires all traces.")
    screen.print(summary(verdict), markup=False, highlight=False)
    if followed is not None:
        screen.print(followed.summary(), markup=False, highlight=False)
    if wrong:
        raise typer.Exit(_DOES_NOT_CONFORM)


def _follow(verdict: Verdict) -> Followed:
    try:
        with tools() as found:
            return follow(found, verdict.runs)
    except TlcFailedError as error:
        typer.echo(f"weightsync: {error}", err=True)
        raise typer.Exit(_CANNOT_SAY) from error


def _write(verdict: Verdict, followed: Followed | None, report: Path | None) -> None:
    write_report({**verdict.record(), **({} if followed is None else {"tlc": followed.record()})}, report)


def results(verdict: Verdict) -> Table:
    """Return the table of runs: their machines, their events, and the verdict. Runs that do not conform come first."""
    table = Table("run", "senders", "receivers", "events", "verdict", box=None, pad_edge=False)
    rows = sorted(enumerate(verdict.runs, 1), key=lambda row: row[1].judgement is Judgement.CONFORMS)
    for number, run in rows[:_ROWS]:
        counts = [sum(machine.role == role for machine in run.machines) for role in Role]
        style = _STYLES[run.judgement]
        table.add_row(str(number), *map(str, counts), str(run.events), f"[{style}]{_run_verdict(run)}[/]")
    return table


def _run_verdict(run: Run) -> str:
    judgement = run.judgement.value
    if not run.findings:
        return judgement
    line = run.findings[0].line
    return f"{judgement}: {line.path.name}:{line.number}"


def summary(verdict: Verdict) -> str:
    """Return the line with the overall result, and with what the traces do not contain."""
    counted = f"{len(verdict.runs)} runs, {verdict.events} events, {len(verdict.files)} files"
    unseen = sum(len(run.unseen) for run in verdict.runs)
    result = "all conform" if verdict.conforms else f"{len(verdict.findings)} lines do not conform"
    missing = f"; {unseen} messages are from machines whose trace is missing or ends too early" if unseen else ""
    return f"{counted}: {result}{missing}."
