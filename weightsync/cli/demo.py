"""``weightsync demo``: a policy is trained while workers act with the weights they were sent."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from weightsync.cli._demo_display import live_display, plain_display, proof_table, summary
from weightsync.demo import RunState, SchemeName, Settings, run

_FAILED = 1
_INTERRUPTED = 130
#: Columns for the table at the end where there is no terminal.
_PLAIN_WIDTH = 100


def demo(  # noqa: PLR0917
    scheme: Annotated[SchemeName, typer.Option(help="What the weights are sent over.")] = SchemeName.SHARED,
    workers: Annotated[int, typer.Option(help="How many rollout processes act.")] = 2,
    overlap: Annotated[
        bool, typer.Option("--async", help="Send with send_async(): the sync overlaps with training.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(help="The longest that training may take; it ends early once solved.")
    ] = 90.0,
    seed: Annotated[
        int, typer.Option(help="For weights, environments and actions. Processes race: runs still differ.")
    ] = 0,
    kill_worker: Annotated[
        bool, typer.Option("--kill-worker", help="Kill the last worker half way, with SIGKILL.")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print plain lines on a terminal too.")] = False,
) -> None:
    """Train a policy on CartPole while worker processes act with the weights they were sent.

    In the end each worker proves by digest that it serves the trainer's last weights.
    Exit code 0 if training happened and all who should be left have proved it, 1 otherwise.
    """
    state = RunState(
        Settings(scheme=scheme, workers=workers, overlap=overlap, seconds=seconds, seed=seed, kill_worker=kill_worker)
    )
    console = Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)
    live = console.is_terminal and not plain and console.encoding.startswith("utf")
    try:
        with _ended_by_signals(), (live_display if live else plain_display)(console, state):
            result = run(state)
    except KeyboardInterrupt:
        typer.echo("weightsync: interrupted; no worker is left.", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    console.print(proof_table(result))
    for line in summary(result):
        console.print(line, soft_wrap=True, highlight=False)
    if result.failures:
        raise typer.Exit(_FAILED)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the run the way an interrupt does: no worker left, terminal restored."""

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
