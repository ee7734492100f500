"""The typer application. Each sub-command of `weightsync` is a function, or a group, in the module of its name."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from weightsync import __version__
from weightsync.errors import ConfigurationError

#: The sub-commands in the order of the help text, with the first lines of their docstrings.
COMMANDS = {
    "demo": "Train a policy on CartPole while worker processes act with the weights they receive.",
    "bench": "Measure weightsync, TorchRL, and the same bytes by memcpy and bare pipes, interleaved in one run.",
    "check": "Check the protocol's model with TLC.",
    "verify": "Check whether recorded runs conformed to the protocol.",
    "trace": "Show recorded runs as sequence charts, and export them as SVG or for Perfetto.",
    "soak": "Send at full speed, kill, stop and reconnect workers at random, and check what they serve.",
    "doctor": "Say which schemes work on this machine, and what to do about the others.",
}


class _StandardOutput:
    """Standard output while it is kept for JSON: what else is printed, also by child processes, goes to stderr."""

    def __init__(self) -> None:
        self._kept: int | None = None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep it for what `write` is given."""
        sys.stdout.flush()
        self._kept = os.dup(_STDOUT)
        os.dup2(_STDERR, _STDOUT)
        try:
            yield
        finally:
            self._restore_stdout()

    def write(self, text: str) -> None:
        """Print the JSON, once; from then on standard output is as usual."""
        self._restore_stdout()
        typer.echo(text, nl=False)

    def _restore_stdout(self) -> None:
        if self._kept is not None:
            sys.stdout.flush()
            os.dup2(self._kept, _STDOUT)
            os.close(self._kept)
            self._kept = None


_STDOUT, _STDERR = 1, 2
_standard_output = _StandardOutput()


def _keep_standard_output(context: typer.Context, report: Path | None) -> Path | None:
    if is_printed(report):
        context.with_resource(_standard_output.kept())
    elif report is not None:
        refuse_unwritable(report, "results")
    return report


def refuse_unwritable(path: Path, what: str) -> None:
    """Refuse a file that cannot be written before the command starts.

    Raises:
        ConfigurationError: it is a folder, or it may not be written, or its folder is missing.
    """
    try:
        writable = not stat.S_ISDIR(path.stat().st_mode) and os.access(path, os.W_OK)
    except FileNotFoundError:
        writable = os.access(path.parent, os.W_OK)
    except OSError:  # a folder on the way may not be searched or is a file, or the name is too long
        writable = False
    if not writable:
        raise ConfigurationError(
            f"the {what} cannot be written to {path}: name a file that may be written, in a folder that exists."
        )


#: The option of the commands whose results can be read by programs.
Report = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="[FILE]",
        callback=_keep_standard_output,
        help="Write the results as JSON to FILE. Without FILE, or with -, print them.",
    ),
]


def write_report(record: Any, report: Path | None) -> None:
    """Write results as JSON where ``--json`` says: to a file, to standard output, or nowhere.

    Raises ConfigurationError: the file cannot be written.
    """
    if report is None:
        return
    text = json.dumps(record, indent=1) + "\n"
    if is_printed(report):
        _standard_output.write(text)
        return
    try:
        report.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"the results cannot be written to {report}: {error}.") from error


def is_printed(report: Path | None) -> bool:
    """Whether standard output is for the JSON alone."""
    return str(report) == "-"


#: The width of what is printed if there is no terminal.
PLAIN_WIDTH = 120


def console(report: Path | None = None, plain_width: int = PLAIN_WIDTH) -> Console:
    """The console for people: as wide as the terminal, or of a fixed width for logs; stderr, if JSON is printed."""
    return Console(width=None if sys.stdout.isatty() else plain_width, stderr=is_printed(report))


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the command like an interrupt, so that no process is left. Keep nohup's SIGHUP.

    A second signal only prints that processes are being ended: another Ctrl-C would leave some behind.
    """
    received: list[int] = []

    def end(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            os.write(_STDERR, b"weightsync: all processes are being ended. Ctrl-\\ does not wait for them.\n")
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            sys.exit(128 + number)

    usual: dict[signal.Signals, Any] = {
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGINT: signal.default_int_handler,
    }
    unhandled = [number for number, handler in usual.items() if signal.getsignal(number) is handler]
    for number in unhandled:
        signal.signal(number, end)
    try:
        yield
    except SystemExit as error:
        # An interrupted call of Ray exits with 1; Ray's own handler, while Ray starts, with the signal's number.
        if received or error.code == signal.SIGTERM:
            sys.exit(128 + (received[0] if received else signal.SIGTERM))
        raise
    finally:
        for number in unhandled if not received else ():  # else libraries still have their own to end at exit
            signal.signal(number, usual[number])


def with_file_of_json(arguments: Sequence[str]) -> list[str]:
    """The arguments, with ``-`` after each ``--json`` that comes last or is followed by another option."""
    at = arguments.index("--") if "--" in arguments else len(arguments)  # what follows is no option
    found: list[str] = []
    for argument, following in zip(arguments[:at], [*arguments[1:], "--"], strict=False):
        bare = argument == "--json" and following.startswith("-") and following != "-"
        found += [argument, "-"] if bare else [argument]
    return [*found, *arguments[at:]]


class _LazyGroup(TyperGroup):
    """Imports only the module of the command that is run, so that `check` does not wait for torch."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_file_of_json(args))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        name, found, rest = super().resolve_command(ctx, args)
        return name, found and _load(str(name)), rest


def _load(name: str) -> Any:
    function = getattr(importlib.import_module(f"weightsync.cli.{name}"), name)
    if isinstance(function, typer.Typer):
        return typer.main.get_command(function)
    alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
    alone.command(name, context_settings=_HELP)(function)
    return typer.main.get_command(alone)


_HELP = {"help_option_names": ["-h", "--help"]}


def build() -> typer.Typer:
    """Build the application."""
    app = typer.Typer(
        cls=_LazyGroup,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings=_HELP,
    )
    app.callback()(_weightsync)
    for name, text in COMMANDS.items():
        app.command(name, help=text)(_placeholder_command)
    return app


def _placeholder_command() -> None:
    """Represent a command in the help text until its module is loaded."""


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"weightsync {__version__}")
        raise typer.Exit


def _weightsync(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Send model weights from a trainer to its workers, over a protocol that is model-checked in TLA+."""
