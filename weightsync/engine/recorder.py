"""The trace recorder: every step of every machine and every message, as JSON lines, one file per process.

    with weightsync.engine.recorder.record("traces"):
        ...                                     # senders and receivers made here are recorded, children's too

or ``WEIGHTSYNC_TRACE=traces`` in the environment. ``weightsync verify traces`` says whether the run conformed to the
protocol. A machine that is made while no recording is on has a driver that knows no recorder: it costs nothing.

A file begins with a header, followed by one line for each event. Each line has its number in the file (``i``) and ends
with a checksum over itself and the line before (``c``), so that a line that was changed, dropped or added by hand is
found. A machine's line names the machine (``m``, ``role``, ``model``), counts its lines (``n``), and says when
(``t``, nanoseconds of one clock per host) and ``what`` happened (`LineKind`), with the details.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import hashlib
import itertools
import json
import logging
import os
import secrets
import threading
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec import NODEFAULT, Struct, structs

from weightsync.clock import clock_id, now_ns
from weightsync.errors import ConfigurationError
from weightsync.protocol._tables import PROTOCOL_VERSION
from weightsync.protocol.machine import Role

if TYPE_CHECKING:
    from weightsync.engine.driver import Shield

logger = logging.getLogger("weightsync")

#: Names the folder to which a process and its children record.
ENVIRONMENT: Final = "WEIGHTSYNC_TRACE"
#: The version of the format.
FORMAT: Final = 4
#: How trace files are named, for a search.
PATTERN: Final = "trace-*.jsonl"
#: Bytes longer than this (layouts, extra state) are recorded by their digest.
_LONG = 64


class LineKind(enum.Enum):
    """What a line records."""

    #: The file's first line: format, protocol, host, process.
    HEADER = "header"
    #: A note of the person who records.
    NOTE = "note"
    #: Recording ended here; the process may have gone on.
    END = "end"
    #: A machine begins: new, copied, unpickled, or a forked child's.
    BORN = "born"
    #: A link is created, and numbered by this machine.
    LINK = "link"
    #: An event was taken: the event, the input, the state before and after, the data after, the effects.
    STEP = "step"
    #: An event was refused; nothing changed.
    REFUSED = "refused"
    #: A message is given to a link.
    SENT = "sent"
    #: A message was taken from a link.
    RECEIVED = "received"
    #: A link cannot be used any more.
    FAILED = "failed"
    #: A link is closed, with a goodbye if it can still be sent.
    CLOSED = "closed"
    #: A report, of a version or of its state so far, was returned to a caller or raised with an error.
    REPORTED = "reported"


def plain(value: object) -> Any:
    """A value of the protocol as JSON. Fields with their default values are left out.

    Raises:
        TypeError: it is no value of the protocol.
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case enum.Enum():
            return value.name
        case bytes():
            return (value if len(value) <= _LONG else hashlib.blake2b(value, digest_size=16).digest()).hex()
        case Mapping():
            return {str(key): plain(each) for key, each in value.items()}
        case tuple() | list():
            return [plain(each) for each in value]
    kind: type[Any] = type(value)
    fields = ((name, getattr(value, name), default) for name, default in _fields(kind))
    shown = {name: plain(held) for name, held, default in fields if default is NODEFAULT or held != default}
    return {"is": kind.__name__, **shown}


_known: dict[type, tuple[tuple[str, object], ...]] = {}


def _fields(kind: type[Any]) -> tuple[tuple[str, object], ...]:
    """Names and defaults of a value's fields."""
    if kind not in _known:
        if not issubclass(kind, Struct):
            raise TypeError(f"{kind} cannot be recorded: it is not a value of the protocol")
        _known[kind] = tuple((each.name, _default(each)) for each in structs.fields(kind))
    return _known[kind]


def _default(field: structs.FieldInfo) -> object:
    return field.default if field.default_factory is NODEFAULT else field.default_factory()


def seal(line: Mapping[str, Any], previous_checksum: int) -> tuple[str, int]:
    """A line as it is written to a file, and its checksum.

    Args:
        line: what it records.
        previous_checksum: the checksum of the line before; 0 if there is none.
    """
    body = json.dumps(line, separators=(",", ":"))
    checksum = zlib.crc32(body.encode(), previous_checksum)
    return f'{body[:-1]},"c":"{checksum:08x}"}}\n', checksum


@dataclass(frozen=True, slots=True)
class _Mark:
    """A place in a file between two lines."""

    lines: int = 0
    #: Bytes.
    size: int = 0
    #: Of the last line before it, as is the time.
    checksum: int = 0
    time: int = 0


