"""The maintainers' checks of the model, beside `weightsync check`: pin counts, run the second checker, hunt mutants.

`python spec/check.py model --help` and `python spec/check.py mutants --help` list the options.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from modelcheck.checked import pin
from modelcheck.mutants import LEDGER, Share
from modelcheck.mutants_display import hunt_mutants
from modelcheck.second import SecondSuite, SecondVerdict, second_line, second_summary, story
from rich.console import Console

from weightsync.cli._app import console
from weightsync.cli._check_display import verdict_line
from weightsync.cli.check import DIFFERS, print_summary, run, tools
from weightsync.errors import WeightSyncError
from weightsync.model import Coverage, Manifest, Tier, Verdict, find_model
from weightsync.model.process import archived

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)

_Model = Annotated[
    Path | None, typer.Option("--model", metavar="FOLDER", help="Check another model than weightsync's own.")
]


@app.command("model")
def check_model(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Configurations to run. Default: the quick ones.", show_default=False),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Run every configuration.")] = False,
    repin: Annotated[
        bool,
        typer.Option("--pin", help="Write the new counts into the manifest if everything else is as expected."),
    ] = False,
    second: Annotated[
        Tier | None,
        typer.Option(
            "--second",
            help="Also examine the graphs with a second checker, written in Python, of the quick configurations or of "
            "all; fail if the two disagree.",
            show_default=False,
        ),
    ] = None,
    model: _Model = None,
) -> None:
    """Check the model with TLC as `weightsync check` does; pin its counts, or run the second checker too."""
    screen = console()
    manifest = Manifest.read(model or find_model())
    chosen = manifest.select(names) if names else manifest.tier(Tier.ALL if everything else Tier.QUICK)
    if second and not any(second.covers(found.tier) for found in chosen):
        raise typer.BadParameter("none of these configurations is a quick one: use --second all", param_hint="--second")
    started = time.monotonic()
    verdicts = _undecided_again(manifest, run(manifest, chosen, screen, Coverage.NOT_COUNTED), screen)
    if repin:
        verdicts = _pin(manifest, verdicts, screen)
    print_summary(manifest, verdicts, time.monotonic() - started, screen)
    agreed = second is None or _examine_again(manifest, verdicts, second, screen)
    differing = [verdict for verdict in verdicts if not verdict.as_expected]
    if second:
        # CI keeps only the end of a long output.
        for verdict in differing:
            screen.print(verdict_line(verdict), soft_wrap=True)
    if differing or not agreed:
        raise typer.Exit(DIFFERS)


@app.command("mutants")
def check_mutants(
    share: Annotated[
        str | None,
        typer.Option(
            "--share",
            metavar="K/N",
            help="Hunt the K-th of N equal shares from scratch, with every property in every configuration, ignoring "
            "the ledger (more than an hour for 1/1).",
            show_default=False,
        ),
    ] = None,
    repin: Annotated[bool, typer.Option("--pin", help="Write the results into the ledger.")] = False,
    model: _Model = None,
    ledger: Annotated[
        Path, typer.Option("--ledger", metavar="FILE", help="The ledger of the mutants.", show_default=False)
    ] = LEDGER,
) -> None:
    """Apply small changes to the model, and fail if a check does not notice one."""
    manifest = Manifest.read(model or find_model())
    with tools() as toolchain:
        if not hunt_mutants(manifest, ledger, toolchain, console(), _share(share), repin=repin):
            raise typer.Exit(DIFFERS)


def _undecided_again(manifest: Manifest, verdicts: list[Verdict], screen: Console) -> list[Verdict]:
    """Rerun the configurations without a verdict, for example because the kernel killed TLC. Print the first result."""
    undecided = [verdict for verdict in verdicts if verdict.undecided]
    if not undecided:
        return verdicts
    screen.print(f"Runs without a verdict: {len(undecided)}. They run once more:")
    for verdict in undecided:
        screen.print(verdict_line(verdict), soft_wrap=True)
    again = run(manifest, [verdict.configuration for verdict in undecided], screen, Coverage.NOT_COUNTED)
    found = {verdict.configuration.name: verdict for verdict in (*verdicts, *again)}
    return list(found.values())


def _examine_again(manifest: Manifest, verdicts: Sequence[Verdict], tier: Tier, screen: Console) -> bool:
    """Run the second checker on the configurations of a tier; return whether it agrees with TLC."""
    started = time.monotonic()
    verdicts = [verdict for verdict in verdicts if tier.covers(verdict.configuration.tier)]

    def ended(verdict: SecondVerdict) -> None:
        screen.print(second_line(verdict), soft_wrap=True)

    with tools() as bare, archived(bare, len(verdicts)) as toolchain:
        found = SecondSuite(toolchain, manifest, ended).run(verdicts)
    for line in second_summary(found, time.monotonic() - started):
        screen.print(line, soft_wrap=True)
    for text in (line for verdict in found if not verdict.agrees for line in story(verdict)):
        screen.print(text, markup=False, highlight=False, soft_wrap=True)
    return all(verdict.agrees for verdict in found)


def _pin(manifest: Manifest, verdicts: Sequence[Verdict], screen: Console) -> list[Verdict]:
    """Pin the new counts of configurations in which nothing else differs."""
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
        raise typer.BadParameter(
            f"{text} is not a share: write K/N, for example 2/20 for the second of twenty", param_hint="--share"
        ) from error


def main() -> None:
    """Run the command. The process exits with its code."""
    try:
        app()
    except WeightSyncError as error:
        print(f"spec/check.py: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
