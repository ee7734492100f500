"""Replays one machine's lines through the shipped pure halves, and requires the same steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightsync.engine.recorder import What, plain
from weightsync.errors import WeightSyncError
from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending
from weightsync.protocol._tables import INITIAL, Delivery, State
from weightsync.protocol.messages import Message
from weightsync.verify.decoding import decoded
from weightsync.verify.lines import Finding, Line
from weightsync.verify.reporting import FalseReportError, Reports
from weightsync.verify.words import differences, possible, value

Data = sending.SenderData | receiving.ReceiverData
Step = sending.Step | receiving.Step


@dataclass(frozen=True, slots=True)
class Half:
    """A role's pure half."""

    step: Callable[[State, Any, Any], Step]
    data: type[Data]
    event: Any


HALVES = {
    "sender": Half(sending.step, sending.SenderData, sending.Event),
    "receiver": Half(receiving.step, receiving.ReceiverData, receiving.Event),
}


@dataclass(frozen=True, slots=True)
class Moment:
    """A line that was checked, with the state before and after it."""

    line: Line
    before: Data
    after: Data
    state_before: State
    state: State
    event: Any = None
    #: The step that the pure half took for the event; None: it refused, or there was no event.
    step: Step | None = None
    message: Message | None = None

    @property
    def link(self) -> int:
        """The link that the line names."""
        return int(self.line.fields.get("link", 0))


@dataclass
class Machine:
    """One machine as recorded."""

    name: str
    role: str
    model_id: str
    clock: str
    lines: Sequence[Line]
    moments: list[Moment] = field(default_factory=list)
    finding: Finding | None = None
    #: When its file's recording ended, if it did.
    ended: int | None = None

    @property
    def incarnation(self) -> int:
        """A sender's incarnation; 0: it never connected, or is a receiver."""
        last = self.moments[-1].after if self.moments else None
        return last.incarnation if isinstance(last, sending.SenderData) else 0

    def is_unseen(self, clock: str, time: int) -> bool:
        """Whether it may have acted by then without a record: its recording had ended, but not the machine."""
        if self.ended is None or (self.moments and self.moments[-1].state is State.CLOSED):
            return False
        return clock != self.clock or self.ended <= time

    def of(self, *whats: What) -> Iterator[Moment]:
        """Its moments of these kinds."""
        return (moment for moment in self.moments if moment.line.what in whats)


class _Broken(Exception):
    def __init__(self, what: str, allowed: tuple[str, ...] = ()) -> None:
        super().__init__(what)
        self.what = what
        self.allowed = allowed


def replay(machine: Machine) -> None:
    """Replay a machine's lines up to the first that is wrong, which becomes its finding."""
    player = _Player(machine)
    for number, line in enumerate(machine.lines):
        try:
            machine.moments.append(player.take(number, line))
        except _Broken as broken:
            machine.finding = Finding(line, broken.what, broken.allowed, "the machine's own steps")
            return
        except (ValueError, KeyError, TypeError) as error:
            what = f"it has a value that is not the protocol's: {error}"
            machine.finding = Finding(line, what, ("values as the recorder writes them",), "the machine's own steps")
            return


