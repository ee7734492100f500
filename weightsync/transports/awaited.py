"""A worker's process as its parent knows it, to be watched from the start: it may have to be started first."""

from __future__ import annotations

import subprocess
from multiprocessing.process import BaseProcess
from typing import Any

from weightsync.errors import ConfigurationError
from weightsync.transports.liveness import started_at


class AwaitedProcess:
    """A process that has not spoken yet.

    Args:
        process: a `multiprocessing` process or a `subprocess.Popen`, started or not, or a process id of this host.

    Raises:
        ConfigurationError: it is none of these.
    """

    def __init__(self, process: Any) -> None:
        known = isinstance(process, BaseProcess | subprocess.Popen)
        if not known and (isinstance(process, bool) or not isinstance(process, int) or process <= 0):
            raise ConfigurationError(
                f"process= is {process!r}: give the worker's multiprocessing.Process (or subprocess.Popen), or its "
                "process id. Nothing has changed."
            )
        self._process: BaseProcess | subprocess.Popen[Any] | int = process

    @property
    def end(self) -> str:
        """How it has ended; empty: it has not, or its parent does not know."""
        process = self._process
        if isinstance(process, int):
            return ""
        try:
            code = process.exitcode if isinstance(process, BaseProcess) else process.poll()
        except ValueError:
            return "its process has ended, and its Process object is closed"
        return "" if code is None else f"its process {process.pid} has ended with exit code {code}"

    @property
    def identity(self) -> tuple[int, int] | None:
        """Its process id and its start, as `own_identity` tells them; None: it has not started."""
        pid = self._process if isinstance(self._process, int) else self._process.pid
        return None if pid is None else (pid, started_at(pid) or 0)
