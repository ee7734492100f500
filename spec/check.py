"""What maintainers of the model run beside `weightsync check`: pinned counts, the second checker, the model's mutants.

`python spec/check.py model --help` and `python spec/check.py mutants --help` say what each takes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from modelcheck.mutants import LEDGER, Share
from modelcheck.mutants_display import hunt_mutants
from modelcheck.pinning import pin
from modelcheck.second import SecondSuite, SecondVerdict, story
from modelcheck.second_display import second_line, second_summary
from rich.console import Console

from weightsync.cli.check import DIFFERS, console, run, tell, tools
from weightsync.errors import WeightSyncError
from weightsync.model import Coverage, Manifest, Tier, Verdict, find_model

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)

_Model = Annotated[Path | None, typer.Option("--model", metavar="FOLDER", help="Check another model than our own.")]


@app.command("model")
def check_model(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Configurations to run; the quick ones if none.", show_default=False),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Run every configuration.")] = False,
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
    model: _Model = None,
) -> None:
    """Check the model with TLC as `weightsync check` does, and pin its counts or have a second checker look at it."""
    screen = console()
    manifest = Manifest.read(model or find_model())
    chosen = manifest.select(names) if names else manifest.tier(Tier.ALL if everything else Tier.QUICK)
    if second and not any(second.covers(found.tier) for found in chosen):
        raise typer.BadParameter("none of those to run is a quick one: --second all", param_hint="--second")
    started = time.monotonic()
    verdicts = run(manifest, chosen, screen, Coverage.NOT_COUNTED)
    if repin:
        verdicts = _pin(manifest, verdicts, screen)
    tell(manifest, verdicts, time.monotonic() - started, screen)
    agreed = second is None or _examine_again(manifest, verdicts, second, screen)
    if not agreed or not all(verdict.as_expected for verdict in verdicts):
        raise typer.Exit(DIFFERS)


@app.command("mutants")
def check_mutants(
    share: Annotated[
        str | None,
        typer.Option(
            "--share",
            metavar="K/N",
            help="Hunt the K-th of N equal shares from the beginning, by every property in every configuration, "
            "whatever the ledger says of them (an hour and more for 1/1).",
            show_default=False,
        ),
    ] = None,
    repin: Annotated[bool, typer.Option("--pin", help="Write what was seen into the ledger.")] = False,
    model: _Model = None,
    ledger: Annotated[
        Path, typer.Option("--ledger", metavar="FILE", help="What is known of the mutants.", show_default=False)
    ] = LEDGER,
) -> None:
    """Change the model in small ways, and fail if a change is not found wrong."""
    manifest = Manifest.read(model or find_model())
    with tools() as toolchain:
        if not hunt_mutants(manifest, ledger, toolchain, console(), _share(share), repin=repin):
            raise typer.Exit(DIFFERS)


def _examine_again(manifest: Manifest, verdicts: Sequence[Verdict], tier: Tier, screen: Console) -> bool:
    """Have the second checker look at those configurations that are of a tier; return whether it agrees."""
    started = time.monotonic()
    verdicts = [verdict for verdict in verdicts if tier.covers(verdict.configuration.tier)]

    def ended(verdict: SecondVerdict) -> None:
        screen.print(second_line(verdict), soft_wrap=True)

    with tools() as toolchain:
        found = SecondSuite(toolchain, manifest, ended).run(verdicts)
    for line in second_summary(found, time.monotonic() - started):
        screen.print(line, soft_wrap=True)
    for told in (line for verdict in found if not verdict.agrees for line in story(verdict)):
        screen.print(told, markup=False, highlight=False, soft_wrap=True)
    return all(verdict.agrees for verdict in found)


def _pin(manifest: Manifest, verdicts: Sequence[Verdict], screen: Console) -> list[Verdict]:
    """Pin what was counted wherever nothing else is the matter."""
    seen = {verdict.configuration.name: verdict.repin for verdict in verdicts}
    changed = {name: counts for name, counts in seen.items() if counts is not None}
    fresh = {found.name: found for found in pin(manifest, changed).configurations}
    for name, counts in changed.items():
        screen.print(f"pinned {name}: {counts.distinct:,} distinct states", markup=False)
    return [
        replace(verdict, configuration=fresh[verdict.configuration.name], complaints=()) if verdict.repin else verdict
        for verdict in verdicts
    ]


def _share(text: str | None) -> Share:
    if text is None:
        return Share()
    try:
        return Share.read(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text} is no share; the second of twenty is 2/20", param_hint="--share") from error


def main() -> None:
    """Run the command. The process exits with its code."""
    try:
        app()
    except WeightSyncError as error:
        print(f"spec/check.py: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