class _Player:
    def __init__(self, machine: Machine) -> None:
        self._half = HALVES[machine.role]
        self._role = machine.role
        self._state = INITIAL
        self._data: Data = self._half.data()
        self._links = 0
        self._time = 0
        self._reports = Reports()

    def take(self, number: int, line: Line) -> Moment:
        if line.fields.get("n") != number:
            raise _Broken(f"it is event {line.fields.get('n')} of its machine, but event {number} is missing before it")
        if (line.what is What.BORN) != (number == 0):
            raise _Broken("a machine begins once, with its birth")
        if line.fields.get("role") != self._role:
            raise _Broken(f"its machine is a {self._role}")
        if line.time < self._time:
            raise _Broken("it was written before the line that precedes it")
        self._time = line.time
        _require_fields(line)
        self._number_links(line)
        if self._reports.due is not None and line.what is not What.TOLD:
            raise _Broken(f"the caller got no report after {type(self._reports.due).__name__}", ("first its report",))
        state, data = self._state, self._data
        event, step = self._advance(line)
        expected = line.fields.get("message")
        message = None if expected is None else decoded(Message, expected)
        return Moment(line, data, self._data, state, self._state, event, step, message)

    def _number_links(self, line: Line) -> None:
        """Links are numbered as they are laid, and only laid links can be used."""
        link = line.fields.get("link")
        if line.what is What.LINK:
            self._links += 1
            if link != self._links:
                raise _Broken(f"link {link} is laid, but {self._links} is the next number")
        elif link is not None and not 1 <= link <= self._links:
            raise _Broken(f"link {link} was never laid")

    def _advance(self, line: Line) -> tuple[Any, Step | None]:
        match line.what:
            case What.STEP:
                event = decoded(self._half.event, line.fields["event"])
                return event, self._step(line, event)
            case What.REFUSED:
                event = decoded(self._half.event, line.fields["event"])
                self._refused(line, event)
                return event, None
            case What.TOLD:
                self._reported(line)
        return None, None

    def _step(self, line: Line, event: Any) -> Step:
        try:
            step = self._half.step(self._state, self._data, event)
        except WeightSyncError as error:
            raise _Broken(f"the model refuses this event: {error}", (possible(self._role, self._state),)) from error
        expected = {"input": step.input, "before": self._state, "after": step.to, "data": step.data}
        self._compare(line, {**expected, "effects": step.effects})
        self._state, self._data = step.to, step.data
        if isinstance(step.data, sending.SenderData):
            self._reports.step(event, step)
        return step

    def _refused(self, line: Line, event: Any) -> None:
        try:
            step = self._half.step(self._state, self._data, event)
        except WeightSyncError as error:
            expected = {"error": type(error).__name__, "before": self._state, "after": self._state, "data": self._data}
            self._compare(line, expected)
            return
        named = step.input.value if step.input else "LATE"
        raise _Broken(f"the model accepts this event, as {named}", (possible(self._role, self._state),))

    def _reported(self, line: Line) -> None:
        if not isinstance(self._data, sending.SenderData):
            raise _Broken("only senders report")
        try:
            self._compare(line, self._reports.expected(line.fields, self._data))
        except FalseReportError as error:
            raise _Broken(str(error)) from error

    def _compare(self, line: Line, wanted: dict[str, Any]) -> None:
        must = {name: plain(value) for name, value in wanted.items()}
        found = list(differences({name: line.fields.get(name) for name in must}, must))
        if found:
            raise _Broken("; ".join(found), (_allowed(must), possible(self._role, self._state)))


_FIELDS: dict[What, dict[str, type]] = {
    What.LINK: {"link": int, "delivery": str},
    What.SENT: {"link": int, "message": dict},
    What.RECEIVED: {"link": int, "message": dict},
    What.FAILED: {"link": int},
    What.CLOSED: {"link": int},
    What.TOLD: {"outcomes": dict, "superseded": dict, "not_caught_up": dict, "left": dict},
}


def _require_fields(line: Line) -> None:
    for name, kind in _FIELDS.get(line.what, {}).items():
        if type(line.fields.get(name)) is not kind:
            raise ValueError(f"its {name} is {line.fields.get(name)!r}")
    if line.what is What.LINK and line.fields["delivery"] not in Delivery.__members__:
        raise ValueError(f"there is no delivery {line.fields['delivery']}")
    if line.what is What.CLOSED and line.fields["role"] == "sender" and type(line.fields.get("incarnation")) is not int:
        raise ValueError("it has no incarnation")
    if line.what is What.LINK and line.fields["role"] == "sender" and type(line.fields.get("worker")) is not int:
        raise ValueError("it has no worker")


def _allowed(must: dict[str, Any]) -> str:
    if "outcomes" in must:
        return f"the report says {value(must['outcomes'])}"
    if "input" not in must:
        return f"this event changes nothing: {must['before']} stays" if "before" in must else "see what must be"
    return f"this event is {must['input'] or 'LATE'}, and leads to {must['after']}"
