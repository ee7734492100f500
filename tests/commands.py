"""Run commands of `weightsync` beside a test, and find the processes that they start."""

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
    """A runner that captures standard output and standard error separately. Before click 8.2 this is an option."""
    options: dict[str, Any] = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}
    return CliRunner(**options)


@contextlib.contextmanager
def running(*arguments: str, begun: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a command in a process group of its own until the context ends.

    The command has its own temporary folder, so files that it leaves when it is killed are removed as well.

    Args:
        arguments: the arguments of the command.
        begun: a text in the line of output that shows that the command has begun its work. The context begins after
            that line.

    Returns:
        The process, and a mark in the environment of this process and of all its children.
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
    """The ids of the processes that have the mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(path.parent.name)
    return found


def assert_all_gone(mark: str) -> None:
    """Wait until no process has the mark any more, and fail if that takes longer than a minute."""
    deadline = time.monotonic() + 60
    while marked(mark):
        assert time.monotonic() < deadline, f"processes {marked(mark)} are left"
        time.sleep(0.05)
