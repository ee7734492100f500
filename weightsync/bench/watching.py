"""Ends a step of the run that waits for a worker that has ended, or that takes too long.

TorchRL's schemes, bare pipes and Ray wait without a deadline.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType, TracebackType
from typing import TypeVar

from weightsync.bench.settings import BenchError
from weightsync.errors import SyncError, TransportError, WeightSyncError, with_type

Result = TypeVar("Result")
#: How many seconds a step may take: one contender's set-up, one send, one proof. Longer than timeouts inside of it,
#: which say more.
STEP_TIMEOUT = 300.0
#: How many seconds a step that waits for a worker that has ended has to notice it.
NOTICE_TIMEOUT = 5.0
#: How often the watchdog looks, in seconds.
TICK = 1.0

#: The workers' processes that should run: their names, by their ids.
_watched: dict[int, str] = {}


def watch(pid: int, name: str) -> None:
    """Expect a process to run from now on."""
    _watched[pid] = name


def forget(pid: int) -> None:
    """Expect a process to end."""
    _watched.pop(pid, None)


class _Interrupted(BaseException):
    """The watchdog ends what the main thread waits for."""


class _Step:
    """What the main thread does now."""

    def __init__(self, what: str) -> None:
        self.what = what
        #: Why the watchdog ends it.
        self.fault = ""


class Watchdog:
    """A thread that looks at the step that the main thread is in. A context manager."""

    def __init__(self) -> None:
        self._step: _Step | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch_steps, name="bench-watchdog", daemon=True)
        self._owner = threading.current_thread()

    def __enter__(self) -> Watchdog:
        if self._owner is threading.main_thread():  # another thread cannot be interrupted: its workers are killed
            self._before = signal.signal(signal.SIGUSR2, self._interrupt)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if self._owner is threading.main_thread():
            signal.signal(signal.SIGUSR2, self._before)

    def do(self, what: str, action: Callable[[], Result]) -> Result:
        """Do something that needs the workers. If it fails or is interrupted, those that are stopped are killed.

        Args:
            what: names it in errors.
            action: a call of it. No `with` statement instead: `_interrupt` may raise between the end of its block and
                the code that would look at the error.

        Raises:
            BenchError: a worker has ended, or it took too long.
        """
        step = self._step = _Step(what)
        try:
            found = action()
            self._step = None  # from here on `_interrupt` raises nothing
        except BaseException as error:
            self._step = None
            failure = _failure_text(step, error)
            _kill(_in_state("Tt"))  # they would answer nobody who ends them
            if failure:
                raise BenchError(f"{what}: {failure}") from error
            raise
        if step.fault:
            raise BenchError(f"{what}: {step.fault}")
        return found

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if self._step is not None and self._step.fault:
            raise _Interrupted

    def _watch_steps(self) -> None:
        seen, ticks = None, 0
        while not self._over.wait(TICK):
            ticks = ticks + 1 if self._step is seen else 0
            seen = self._step
            if seen is not None and ticks * TICK >= NOTICE_TIMEOUT:
                seen.fault = seen.fault or _ended() or (_late_reason() if ticks * TICK >= STEP_TIMEOUT else "")
                if seen.fault:
                    _kill(_watched)
                    self._wake()

    def _wake(self) -> None:
        """Interrupt a system call of the main thread. It is done again at each tick, as long as the step lasts."""
        if self._owner is threading.main_thread() and self._owner.ident is not None:
            signal.pthread_kill(self._owner.ident, signal.SIGUSR2)


def _failure_text(step: _Step, error: BaseException) -> str:
    """What is said of an error in a step. Nothing: the error says it itself."""
    if step.fault and isinstance(error, (_Interrupted, Exception)):
        return step.fault  # the watchdog killed the workers: the error only follows
    if isinstance(error, (SyncError, TransportError)):
        return str(error)
    if isinstance(error, WeightSyncError) or not isinstance(error, Exception):
        return ""
    if ended := _ended(patience=1.0):
        return ended
    if isinstance(error, (EOFError, OSError, RuntimeError)):
        return with_type(error)
    return ""


def _ended(patience: float = 0.0) -> str:
    """Which workers have ended, in words; or nothing. A pipe ends a moment before its process does."""
    until = time.monotonic() + patience
    while not (ended := _in_state("ZX")) and time.monotonic() < until:
        time.sleep(0.01)
    return f"a worker has ended: {_names(ended)}" if ended else ""


def _late_reason() -> str:
    stopped = _names(_in_state("Tt"))
    return f"no end within {STEP_TIMEOUT:g} s" + (f"; a worker is stopped: {stopped}" if stopped else "")


def _names(pids: Iterable[int]) -> str:
    return ", ".join(f"{_watched.get(pid, 'a worker')} (process {pid})" for pid in pids)


def _in_state(letters: str) -> list[int]:
    """The workers whose processes are in one of the states of proc(5). A process that is gone is in state X."""
    # The main thread forgets a worker before it ends it, maybe while this looks.
    return [pid for pid in sorted(_watched) if _state(pid) in letters and pid in _watched]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _kill(pids: Iterable[int]) -> None:
    for pid in list(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
