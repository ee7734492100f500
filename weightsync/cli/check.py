"""``weightsync check``: check the model with TLC, and compare its results with the expected ones."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weightsync.cli._app import Report, console, ended_by_signals, write_report
from weightsync.cli._check_display import Display, listing, results, summary
from weightsync.errors import ConfigurationError
from weightsync.model import (
    Configuration,
    Coverage,
    Manifest,
    Purpose,
    Suite,
    Tier,
    Toolchain,
    ToolMissingError,
    Verdict,
    described,
    explain,
    find_model,
    find_toolchain,
    idle,
    record,
    vacuity,
)
from weightsync.model.process import archived

#: The exit code if something is not as expected.
DIFFERS = 1
_TOOL_MISSING = 2


def check(  # noqa: PLR0917
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Configurations to run. Default: the quick ones.", show_default=False),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Run every configuration.")] = False,
    show: Annotated[bool, typer.Option("--list", help="List the configurations instead of running them.")] = False,
    coverage: Annotated[
        bool,
        typer.Option(
            "--coverage",
            help="Run only the proofs, and fail if an action of the model is taken in none of them. The quick proofs "
            "do not take all: give --all too.",
        ),
    ] = False,
    report: Report = None,
    write_cfg: Annotated[
        Path | None,
        typer.Option(
            "--write-cfg",
            metavar="FOLDER",
            help="Write the .cfg files of the named configurations, or of all, instead of running TLC.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="FOLDER", help="Check another model than weightsync's own.")
    ] = None,
) -> None:
    """Check the protocol's model with TLC.

    Each configuration must have the expected verdict and the pinned number of states.
    The exit code is 0 if all do, 1 if one differs, 2 if Java or TLC is missing, and 130 after Ctrl-C.
    """
    screen = console(report)
    manifest = Manifest.read(model or find_model())
    whole = everything or show or write_cfg is not None
    chosen = manifest.select(names) if names else manifest.tier(Tier.ALL if whole else Tier.QUICK)
    if show:
        write_report([described(found) for found in chosen], report)
        screen.print(listing(chosen))
        return
    if write_cfg:
        _write(chosen, write_cfg)
        write_report([f"{found.name}.cfg" for found in chosen], report)
        screen.print(f"{len(chosen)} .cfg files written to {write_cfg}", markup=False, soft_wrap=True)
        return
    if coverage:
        chosen = tuple(found for found in chosen if found.purpose is Purpose.PROOF)
    started = time.monotonic()
    verdicts = run(manifest, chosen, screen, Coverage.COUNTED if coverage else Coverage.NOT_COUNTED)
    write_report([record(verdict) for verdict in verdicts], report)
    print_summary(manifest, verdicts, time.monotonic() - started, screen)
    vacuous = (*vacuity(verdicts, manifest.planted), *idle(verdicts, manifest)) if coverage else ()
    for line in vacuous:
        screen.print(line, markup=False)
    if vacuous or not all(verdict.as_expected for verdict in verdicts):
        raise typer.Exit(DIFFERS)


def _write(chosen: Sequence[Configuration], folder: Path) -> None:
    """Write the .cfg files of configurations."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for found in chosen:
            (folder / f"{found.name}.cfg").write_text(found.config.text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"The .cfg files cannot be written to {folder}: {error}.") from error


def run(manifest: Manifest, chosen: Sequence[Configuration], screen: Console, coverage: Coverage) -> list[Verdict]:
    """Run TLC on configurations and show the progress."""
    with tools() as found, archived(found, len(chosen)) as toolchain, Display(screen, len(chosen)) as shown:
        return Suite(toolchain, manifest, shown, coverage).run(chosen)


@contextlib.contextmanager
def tools() -> Iterator[Toolchain]:
    """Find Java and TLC, and turn a missing tool or an interrupt into the exit code for it."""
    try:
        with ended_by_signals():
            yield find_toolchain()
    except ToolMissingError as error:
        typer.echo(f"weightsync: {error}", err=True)
        raise typer.Exit(_TOOL_MISSING) from error
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None


def print_summary(manifest: Manifest, verdicts: Sequence[Verdict], seconds: float, screen: Console) -> None:
    """Print the verdicts, what the bounds leave out, and an explanation of each verdict that differs."""
    screen.print(results(verdicts))
    screen.print(summary(verdicts, seconds))
    if manifest.bounds:
        screen.print(manifest.bounds, markup=False, highlight=False)
    for verdict in verdicts:
        if not verdict.as_expected:
            screen.print()
            for line in explain(verdict):
                screen.print(line, markup=False, highlight=False, soft_wrap=True)
