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

from weightsync.cli._demo_display import LiveDisplay, PlainDisplay
from weightsync.cli._demo_words import proof_table, summary
from weightsync.demo import Board, Casualty, Result, SchemeName, Settings, SyncMode, run
from weightsync.errors import ConfigurationError

_SCHEMES = "|".join(scheme.value for scheme in SchemeName)
_FAILED = 1
_INTERRUPTED = 130
#: Columns for the table at the end where there is no terminal.
_PLAIN_WIDTH = 100


def demo(  # noqa: PLR0917
    scheme: Annotated[str, typer.Option(metavar=_SCHEMES, help="What the weights travel over.")] = "shared",
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
    settings = Settings(
        scheme=_scheme(scheme),
        workers=workers,
        sync=SyncMode.OVERLAPPED if overlap else SyncMode.BLOCKING,
        seconds=seconds,
        seed=seed,
        casualty=Casualty.ONE if kill_worker else Casualty.NONE,
    )
    console = Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)
    try:
        with _ended_by_signals():
            result = _shown(settings, console, plain)
    except KeyboardInterrupt:
        typer.echo("weightsync: interrupted; no worker is left.", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    console.print(proof_table(result))
    for line in summary(result):
        console.print(line, soft_wrap=True, highlight=False)
    if result.shortcomings:
        raise typer.Exit(_FAILED)


def _shown(settings: Settings, console: Console, plain: bool) -> Result:
    board = Board(settings)
    drawn = console.is_terminal and not plain and console.encoding.startswith("utf")
    with (LiveDisplay if drawn else PlainDisplay)(console, board):
        return run(settings, board)


def _scheme(name: str) -> SchemeName:
    try:
        return SchemeName(name)
    except ValueError:
        names = ", ".join(scheme.value for scheme in SchemeName)
        raise ConfigurationError(f"there is no scheme {name!r} in the demo; there is {names}.") from None


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
