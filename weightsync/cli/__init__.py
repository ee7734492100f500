"""The `weightsync` command line. No other part of the package imports typer or rich."""

from __future__ import annotations

import sys

from weightsync.errors import MissingExtraError, WeightSyncError

#: The exit code for weightsync errors that have no code of their own.
FAILED = 1
_EXTRA = ("typer", "rich")


def main() -> None:
    """Run the command line, and exit the process with its exit code."""
    try:
        _run()
    except WeightSyncError as error:
        print(f"weightsync: {error}", file=sys.stderr)
        sys.exit(FAILED)


def _run() -> None:
    try:
        from weightsync.cli._app import build  # noqa: PLC0415 - the extra may be missing

        build()(prog_name="weightsync")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in _EXTRA:
            raise MissingExtraError("cli", "The command line") from error
        raise
