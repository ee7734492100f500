"""Links that other threads wake (`WakeableLink`), and worker processes not known to have started (`AwaitedProcess`)."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from weightsync.errors import ConfigurationError, ProtocolError, TransportError
from weightsync.options import whole_number
from weightsync.transports.base import Waker
from weightsync.transports.process import ProcessWatch, started_at, watching

_Process = BaseProcess | subprocess.Popen[Any] | int


@dataclass(frozen=True, slots=True)
class DeferredProcess:
    """A process that its owner starts later.

    Attributes:
        find: returns the process or its id; None while there is none.
    """

    find: Callable[[], _Process | None]


class AwaitedProcess:
    """A process that has not sent anything yet.

    Args:
        process: the process or its id, or what finds it.

    Raises:
        ConfigurationError: it is none of these.
    """

    def __init__(self, process: Any) -> None:
        process_or_pid: Any = (
            process if isinstance(process, BaseProcess | subprocess.Popen | DeferredProcess) else whole_number(process)
        )
        if not process_or_pid:
            raise ConfigurationError(
                f"process= is {process!r}: give the worker's multiprocessing.Process (or subprocess.Popen), or its "
                "process id. Nothing has changed."
            )
        self._find: Callable[[], _Process | None] = (
            process_or_pid.find if isinstance(process_or_pid, DeferredProcess) else lambda: process_or_pid
        )

    @property
    def end(self) -> str:
        """How it has ended; empty if it has not, or its parent does not know."""
        process = self._find()
        if process is None or isinstance(process, int):
            return ""
        try:
            code = process.exitcode if isinstance(process, BaseProcess) else process.poll()
        except ValueError:
            return "its process has ended, and its Process object is closed"
        return "" if code is None else f"its process {process.pid} has ended with exit code {code}"

    @property
    def identity(self) -> tuple[int, int] | None:
        """Its process id and start, as in `own_identity`; None: it has not started, or its Process object is closed."""
        process = self._find()
        try:
            pid = process if process is None or isinstance(process, int) else process.pid
        except ValueError:  # closed: `end` reports it
            return None
        return None if pid is None else (pid, started_at(pid) or 0)


class WakeableLink:
    """The part of a link that does not depend on how its messages are sent. Its driver never writes anything.

    A subclass calls `forget_after_fork` at the end of its constructor: another thread may fork in the middle of it.
    """

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._waker = Waker()
        self._watch: ProcessWatch | None = None
        #: How the peer's process has ended; empty: not yet, as far as is known.
        self._ending = ""
        self._closed = False

    @property
    def peer(self) -> str:
        """The name of the other end, for messages to people."""
        return self._peer

    def flush(self) -> bool:
        """Always True: the driver never has to write anything. See `Link.flush`."""
        self._require_open()
        return True

    def waitables(self) -> list[int]:
        """Readable once there is something to receive, or the peer is dead: see `Link.waitables`."""
        if self._closed:
            return []
        watched = [self._watch.fileno()] if self._watch is not None and self._watch.fileno() >= 0 else []
        return [self._waker.fileno(), *watched]

    def wants_write(self) -> int | None:
        """Nothing waits for the driver to write it."""
        return None

    def watch(self, pid: int, started: int) -> None:
        """Watch the peer's process: see `Link.watch`."""
        if not pid or self._closed or (self._watch is not None and self._watch.names(pid, started)):
            return
        watch = watching(pid, started)
        self._unwatch()
        self._watch = watch
        if watch.dead:
            self._waker.fire()

    def _death(self) -> str:
        """How the peer's process has ended; empty if it has not, as far as is known."""
        return self._watch.ending if self._watch is not None and self._watch.dead else ""

    def _with_ending(self, failure: TransportError | ProtocolError) -> TransportError | ProtocolError:
        """Why the link failed, and how the peer's process has ended: its connections end a moment before it does."""
        if self._watch is not None and self._watch.dies():
            self._ending = self._watch.ending
        if type(failure) is not TransportError or not self._ending or self._ending in str(failure):
            return failure
        error = TransportError(f"{failure} How {self._peer} ended: {self._ending}.")
        error.__cause__ = failure.__cause__
        return error

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _let_go(self) -> None:
        """Wake the current waits, and never wake again."""
        self._waker.close()
        self._unwatch()

    def forget(self) -> None:
        """In a forked child: count as closed, and close nothing of the parent's."""
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise TransportError(f"The link to {self._peer} is closed.")
