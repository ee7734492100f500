"""``weightsync verify``: traces of runs are held against the protocol."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weightsync.cli._verify_display import results, summary
from weightsync.model import ToolMissingError, find_toolchain
from weightsync.verify import Followed, TlcFailedError, UnreadableTraceError, Verdict, follow, shown
from weightsync.verify import verify as judged

_PLAIN_WIDTH = 120
_DOES_NOT_CONFORM = 1
_CANNOT_SAY = 2
#: How many lines that are wrong are shown; the rest is counted.
_SHOWN = 5


def verify(
    places: Annotated[
        list[Path],
        typer.Argument(metavar="TRACE...", help="Trace files, or folders of them.", show_default=False),
    ],
    report: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all that was found to a file; - prints it.")
    ] = None,
    complete: Annotated[
        bool,
        typer.Option("--complete", help="Fail where a machine's file is missing, or ended before its machine did."),
    ] = False,
    tlc: Annotated[bool, typer.Option("--tlc", help="Have TLC follow the runs too, action by action.")] = False,
) -> None:
    """Say whether recorded runs conformed to the protocol.

    Where one did not, the first line that may not be as it is, in words, and what the model allows there.
    Exit code 0 if all conform, 1 if one does not (with --complete: or a file is missing), 2 if nothing can be said.
    """
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, stderr=str(report) == "-")
    try:
        verdict = judged(places)
    except UnreadableTraceError as error:
        typer.echo(f"weightsync: {error}", err=True)
        raise typer.Exit(_CANNOT_SAY) from error
    followed = _follow(verdict) if tlc else None
    missing = verdict.missing if complete else ()
    wrong = verdict.findings + missing + (() if followed is None else tuple(followed.findings))
    _write(verdict, followed, report)
    console.print(results(verdict))
    for finding in wrong[:_SHOWN]:
        console.print()
        for line in shown(finding):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if missing:
        console.print(f"{len(missing)} links lead to machines that no file tells of: --complete asks for all.")
    console.print(summary(verdict), markup=False, highlight=False)
    if followed is not None:
        console.print(followed.summary(), markup=False, highlight=False)
    if wrong:
        raise typer.Exit(_DOES_NOT_CONFORM)


def _follow(verdict: Verdict) -> Followed:
    try:
        return follow(find_toolchain(), verdict.runs)
    except (ToolMissingError, TlcFailedError) as error:
        typer.echo(f"weightsync: {error}", err=True)
        raise typer.Exit(_CANNOT_SAY) from error


def _write(verdict: Verdict, followed: Followed | None, report: Path | None) -> None:
    if report is None:
        return
    told = {**verdict.record(), **({} if followed is None else {"tlc": followed.record()})}
    text = json.dumps(told, indent=1) + "\n"
    if str(report) == "-":
        typer.echo(text, nl=False)
    else:
        report.write_text(text, encoding="utf-8")
