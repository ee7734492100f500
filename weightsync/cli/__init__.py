"""The `weightsync` command line. No other part of the package imports typer or rich."""

from __future__ import annotations

import errno
import io
import os
import sys

from weightsync.errors import MissingExtraError, WeightSyncError

#: The exit code for weightsync errors that have no code of their own.
FAILED = 1
_EXTRA = ("typer", "rich")
#: What writing to standard output fails with.
_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE, errno.EBADF, errno.EAGAIN}
#: What to do where there is no folder for temporary files.
TEMPORARY_FILES = (
    "Free space in one of these folders, or set TMPDIR to a folder that can be written to: without one, torch and "
    "tensordict cannot be imported."
)


def main() -> None:
    """Run the command line, and exit the process with its exit code."""
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal of another encoding has no lines to draw charts with
    try:
        _run()
    except WeightSyncError as error:
        print(f"weightsync: {error}", file=sys.stderr)
        sys.exit(FAILED)
    except FileNotFoundError as error:
        if "temporary directory" not in str(error):  # what `tempfile` raises, also while torch is imported
            raise
        print(f"weightsync: {error.strerror}. {TEMPORARY_FILES}", file=sys.stderr)
        sys.exit(FAILED)
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE or not _standard_output_fails():
            raise
        print(f"weightsync: standard output cannot be written: {error.strerror}.", file=sys.stderr)
        sys.exit(FAILED)


def _standard_output_fails() -> bool:
    """Whether no further line can be written to it, as on a full disk. If so, what is left of it is dropped."""
    try:
        print(flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the interpreter complains about it again when it exits
        return True
    return False


def _open_closed_streams() -> None:
    """Open `os.devnull` in place of standard streams that the caller closed, such as by ``>&-``."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:  # otherwise a socket or a pipe would get the number
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))


def _run() -> None:
    try:
        from weightsync.cli._app import build  # noqa: PLC0415 - the extra may be missing

        build()(prog_name="weightsync")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in _EXTRA:
            raise MissingExtraError("cli", "The command line") from error
        raise
