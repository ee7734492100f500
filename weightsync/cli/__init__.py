"""The command line, `weightsync`. It is the only part that imports typer and rich."""

from __future__ import annotations

import sys

from weightsync.errors import MissingExtraError, WeightSyncError

#: Exit code for an error of ours that has no code of its own.
FAILED = 1
_EXTRA = ("typer", "rich")


def main() -> None:
    """Run the command line. The process exits with its code."""
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
