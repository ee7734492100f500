"""Parses TLC's `-tool` output: lines into messages, and messages into the findings of a run.

Each message is enclosed by two lines with its code: ``@!@!@STARTMSG 2110:1 @!@!@`` and ``@!@!@ENDMSG 2110 @!@!@``. The
number after the colon is its severity. Messages may be nested.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from weightsync.model.places import Action, Expression, read_action, read_expression

_START = re.compile(r"^(.*?)@!@!@STARTMSG (\d+):(\d+) @!@!@$")
_END = re.compile(r"^@!@!@ENDMSG (\d+) @!@!@$")
_STATES = re.compile(r"([\d,]+) states generated.*?, ([\d,]+) distinct states found.*?, ([\d,]+) states left")
_DEPTH = re.compile(r"search is ([\d,]+)")
_STEP = re.compile(r"^(\d+): (?:Back to state: )?(?:<(.*)>|(.*))$")
_ACTION = re.compile(r"^(\w+) line \d+, col \d+ to line \d+, col \d+ of module (\w+)$")
_VARIABLE = re.compile(r"^(?:/\\ )?(\w+) = (.*)$")
_VIOLATED = re.compile(r"^(?:Invariant|Action property|Assumption|Property) (.*?) is (?:violated|false)")
_MET = re.compile(r'^<<"MET", (.*)>>$')
_ERROR = 1
_WARNING = 3
_KEPT_LINES = 40


class StatementKind(Enum):
    """The kind of statement that TLC found to be false."""

    INVARIANT = "invariant"
    ACTION = "action property"
    TEMPORAL = "temporal property"
    DEADLOCK = "deadlock"
    ASSUMPTION = "assumption"
    ASSERTION = "assertion"


_KINDS = {
    2104: StatementKind.ASSUMPTION,
    2107: StatementKind.INVARIANT,
    2108: StatementKind.ACTION,
    2110: StatementKind.INVARIANT,
    2112: StatementKind.ACTION,
    2114: StatementKind.DEADLOCK,
    2116: StatementKind.TEMPORAL,
    2132: StatementKind.ASSERTION,
}


@dataclass(frozen=True, slots=True)
class Message:
    """One message of TLC.

    Attributes:
        code: TLC's number for the message.
        severity: 0 for information, 1 for an error, 3 for a warning, 4 for a state of a counterexample.
        text: the text between the two lines.
    """

    code: int
    severity: int
    text: str


@dataclass(frozen=True, slots=True)
class Counts:
    """How much TLC explored.

    Attributes:
        generated: states computed, counted each time a state is reached.
        distinct: distinct states.
        depth: the length of the longest shortest path, in states; None if TLC does not report it.
    """

    generated: int
    distinct: int
    depth: int | None = None

    def known(self) -> dict[str, int]:
        """The counts that TLC reported, by name."""
        counts = {"generated": self.generated, "distinct": self.distinct, "depth": self.depth}
        return {name: count for name, count in counts.items() if count is not None}


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run.

    Attributes:
        generated: states computed.
        distinct: distinct states among them.
        queue: states whose successors have not been computed yet.
    """

    generated: int
    distinct: int
    queue: int


@dataclass(frozen=True, slots=True)
class Violation:
    """A statement that does not hold.

    Attributes:
        kind: what kind of statement.
        subject: its name, or its location if TLC does not report a name; empty if TLC reports neither.
    """

    kind: StatementKind
    subject: str


@dataclass(frozen=True, slots=True)
class Step:
    """One state of a counterexample.

    Attributes:
        number: its position, from 1; for the last step of a loop, the position it returns to.
        action: the action that led to it, or "Init", "Stuttering", "Back to state".
        values: variable to its value, as TLC prints it; empty for "Stuttering" and "Back to state".
    """

    number: int
    action: str
    values: dict[str, str] = field(default_factory=dict)


