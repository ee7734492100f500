"""Reads the lines of trace files, and finds lines that were changed, dropped or added by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from weightsync.engine.recorder import FORMAT, PATTERN, LineKind, seal
from weightsync.errors import WeightSyncError
from weightsync.protocol._tables import PROTOCOL_VERSION

_KINDS_BY_NAME: Final = {what.value: what for what in LineKind}
#: Clocks count nanoseconds in 64 bits.
_LATEST: Final = 2**63


class UnreadableTraceError(WeightSyncError):
    """A file is not a weightsync trace, or was written by another release, and cannot be checked.

    What to do: give the files of the folder that ``WEIGHTSYNC_TRACE`` named, and check them with the release that
    wrote them.
    """


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a trace file."""

    path: Path
    #: Counted from 1, as editors do.
    number: int
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def place(self) -> str:
        """Its position, as ``file:line``."""
        return f"{self.path}:{self.number}"

    @property
    def is_known(self) -> bool:
        """Whether it has a kind that the recorder writes."""
        what = self.fields.get("what")
        return isinstance(what, str) and what in _KINDS_BY_NAME

    @property
    def what(self) -> LineKind:
        """The kind of the line."""
        return _KINDS_BY_NAME[self.fields["what"]]

    @property
    def machine(self) -> str:
        """The machine that it belongs to; empty: none."""
        return str(self.fields.get("m", ""))

    @property
    def time(self) -> int:
        """When it was written, by its file's clock."""
        return int(self.fields.get("t", 0))


@dataclass(frozen=True, slots=True)
class Finding:
    """A line that breaks a rule."""

    line: Line
    #: What is wrong with it.
    what: str
    #: What the model allows there.
    allowed: tuple[str, ...] = ()
    #: The rule that it breaks.
    rule: str = ""

    def record(self) -> dict[str, Any]:
        """The whole finding, as JSON."""
        where = {"file": str(self.line.path), "line": self.line.number, "fields": dict(self.line.fields)}
        return {**where, "rule": self.rule, "what": self.what, "allowed": list(self.allowed)}


@dataclass(frozen=True, slots=True)
class TraceFile:
    """One file: its undamaged lines, and the first damaged one."""

    path: Path
    lines: tuple[Line, ...]
    damage: Finding | None = None

    @property
    def ended(self) -> int | None:
        """When its recording ended; None: with its process, or unknown."""
        return self.lines[-1].time if self.lines and self.lines[-1].what is LineKind.END else None

    @property
    def clock(self) -> str:
        """Its clock: times of one clock can be compared."""
        return str(self.lines[0].fields.get("clock", "")) if self.lines else ""


def find_files(places: Sequence[Path]) -> list[Path]:
    """The trace files in the given places, which are files or folders of them; each once.

    Raises UnreadableTraceError: a place does not exist, or has no trace, or cannot be read.
    """
    found: dict[Path, Path] = {}
    for place in places:
        try:
            # A process that was killed before it wrote its first line leaves an empty file.
            files = sorted(file for file in place.rglob(PATTERN) if file.stat().st_size) if place.is_dir() else [place]
            whole = bool(files) and all(file.is_file() for file in files)
        except OSError as error:  # a folder may not be searched, or a link leads nowhere
            raise UnreadableTraceError(f"{place} cannot be read: {error}.") from error
        if not whole:
            raise UnreadableTraceError(
                f"there is no trace at {place}: a trace is a file {PATTERN}, or a folder of them."
            )
        found.update((file.resolve(), file) for file in files)
    return list(found.values())


def read_file(path: Path) -> TraceFile:
    """Read one file. Raises UnreadableTraceError: it is not a trace, or was written by another release."""
    lines: list[Line] = []
    damage: Finding | None = None
    checksum = 0
    for number, raw in _numbered_lines(path):
        line = Line(path, number, _parse(raw) or {})
        if number == 1:
            _require_header(path, line.fields)
        if damage is None:
            damage, checksum = _damage(line, raw, checksum)
        if damage is None and lines and lines[-1].what is LineKind.END:
            damage = _damage_finding(line, "the recording had ended before it")
        # The lines after a damaged one are judged too, as far as they can be read.
        if not _can_be_judged(line):
            break
        lines.append(line)
    return TraceFile(path, tuple(lines), damage)


def _can_be_judged(line: Line) -> bool:
    """Whether a line can be judged."""
    time, names = line.fields.get("t"), ("m", "role", "model")
    timed = type(time) is int and 0 <= time < _LATEST
    return line.is_known and timed and all(isinstance(line.fields.get(name, ""), str) for name in names)


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableTraceError(f"{path} cannot be read: {error}.") from error
    if not text:
        raise UnreadableTraceError(f"{path} is empty.")
    lines = text.splitlines(keepends=True)
    # A process that is killed as it writes a line may leave the first part of it.
    if len(lines) > 1 and not lines[-1].endswith("\n"):
        last = lines.pop()
        if _parse(last) is not None:
            lines.append(f"{last}\n")
    return enumerate(lines, 1)


def _parse(raw: str) -> dict[str, Any] | None:
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _require_header(path: Path, header: Mapping[str, Any]) -> None:
    if header.get("what") != LineKind.HEADER.value:
        raise UnreadableTraceError(f"{path} is not a trace of weightsync: it does not begin with a header.")
    wanted = {"format": FORMAT, "protocol": PROTOCOL_VERSION}
    for name, value in wanted.items():
        if header.get(name) != value:
            raise UnreadableTraceError(
                f"{path} has {name} {header.get(name)}, but this release reads {name} {value}: "
                "verify it with the release that wrote it."
            )


def _damage(line: Line, raw: str, before: int) -> tuple[Finding | None, int]:
    """The damage of a line, if any, and the checksum of the line."""
    fields, due = dict(line.fields), line.number - 1
    if not raw.endswith("\n") or fields.pop("c", None) is None or not _can_be_judged(line):
        return _damage_finding(line, "it is cut off, or is not a line of a trace"), before
    if fields.get("i") != due:
        return _damage_finding(line, f"it is numbered {fields.get('i')} (from 0), but line {due} belongs here"), before
    try:
        sealed, checksum = seal(fields, before)
    except RecursionError:
        return _damage_finding(line, "it is nested deeper than any line of a trace"), before
    if sealed != raw:
        return _damage_finding(
            line, "it was changed after it was written: its checksum does not match the file up to here"
        ), before
    return None, checksum


def _damage_finding(line: Line, what: str) -> Finding:
    return Finding(line, what, ("the line as it was written",), "the file")
