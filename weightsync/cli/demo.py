"""``weightsync demo``: train a policy while worker processes act with the weights they receive."""

from __future__ import annotations

from typing import Annotated

import typer

from weightsync.cli._app import Report, console, ended_by_signals, write_report
from weightsync.cli._demo_display import live_display, plain_display, proof_table, summary
from weightsync.demo import RunState, SchemeName, Settings, run

_FAILED = 1
_INTERRUPTED = 130
#: The width of the final table if there is no terminal.
_PLAIN_WIDTH = 100


def demo(  # noqa: PLR0917
    scheme: Annotated[SchemeName, typer.Option(help="The scheme that sends the weights.")] = SchemeName.SHARED,
    workers: Annotated[int, typer.Option(help="The number of rollout processes.")] = 2,
    overlap: Annotated[
        bool, typer.Option("--async", help="Send with send_async(): the sync overlaps with training.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(help="The longest time to train. Training ends early once the task is solved.")
    ] = 90.0,
    seed: Annotated[
        int,
        typer.Option(help="The seed for weights, environments and actions. Runs still differ, because processes race."),
    ] = 0,
    kill_worker: Annotated[
        bool, typer.Option("--kill-worker", help="Kill the last worker half way, with SIGKILL.")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print plain lines even on a terminal.")] = False,
    report: Report = None,
) -> None:
    """Train a policy on CartPole while worker processes act with the weights they receive.

    At the end, each worker proves by digest that it serves the trainer's last weights.
    The exit code is 0 if the policy was trained and every remaining worker has proved this, 1 otherwise, and 130 after
    Ctrl-C.
    """
    state = RunState(
        Settings(scheme=scheme, workers=workers, overlap=overlap, seconds=seconds, seed=seed, kill_worker=kill_worker)
    )
    screen = console(report, _PLAIN_WIDTH)
    live = screen.is_terminal and not plain and screen.encoding.startswith("utf")
    try:
        with ended_by_signals(), (live_display if live else plain_display)(screen, state):
            run(state)
    except KeyboardInterrupt:
        typer.echo("weightsync: interrupted; all workers have ended.", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    write_report(state.record(), report)
    screen.print(proof_table(state))
    for line in summary(state):
        screen.print(line, soft_wrap=True, highlight=False)
    if state.failures:
        raise typer.Exit(_FAILED)