class MessageReader:
    """Groups lines into messages. Keeps the last lines outside messages, and all situations that the model reports.

    A situation is reported by `See` of MCHunt.tla.

    Args:
        printed: is called with each line that the model itself prints with PrintT; those lines are not kept.
    """

    def __init__(self, printed: Callable[[str], None] | None = None) -> None:
        self.loose: deque[str] = deque(maxlen=_KEPT_LINES)
        self.met: list[str] = []
        self._printed = printed
        self._open: list[tuple[int, int, list[str]]] = []

    def feed(self, line: str) -> Message | None:
        """Process one line; return the message that it completes, if any."""
        if self._printed and line.startswith('"'):
            self._printed(line)
            return None
        line = line.rstrip("\r\n")
        start = _START.match(line)
        if start:
            self._text(start.group(1))
            self._open.append((int(start.group(2)), int(start.group(3)), []))
            return None
        if self._open and _END.match(line):
            code, severity, lines = self._open.pop()
            return Message(code, severity, "\n".join(lines).strip())
        self._text(line)
        return None

    def _text(self, text: str) -> None:
        met = _MET.match(text)
        if met:
            self.met.append(met.group(1).replace('"', "").strip("<>"))
        elif self._open:
            self._open[-1][2].append(text)
        elif text.strip() and not text.startswith(("Parsing file", "Semantic processing")):
            self.loose.append(text)


@dataclass(slots=True)
class Findings:
    """What a run has found so far. `take` adds a message."""

    progress: Progress | None = None
    counts: Counts | None = None
    completed: bool = False
    temporal: bool = False
    violations: list[Violation] = field(default_factory=list)
    trace: list[Step] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    expressions: list[Expression] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def take(self, message: Message) -> None:
        """Process one message."""
        if message.code in _KINDS:
            self.violations.append(Violation(_KINDS[message.code], _subject(message.text)))
        reader = _READERS.get(message.code)
        if reader is not None:
            reader(self, message.text)
        if message.severity == _ERROR and message.text:
            self.errors.append(message.text)
        elif message.severity == _WARNING:
            self.warnings.append(message.text)


def _subject(text: str) -> str:
    match = _VIOLATED.match(text)
    return match.group(1) if match else ""


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _read_progress(findings: Findings, text: str) -> None:
    match = _STATES.search(text)
    if match:
        findings.progress = Progress(*(_number(group) for group in match.groups()))


def _read_counts(findings: Findings, text: str) -> None:
    match = _STATES.search(text)
    if match:
        findings.counts = Counts(_number(match.group(1)), _number(match.group(2)))


def _read_depth(findings: Findings, text: str) -> None:
    match = _DEPTH.search(text)
    if match and findings.counts:
        findings.counts = Counts(findings.counts.generated, findings.counts.distinct, _number(match.group(1)))


def _read_step(findings: Findings, text: str) -> None:
    head, _, rest = text.partition("\n")
    match = _STEP.match(head)
    if match:
        findings.trace.append(Step(int(match.group(1)), _action(head, match), _values(rest)))


def _action(head: str, match: re.Match[str]) -> str:
    if "Back to state" in head:
        return "Back to state"
    label = match.group(2) or match.group(3)
    action = _ACTION.match(label)
    if action:
        return action.group(1)
    return "Init" if label == "Initial predicate" else label


def _values(text: str) -> dict[str, str]:
    values: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        match = _VARIABLE.match(line)
        if match:
            name = match.group(1)
            values[name] = match.group(2)
        elif name and line.strip():
            values[name] += "\n" + line
    return values


def _read_initial(findings: Findings, text: str) -> None:
    """Read the state from the text of the message, where TLC puts an initial state that violates an invariant."""
    findings.trace.append(Step(1, "Init", _values(text.partition("\n")[2])))


def _start_coverage(findings: Findings, _text: str) -> None:
    findings.actions.clear()
    findings.expressions.clear()


def _read_action(findings: Findings, text: str) -> None:
    action = read_action(text)
    if action is not None:
        findings.actions.append(action)


def _read_expression(findings: Findings, text: str) -> None:
    expression = read_expression(text)
    if expression is not None:
        findings.expressions.append(expression)


def _read_completed(findings: Findings, _text: str) -> None:
    findings.completed = True


def _read_temporal(findings: Findings, _text: str) -> None:
    findings.temporal = True


_READERS: dict[int, Callable[[Findings, str], None]] = {
    2107: _read_initial,
    2122: _read_step,
    2192: _read_temporal,
    2193: _read_completed,
    2194: _read_depth,
    2199: _read_counts,
    2200: _read_progress,
    2201: _start_coverage,
    2212: _read_temporal,
    2217: _read_step,
    2218: _read_step,
    2221: _read_expression,
    2772: _read_action,
    2773: _read_action,
}
