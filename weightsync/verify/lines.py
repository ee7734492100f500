"""The lines of trace files, as they were written: what was changed, dropped or added by hand is named."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from weightsync.engine.recorder import FORMAT, PATTERN, What, seal
from weightsync.errors import WeightSyncError
from weightsync.protocol._tables import PROTOCOL_VERSION

_WHATS: Final = {what.value: what for what in What}


class UnreadableTraceError(WeightSyncError):
    """What was given is no trace of ours, or one of another release: nothing can be said of it."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a trace file."""

    path: Path
    #: From 1, as editors count.
    number: int
    said: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def place(self) -> str:
        """Where it stands, as ``file:line``."""
        return f"{self.path}:{self.number}"

    @property
    def what(self) -> What:
        """What it tells of."""
        return _WHATS[self.said["what"]]

    @property
    def machine(self) -> str:
        """Which machine it tells of; empty: none."""
        return str(self.said.get("m", ""))

    @property
    def time(self) -> int:
        """When it was written, by its file's clock."""
        return int(self.said.get("t", 0))


@dataclass(frozen=True, slots=True)
class Finding:
    """A line that may not be as it is."""

    line: Line
    #: What is wrong with it.
    what: str
    #: What the model allows there.
    allowed: tuple[str, ...] = ()
    #: Which rule it breaks.
    rule: str = ""

    def record(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        where = {"file": str(self.line.path), "line": self.line.number, "told": dict(self.line.said)}
        return {**where, "rule": self.rule, "what": self.what, "allowed": list(self.allowed)}


@dataclass(frozen=True, slots=True)
class TraceFile:
    """One file: its lines as far as they are whole, and the first that is not."""

    path: Path
    lines: tuple[Line, ...]
    damage: Finding | None = None

    @property
    def ended(self) -> int | None:
        """When its recording ended; None: with its process, or nobody knows."""
        return self.lines[-1].time if self.lines and self.lines[-1].what is What.END else None

    @property
    def clock(self) -> str:
        """Its clock: times of the same clock can be compared."""
        return str(self.lines[0].said.get("clock", "")) if self.lines else ""


def find_files(places: Sequence[Path]) -> list[Path]:
    """The trace files that places name: files themselves, or folders that hold some.

    Raises:
        UnreadableTraceError: a place is not there, or holds no trace.
    """
    found: dict[Path, None] = {}
    for place in places:
        # A process that was killed before it wrote its first line leaves an empty file.
        files = sorted(file for file in place.rglob(PATTERN) if file.stat().st_size) if place.is_dir() else [place]
        if not files or not all(file.is_file() for file in files):
            raise UnreadableTraceError(
                f"there is no trace at {place}: a trace is a file {PATTERN}, or a folder of them."
            )
        found.update(dict.fromkeys(files))
    return list(found)


def read_file(path: Path) -> TraceFile:
    """Read one file.

    Raises:
        UnreadableTraceError: it is no trace, or was written by another release.
    """
    lines: list[Line] = []
    damage: Finding | None = None
    checksum = 0
    for number, raw in _numbered(path):
        line = Line(path, number, _parsed(raw) or {})
        if number == 1:
            _require_ours(path, line.said)
        if damage is None:
            damage, checksum = _damage(line, raw, checksum)
        if damage is None and lines and lines[-1].what is What.END:
            damage = _damaged(line, "the recording had ended before it")
        # What comes behind a damage is judged all the same, as far as it can be read.
        if not _tells(line):
            break
        lines.append(line)
    return TraceFile(path, tuple(lines), damage)


def _tells(line: Line) -> bool:
    """Whether it can be judged what a line tells."""
    known = line.said.get("what") in _WHATS and type(line.said.get("t")) is int
    return known and isinstance(line.said.get("m", ""), str)


def _numbered(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableTraceError(f"{path} cannot be read: {error}.") from error
    if not text:
        raise UnreadableTraceError(f"{path} is empty.")
    return enumerate(text.splitlines(keepends=True), 1)


def _parsed(raw: str) -> dict[str, Any] | None:
    try:
        parsed = json.loads(raw)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def _require_ours(path: Path, header: Mapping[str, Any]) -> None:
    if header.get("what") != What.HEADER.value:
        raise UnreadableTraceError(f"{path} is no trace of weightsync: it does not begin with a header.")
    wanted = {"format": FORMAT, "protocol": PROTOCOL_VERSION}
    for name, value in wanted.items():
        if header.get(name) != value:
            raise UnreadableTraceError(
                f"{path} is of {name} {header.get(name)}, and this release reads {name} {value}: "
                "verify it with the release that wrote it."
            )


def _damage(line: Line, raw: str, before: int) -> tuple[Finding | None, int]:
    """What is wrong with a line as it stands, if anything, and its checksum."""
    said, due = dict(line.said), line.number - 1
    if not raw.endswith("\n") or said.pop("c", None) is None or not _tells(line):
        return _damaged(line, "it is cut off, or no line of a trace"), before
    if said.get("i") != due:
        return _damaged(line, f"it says that it is line {said.get('i')} (from 0), and {due} is due here"), before
    sealed, checksum = seal(said, before)
    if sealed != raw:
        return _damaged(line, "it is not as it was written: its checksum does not fit it and what is before it"), before
    return None, checksum


def _damaged(line: Line, what: str) -> Finding:
    return Finding(line, what, ("the line as it was written",), "the file")
