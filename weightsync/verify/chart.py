"""A run as a sequence chart: one lane per machine, its steps and the messages between the lanes, in order of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from weightsync.engine.recorder import LineKind
from weightsync.protocol.machine import Role
from weightsync.protocol.messages import Bye, Message, Refusal, version_of
from weightsync.verify.judging import Run
from weightsync.verify.lines import Line
from weightsync.verify.network import SentMessage
from weightsync.verify.replaying import Machine, Moment


class RowKind(Enum):
    """What a row of the chart shows."""

    #: A step of one machine.
    STEP = "step"
    #: An event that a machine refused; nothing changed.
    REFUSED = "refused"
    #: A report that was returned or raised.
    REPORT = "report"
    #: A message that arrived.
    MESSAGE = "message"
    #: A message that never arrived.
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a chart.

    Attributes:
        kind: what it shows.
        at: when, in nanoseconds since the run began; for a message, when it arrived.
        lane: the lane in which it happened; for a message, its sender's.
        to: the lane in which a message arrived; otherwise `lane`.
        text: what happened, in a few words.
        line: the line of the trace.
        sent_at: when a message was sent, in nanoseconds since the run began; otherwise `at`.
    """

    kind: RowKind
    at: int
    lane: int
    to: int
    text: str
    line: Line
    sent_at: int


@dataclass(frozen=True, slots=True)
class State:
    """A period in which a machine was in one state.

    Attributes:
        lane: the machine's lane.
        name: the state, as the tables spell it.
        begin: the first instant, in nanoseconds since the run began.
        end: the instant after the last.
    """

    lane: int
    name: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Chart:
    """A run, laid out.

    Attributes:
        lanes: the machines' names, senders first.
        rows: what happened, in order of time.
        states: how long each machine was in which state.
    """

    lanes: tuple[str, ...]
    rows: tuple[Row, ...]
    states: tuple[State, ...]

    def record(self) -> dict[str, Any]:
        """The chart as plain data, for JSON. Times are in nanoseconds since the run began."""
        return {
            "machines": list(self.lanes),
            "rows": [
                {
                    "kind": row.kind.value,
                    "at": row.at,
                    "sent_at": row.sent_at,
                    "from": row.lane,
                    "to": row.to,
                    "text": row.text,
                }
                for row in self.rows
            ],
            "states": [asdict(state) for state in self.states],
        }


def chart_of(run: Run) -> Chart:
    """Lay out a run. Machines of several hosts have clocks of their own, so their rows cannot be compared.

    Raises ValueError: the run has no machine.
    """
    if not run.machines:
        raise ValueError("a chart needs a run with at least one machine")
    machines = sorted(run.machines, key=lambda machine: (machine.role is not Role.SENDER, machine.lines[0].time))
    lanes = {machine.name: number for number, machine in enumerate(machines)}
    start = min(machine.lines[0].time for machine in machines)
    rows = [row for machine in machines for row in _own_rows(machine, lanes[machine.name], start)]
    rows += [row for sent in run.messages for row in _arrows(sent, lanes, start)]
    rows.sort(key=lambda row: row.at)
    states = [state for machine in machines for state in _states(machine, lanes[machine.name], start)]
    return Chart(tuple(_names(machines)), tuple(rows), tuple(states))


def _names(machines: Sequence[Machine]) -> Iterator[str]:
    counts = {role: sum(machine.role == role for machine in machines) for role in Role}
    seen = dict.fromkeys(Role, 0)
    for machine in machines:
        number = f" {seen[machine.role]}" if counts[machine.role] > 1 else ""
        seen[machine.role] += 1
        yield _printable(f"{machine.role}{number} ({machine.model_id})")


def _printable(text: str) -> str:
    """A text of a trace without the characters that move a terminal's cursor, or that XML cannot hold."""
    return "".join(each if each.isprintable() else "\ufffd" for each in text)


def _own_rows(machine: Machine, lane: int, start: int) -> Iterator[Row]:
    for moment in machine.moments:
        shown = _row_content(moment)
        if shown is not None:
            at = moment.line.time - start
            yield Row(shown[0], at, lane, lane, _printable(shown[1]), moment.line, at)


def _row_content(moment: Moment) -> tuple[RowKind, str] | None:
    match moment.line.what:
        case LineKind.STEP:
            moved = "" if moment.state is moment.state_before else f" -> {moment.state.value}"
            return RowKind.STEP, f"{moment.line.fields.get('input') or 'LATE'}{moved}"
        case LineKind.REFUSED:
            return RowKind.REFUSED, f"{moment.line.fields['event']['is']} refused"
        case LineKind.REPORTED:
            return RowKind.REPORT, f"report of version {moment.line.fields.get('version')}"
        case _:
            return None


def _arrows(sent: SentMessage, lanes: dict[str, int], start: int) -> Iterator[Row]:
    lane, text, sent_at = lanes[sent.line.machine], _message_text(sent.message), sent.line.time - start
    if not sent.arrivals:
        yield Row(RowKind.LOST, sent_at, lane, lane, f"{text}, which arrived nowhere", sent.line, sent_at)
    for arrival in sent.arrivals:
        at = max(arrival.time - start, sent_at)
        yield Row(RowKind.MESSAGE, at, lane, lanes[arrival.machine], text, sent.line, sent_at)


def _message_text(message: Message) -> str:
    why = f" {message.kind.name}" if isinstance(message, Refusal) else ""
    version = "" if isinstance(message, Bye) else f" v{version_of(message)}"
    return f"{type(message).__name__}{why}{version}"


def _states(machine: Machine, lane: int, start: int) -> Iterator[State]:
    last = machine.lines[-1].time - start
    name, begin = "", machine.lines[0].time - start
    for moment in machine.moments:
        at = moment.line.time - start
        if name and moment.state.value != name:
            yield State(lane, name, begin, max(at, begin))
            begin = at
        name = moment.state.value
    if name:
        yield State(lane, name, begin, max(last, begin))
