"""The application: the sub-commands of `weightsync`, each a function in a module of its name."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

from weightsync import __version__

#: The sub-commands, in the order in which help shows them.
COMMANDS = ("demo", "check")


def build() -> typer.Typer:
    """Build the application."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_weightsync)
    for name in COMMANDS:
        module = importlib.import_module(f"weightsync.cli.{name}")
        app.command(name)(getattr(module, name))
    return app


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
    """Model weights from a trainer to its workers, over a protocol that a model checker has checked."""
