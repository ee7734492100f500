"""The stack of a worker process's main thread when the process is given up. A signal makes the process write it.

The signal's handler is C, so it also answers while the thread holds the interpreter's lock. A stopped process does not.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, NamedTuple

from weightsync.clock import Deadline
from weightsync.transports.process import is_stopped

#: The signal that asks. Of the real-time signals, which few programs use, the last but two.
_ASKED: Final = signal.SIGRTMAX - 2
#: Seconds to wait for the whole answer.
_PATIENCE: Final = 0.3
_LONGEST: Final = 1 << 16
#: How a whole stack ends: with the program's outermost frame, or cut after 100 frames.
_ENDS: Final = (b" in <module>\n", b"  ...\n")
_FRAME: Final = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')
_PACKAGE_FOLDER: Final = f"{Path(__file__).parents[1]}{os.sep}"


class StackDump(NamedTuple):
    """What a worker process was doing."""

    #: Its line of code, in words; empty: unknown.
    place: str = ""
    #: The stack of its main thread, innermost call first; empty: unknown.
    stack: str = ""

    @property
    def phrase(self) -> str:
        """The place, to follow in a sentence."""
        return f"; {self.place}" if self.place else ""


def dump_on_signal(connection: Connection) -> None:
    """In a worker: write the stack there whenever the trainer asks."""
    faulthandler.register(_ASKED, file=connection.fileno(), all_threads=False)


def request(pid: int, connection: Connection) -> StackDump:
    """Ask a process that has called `dump_on_signal`, and wait a moment. Of one that has not, nothing is known."""
    try:
        if is_stopped(pid):
            return StackDump("its process is stopped, by SIGSTOP or a debugger")
        if not _catches_signal(pid):
            return StackDump()
        os.kill(pid, _ASKED)
        return _parse_dump(_read_dump(connection).decode(errors="replace"))
    except OSError:  # it is dead
        return StackDump()


def _read_dump(connection: Connection) -> bytes:
    """The stack, or as much of it as came in time: the process writes it a few words at a time."""
    deadline = Deadline(_PATIENCE)
    stack = b""
    while not stack.endswith(_ENDS) and connection.poll(deadline.remaining):
        piece = os.read(connection.fileno(), _LONGEST)
        if not piece:  # the process has ended
            break
        stack += piece
    return stack


def _parse_dump(stack: str) -> StackDump:
    frames = [frame for line in stack.splitlines() if (frame := _FRAME.search(line))]
    theirs = [frame for frame in frames if not frame["file"].startswith(_PACKAGE_FOLDER)] or frames
    if not theirs:
        return StackDump()
    at = theirs[0]
    return StackDump(f"it was at line {at['line']} of {at['file']}, in {at['function']}", stack.strip())


def _catches_signal(pid: int) -> bool:
    """Whether the process catches the signal; one that does not would be ended by it."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
            name, _, caught = line.partition(":")
            if name == "SigCgt":
                return bool(int(caught, 16) >> (_ASKED - 1) & 1)
    return False
