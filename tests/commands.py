"""Commands of `weightsync` that run beside a test, and the processes that they start."""

from __future__ import annotations

import contextlib
import inspect
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

_VARIABLE = "WEIGHTSYNC_TEST_MARK"


def separate_outputs() -> CliRunner:
    """A runner whose results have standard output and standard error apart; before click 8.2 this is an option."""
    options: dict[str, Any] = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}
    return CliRunner(**options)


@contextlib.contextmanager
def running(*arguments: str, begun: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a command in a process group of its own until the context ends.

    Files that it leaves in its temporary folder when it is killed are removed with that folder.

    Args:
        arguments: the command's.
        begun: a text in the line after which it has begun its work; what comes before is read.

    Returns:
        The process, and a mark that it and all its children carry.
    """
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="command-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "weightsync", *arguments],
            env={**os.environ, _VARIABLE: mark, "TMPDIR": folder, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            with process.stdout:
                assert any(begun in line for line in process.stdout)
                yield process, mark
        finally:
            process.kill()
            process.wait()


def marked(mark: str) -> list[str]:
    """The ids of the processes that carry a mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(path.parent.name)
    return found


def assert_all_gone(mark: str) -> None:
    """Wait until no process carries a mark; fail if that takes too long."""
    deadline = time.monotonic() + 60
    while marked(mark):
        assert time.monotonic() < deadline, f"processes {marked(mark)} are left"
        time.sleep(0.05)