class Recorder:
    """Writes the lines of all machines of a process to one file, at once, so that a process that is killed loses none.

    Safe to use from several threads and after a fork: the child writes a file of its own.

    Args:
        folder: where the files are written; it is made with the first line.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._ended = False
        self._fd: int | None = None
        self._start_over()

    def _start_over(self) -> None:
        # What a forked child inherits is the parent's: the lock may be held by a thread that the child does not have.
        if self._fd is not None:
            os.close(self._fd)
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._parent = os.getppid()
        self._token = secrets.token_hex(4)
        self._fd = None
        self._whole = self._before = _Mark()
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._writing = False
        self._machine_numbers = itertools.count(1)

    def born(self, role: Role, model_id: str) -> MachineTrace:
        """A machine begins.

        Raises:
            ConfigurationError: no file can be made in the folder.
        """
        if os.getpid() != self._pid:
            self._start_over()
        with _defer_signals():
            return MachineTrace(self, f"{self._token}.{next(self._machine_numbers)}", role, model_id)

    def note(self, text: str) -> None:
        """Write a note."""
        with _defer_signals():
            self.write({"t": now_ns(), "what": LineKind.NOTE.value, "text": text})

    def write(self, line: Mapping[str, Any]) -> None:
        """Write one line; nothing once recording has ended."""
        if os.getpid() != self._pid:
            self._start_over()
        with self._lock:
            if self._ended:
                return
            self._waiting.append(line)
            # A line may come while another is written: the garbage collector may end an object at any point.
            if self._writing:
                return
            self._writing = True
            try:
                while self._waiting and not self._ended:
                    self._write_line(self._waiting.popleft())
            finally:
                self._writing = False

    def _write_line(self, line: Mapping[str, Any]) -> None:
        if self._fd is None:
            self._fd = self._open_file()
            self._append(self._header())
        if not self._ended:
            self._append(line)

    def _open_file(self) -> int:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return os.open(self._path(), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigurationError(
                f"Nothing can be recorded to {self.folder}: {error.strerror}. Give recorder.record() or {ENVIRONMENT} "
                "a folder that can be written to, or record nothing."
            ) from error

    def _path(self) -> Path:
        return self.folder / PATTERN.replace("*", f"{self._pid}-{self._token}")

    def _header(self) -> Mapping[str, Any]:
        head = {"format": FORMAT, "protocol": PROTOCOL_VERSION, "clock": clock_id(), "pid": self._pid}
        return {"t": now_ns(), "what": LineKind.HEADER.value, **head, "parent": self._parent}

    def _append(self, line: Mapping[str, Any]) -> None:
        assert self._fd is not None
        sealed, checksum = seal({"i": self._whole.lines, **line}, self._whole.checksum)
        body = sealed.encode()
        try:
            if os.write(self._fd, body) < len(body):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._give_up(error)
            return
        self._before = self._whole
        self._whole = _Mark(self._before.lines + 1, self._before.size + len(body), checksum, line["t"])

    def _give_up(self, error: OSError) -> None:
        """End the recording because a line could not be written: a recorder never fails the run."""
        assert self._fd is not None
        # The line that ends the recording replaces the last line, unless that is the header.
        mark = self._before
        end_line, _ = seal({"i": mark.lines, "t": mark.time, "what": LineKind.END.value}, mark.checksum)
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, mark.size if mark.lines else self._whole.size)
            if mark.lines:
                os.write(self._fd, end_line.encode())
        self._stop()
        logger.error(
            "Recording to %s ended after %s lines: %s. The run continues, and is no longer recorded in this process; "
            "what was written can be verified. Free disk space, and record again.",
            self._path(),
            mark.lines,
            error,
        )

    def end(self) -> None:
        """End the recording. Machines that still run are no longer recorded."""
        with self._lock:
            try:
                if self._fd is not None and os.getpid() == self._pid:
                    self.write({"t": now_ns(), "what": LineKind.END.value})
            finally:
                self._stop()

    def _stop(self) -> None:
        self._ended = True
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)


def _defer_signals() -> Shield:
    """A block in which signals wait: a line that was written, and is not counted, would make the file a damaged one."""
    from weightsync.engine.driver import Shield  # noqa: PLC0415 - it imports torch, which a judge of traces does not need

    return Shield(lambda: None)


class MachineTrace:
    """One machine's lines in a trace.

    Args:
        recorder: writes them.
        name: the name of the machine, which no other has.
        role: what kind of machine it is.
        model_id: its model.
    """

    def __init__(self, recorder: Recorder, name: str, role: Role, model_id: str) -> None:
        self._recorder = recorder
        self._about = {"m": name, "role": role}
        self._numbers = itertools.count()
        self.tell(LineKind.BORN, model_id)

    def tell(self, line_kind: LineKind, model_id: str, **facts: object) -> None:
        """Write one line. The caller holds the lock of the machine's driver, so that the lines are in order."""
        about = {"t": now_ns(), **self._about, "n": next(self._numbers), "model": model_id, "what": line_kind.value}
        self._recorder.write({**about, **{name: plain(value) for name, value in facts.items()}})


_recorders: list[Recorder] = []


def recorder() -> Recorder | None:
    """The recorder of machines that are made now; None if no recording is on."""
    if _recorders:
        return _recorders[-1]
    folder = os.environ.get(ENVIRONMENT)
    return _recorder_for(folder) if folder else None


@functools.cache
def _recorder_for(folder: str) -> Recorder:
    return Recorder(folder)


@contextlib.contextmanager
def record(folder: str | os.PathLike[str]) -> Iterator[Recorder]:
    """Record the senders and receivers that are made inside the block, here and in processes started from here.

    Args:
        folder: where the files are written, one for each process.

    Yields:
        The recorder, for notes.

    Raises:
        ConfigurationError: this is not the path of a folder.
    """
    recorder, previous_folder = Recorder(_path_of(folder)), os.environ.get(ENVIRONMENT)
    os.environ[ENVIRONMENT] = str(recorder.folder)
    _recorders.append(recorder)
    try:
        yield recorder
    finally:
        _recorders.remove(recorder)
        if previous_folder is None:
            del os.environ[ENVIRONMENT]
        else:
            os.environ[ENVIRONMENT] = previous_folder
        recorder.end()


def _path_of(folder: str | os.PathLike[str]) -> Path:
    text = os.fspath(folder) if isinstance(folder, os.PathLike) else folder
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigurationError(
            f"recorder.record() was given {folder!r}: give the path of a folder, which is made if it does not exist."
        )
    return Path(text).absolute()
