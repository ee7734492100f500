"""``weightsync soak``: random syncs and faults at full speed, and a table of what happened."""

from __future__ import annotations

import math
from typing import Annotated

import typer
from rich.live import Live
from rich.table import Table

from weightsync.cli._app import Report, console, ended_by_signals, write_report
from weightsync.local_workers import MOST_WORKERS, SchemeName
from weightsync.soak.run import Action, Soak, Tally, Usage

#: The exit code if something happened that must not.
FINDINGS = 1
#: A tebibyte: more is a typing error, and infinity is not a size.
_MOST_MIB = 2.0**20
_LABELS = {"rss_nbytes": "memory, MiB", "descriptors": "descriptors", "threads": "threads", "children": "processes"}


def soak(  # noqa: PLR0917
    scheme: Annotated[SchemeName, typer.Option("--scheme", help="The scheme to soak.")] = SchemeName.SHARED,
    minutes: Annotated[float, typer.Option("--minutes", min=0.01, help="How many minutes to run.")] = 1.0,
    workers: Annotated[
        int, typer.Option("--workers", min=2, max=MOST_WORKERS, help="The number of worker processes.")
    ] = 3,
    mib: Annotated[
        float, typer.Option("--mib", min=0.001, max=_MOST_MIB, help="The size of the weights, in MiB.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="The seed of the random choices. Timing still varies.")] = 0,
    report: Report = None,
) -> None:
    """Send at full speed, kill, stop and reconnect workers at random, and check what they serve.

    Each report is compared with what the workers serve, and the workers read their weights continuously.
    The exit code is 0 if no fault was found, and 1 otherwise. --json writes the full result.
    """
    for name, value in (("--minutes", minutes), ("--mib", mib)):
        if math.isnan(value):  # it is in every range, for click
            raise typer.BadParameter("not a number.", param_hint=name)
    screen = console(report)
    run = Soak(scheme, workers, int(mib * 2**20), seed)
    with ended_by_signals(), Live(console=screen, refresh_per_second=4, transient=True) as live:
        tally = run.run(minutes * 60, lambda so_far: live.update(counted(so_far)) if screen.is_terminal else None)
    write_report({"scheme": scheme.value, "workers": workers, **tally.record()}, report)
    screen.print(counted(tally))
    screen.print(held(tally))
    screen.print(f"{tally.versions} versions in {tally.seconds:.0f} s; workers read their weights {tally.reads} times.")
    for finding in tally.findings:
        screen.print(f"FOUND: {finding}", style="bold red", markup=False)
    if tally.findings:
        raise typer.Exit(FINDINGS)


def counted(tally: Tally) -> Table:
    """Return the table of actions and outcomes."""
    table = Table("action", "times", "outcome", "workers", box=None, pad_edge=False)
    outcomes = [(kind.name, str(count)) for kind, count in tally.outcomes.items()]
    for number, action in enumerate(Action):
        outcome = outcomes[number] if number < len(outcomes) else ("", "")
        table.add_row(action.value, str(tally.actions[action]), *outcome)
    return table


def held(tally: Tally) -> Table:
    """Return the table of what the trainer's process held before and after."""
    table = Table("in the trainer", "before", "after", box=None, pad_edge=False)
    for name, label in _LABELS.items():
        table.add_row(label, *(_amount(each, name) for each in (tally.before, tally.after)))
    return table


def _amount(usage: Usage | None, name: str) -> str:
    if usage is None:
        return ""
    amount: int = getattr(usage, name)
    return str(amount >> 20) if name == "rss_nbytes" else str(amount)
