"""``weightsync check``: the model is checked by TLC, and what it says is compared with what it must say."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from weightsync.checker import (
    Configuration,
    Coverage,
    Manifest,
    Purpose,
    Suite,
    Tier,
    Toolchain,
    ToolMissingError,
    Verdict,
    explain,
    find_model,
    find_toolchain,
    idle,
    pin,
    record,
    vacuity,
)
from weightsync.checker.mutants import Share
from weightsync.checker.second import SecondSuite, SecondVerdict, story
from weightsync.cli._check_display import display, listing, results, summary
from weightsync.cli._check_mutants import hunt_mutants
from weightsync.cli._second_display import second_line, second_summary
from weightsync.errors import ConfigurationError

_PLAIN_WIDTH = 120
_DIFFERS = 1
_TOOL_MISSING = 2
_ENDING = (signal.SIGTERM, signal.SIGHUP)


def check(  # noqa: PLR0917
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Configurations to run; the quick ones if none.", show_default=False),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Run every configuration.")] = False,
    show: Annotated[bool, typer.Option("--list", help="Show the configurations, and run none.")] = False,
    coverage: Annotated[
        bool,
        typer.Option("--coverage", help="Run the proofs alone, and fail if they never take some action."),
    ] = False,
    mutants: Annotated[
        bool,
        typer.Option("--mutants", help="Change the model in small ways, and fail if a change is not found wrong."),
    ] = False,
    share: Annotated[
        str | None,
        typer.Option(
            "--share",
            metavar="K/N",
            help="With --mutants: hunt the K-th of N equal shares from the beginning, by every property in every "
            "configuration, whatever the ledger says of them (an hour and more for 1/1).",
            show_default=False,
        ),
    ] = None,
    repin: Annotated[
        bool,
        typer.Option("--pin", help="Write the counts seen into the manifest, where all else is as expected."),
    ] = False,
    second: Annotated[
        Tier | None,
        typer.Option(
            "--second",
            help="Have a second checker, in Python, look at the graphs too, of the quick ones of those that are run "
            "or of all; fail where the two disagree.",
            show_default=False,
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all that was found to a file.")
    ] = None,
    write_cfg: Annotated[
        Path | None,
        typer.Option(
            "--write-cfg",
            metavar="FOLDER",
            help="Write the .cfg files of the configurations named, or of all, for TLC run by hand, and run none.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="FOLDER", help="Check another model than our own.")
    ] = None,
) -> None:
    """Check the protocol's model with TLC.

    Each configuration's verdict must be the expected one, found with the pinned number of states.
    Exit code 0 if all are, 1 if one differs, 2 if Java or TLC is missing.
    """
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    manifest = Manifest.read(model or find_model())
    whole = everything or show or write_cfg is not None
    chosen = manifest.select(names) if names else manifest.tier(Tier.ALL if whole else Tier.QUICK)
    if show:
        console.print(listing(chosen))
        return
    if write_cfg:
        _write(chosen, write_cfg)
        console.print(f"{len(chosen)} .cfg files written to {write_cfg}", markup=False, soft_wrap=True)
        return
    if mutants:
        _hunt(manifest, console, _share(share), repin)
        return
    if coverage:
        chosen = tuple(found for found in chosen if found.purpose is Purpose.PROOF)
    if second and not any(second.covers(found.tier) for found in chosen):
        raise typer.BadParameter("none of those to run is a quick one: --second all", param_hint="--second")
    started = time.monotonic()
    verdicts = _run(manifest, chosen, console, Coverage.COUNTED if coverage else Coverage.NOT_COUNTED)
    if report:
        report.write_text(json.dumps([record(verdict) for verdict in verdicts], indent=1) + "\n", encoding="utf-8")
    if repin:
        verdicts = _pin(manifest, verdicts, console)
    _tell(manifest, verdicts, time.monotonic() - started, console)
    vacuous = (*vacuity(verdicts, manifest.planted), *idle(verdicts, manifest)) if coverage else ()
    for line in vacuous:
        console.print(line, markup=False)
    agreed = second is None or _examine_again(manifest, verdicts, second, console)
    if vacuous or not agreed or not all(verdict.as_expected for verdict in verdicts):
        raise typer.Exit(_DIFFERS)


def _write(chosen: Sequence[Configuration], folder: Path) -> None:
    """Write the files that TLC reads when it is run by hand."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for found in chosen:
            (folder / f"{found.name}.cfg").write_text(found.config.text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"The .cfg files cannot be written to {folder}: {error}.") from error


def _examine_again(manifest: Manifest, verdicts: Sequence[Verdict], tier: Tier, console: Console) -> bool:
    """Have the second checker look at those configurations that are of a tier; return whether it agrees."""
    started = time.monotonic()
    verdicts = [verdict for verdict in verdicts if tier.covers(verdict.configuration.tier)]

    def ended(verdict: SecondVerdict) -> None:
        console.print(second_line(verdict), soft_wrap=True)

    try:
        with _ended_by_signals():
            found = SecondSuite(find_toolchain(), manifest, ended).run(verdicts)
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None
    for line in second_summary(found, time.monotonic() - started):
        console.print(line, soft_wrap=True)
    for told in (line for verdict in found if not verdict.agrees for line in story(verdict)):
        console.print(told, markup=False, highlight=False, soft_wrap=True)
    return all(verdict.agrees for verdict in found)


def _run(manifest: Manifest, chosen: Sequence[Configuration], console: Console, coverage: Coverage) -> list[Verdict]:
    with _tools() as toolchain, display(console, len(chosen)) as shown:
        return Suite(toolchain, manifest, shown, coverage).run(chosen)


def _share(text: str | None) -> Share:
    if text is None:
        return Share()
    try:
        return Share.read(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text} is no share; the second of twenty is 2/20", param_hint="--share") from error


def _hunt(manifest: Manifest, console: Console, share: Share, repin: bool) -> None:
    with _tools() as toolchain:
        if not hunt_mutants(manifest, toolchain, console, share, repin):
            raise typer.Exit(_DIFFERS)


@contextlib.contextmanager
def _tools() -> Iterator[Toolchain]:
    """Find Java and TLC; what ends the command early ends it with the code that says so."""
    try:
        with _ended_by_signals():
            yield find_toolchain()
    except ToolMissingError as error:
        typer.echo(f"weightsync: {error}", err=True)
        raise typer.Exit(_TOOL_MISSING) from error
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the command the way an interrupt does, so that no JVM is left; nohup stays."""

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    unhandled = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in unhandled:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in unhandled:
            signal.signal(number, signal.SIG_DFL)


def _pin(manifest: Manifest, verdicts: Sequence[Verdict], console: Console) -> list[Verdict]:
    """Pin what was counted wherever nothing else is the matter."""
    seen = {verdict.configuration.name: verdict.repin for verdict in verdicts}
    changed = {name: counts for name, counts in seen.items() if counts is not None}
    fresh = {found.name: found for found in pin(manifest, changed).configurations}
    for name, counts in changed.items():
        console.print(f"pinned {name}: {counts.distinct:,} distinct states", markup=False)
    return [
        replace(verdict, configuration=fresh[verdict.configuration.name], complaints=()) if verdict.repin else verdict
        for verdict in verdicts
    ]


def _tell(manifest: Manifest, verdicts: Sequence[Verdict], seconds: float, console: Console) -> None:
    console.print(results(verdicts))
    console.print(summary(verdicts, seconds))
    if manifest.bounds:
        console.print(manifest.bounds, markup=False, highlight=False)
    for verdict in verdicts:
        if not verdict.as_expected:
            console.print()
            for line in explain(verdict):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
