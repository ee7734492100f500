"""Replays one machine's lines, and its reports, through the shipped pure halves, and requires the same steps."""

from __future__ import annotations

import enum
import functools
import types
import typing
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from msgspec import Struct

from weightsync.engine.recorder import LineKind, plain
from weightsync.errors import WeightSyncError
from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending
from weightsync.protocol._tables import INITIAL, Delivery, State
from weightsync.protocol.machine import Role
from weightsync.protocol.messages import Message
from weightsync.protocol.report import Outcome, OutcomeKind
from weightsync.verify.lines import Finding, Line
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
    Role.SENDER: Half(sending.step, sending.SenderData, sending.Event),
    Role.RECEIVER: Half(receiving.step, receiving.ReceiverData, receiving.Event),
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
    #: The step that the pure half took for the event; None if it refused, or there was no event.
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
    role: Role
    model_id: str
    clock: str
    lines: Sequence[Line]
    moments: list[Moment] = field(default_factory=list)
    finding: Finding | None = None
    #: When its file's recording ended, if it did.
    ended: int | None = None

    @property
    def incarnation(self) -> int:
        """A sender's incarnation; 0 if it never connected, or is a receiver."""
        last = self.moments[-1].after if self.moments else None
        return last.incarnation if isinstance(last, sending.SenderData) else 0

    def is_unseen(self, clock: str, time: int) -> bool:
        """Whether it may have acted by then without a record: its recording had ended, but the machine had not."""
        if self.ended is None or (self.moments and self.moments[-1].state is State.CLOSED):
            return False
        return clock != self.clock or self.ended <= time

    def of(self, *whats: LineKind) -> Iterator[Moment]:
        """Its moments of these kinds."""
        return (moment for moment in self.moments if moment.line.what in whats)

    @cached_property
    def workers(self) -> dict[int, list[int]]:
        """A sender's links, and the workers that each was created for. Read once all lines are replayed."""
        workers: dict[int, list[int]] = defaultdict(list)
        for moment in self.of(LineKind.LINK):
            workers[moment.link].append(moment.line.fields["worker"])
        return workers

    @cached_property
    def applied(self) -> dict[tuple[int, int], int]:
        """When a receiver applied each version first, by incarnation and version. Read once all lines are replayed."""
        applied: dict[tuple[int, int], int] = {}
        for moment in self.of(LineKind.STEP):
            data = moment.after
            assert isinstance(data, receiving.ReceiverData)
            if isinstance(moment.event, receiving.Applied | receiving.Defer) and data.served is not None:
                applied.setdefault(data.served, moment.line.time)
        return applied


class _WrongLine(Exception):
    def __init__(self, what: str, allowed: tuple[str, ...] = ()) -> None:
        super().__init__(what)
        self.what = what
        self.allowed = allowed


def replay(machine: Machine) -> None:
    """Replay a machine's lines up to the first that is wrong, which becomes its finding."""
    player = _LineReplayer(machine)
    for number, line in enumerate(machine.lines):
        try:
            machine.moments.append(player.take(number, line))
        except _WrongLine as broken:
            machine.finding = Finding(line, broken.what, broken.allowed, "the machine's own steps")
            return
        except (ValueError, KeyError, TypeError) as error:
            what = f"it has a value that is not the protocol's: {error}"
            machine.finding = Finding(line, what, ("values as the recorder writes them",), "the machine's own steps")
            return


class _LineReplayer:
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
            raise _WrongLine(
                f"it is event {line.fields.get('n')} of its machine, but event {number} is missing before it"
            )
        if (line.what is LineKind.BORN) != (number == 0):
            raise _WrongLine("a machine begins once, with its birth")
        if line.fields.get("role") != self._role:
            raise _WrongLine(f"its machine is a {self._role}")
        if line.time < self._time:
            raise _WrongLine("it was written before the line that precedes it")
        self._time = line.time
        _require_fields(line)
        self._number_links(line)
        if self._reports.due is not None and line.what is not LineKind.REPORTED:
            raise _WrongLine(
                f"the caller got no report after {type(self._reports.due).__name__}", ("first its report",)
            )
        state, data = self._state, self._data
        event, step = self._advance(line)
        expected = line.fields.get("message")
        message = None if expected is None else decoded(Message, expected)
        return Moment(line, data, self._data, state, self._state, event, step, message)

    def _number_links(self, line: Line) -> None:
        """Links are numbered as they are created, and only created links can be used."""
        link = line.fields.get("link")
        if line.what is LineKind.LINK:
            self._links += 1
            if link != self._links:
                raise _WrongLine(f"link {link} is created, but {self._links} is the next number")
        elif link is not None and not 1 <= link <= self._links:
            raise _WrongLine(f"link {link} was never created")

    def _advance(self, line: Line) -> tuple[Any, Step | None]:
        match line.what:
            case LineKind.STEP:
                event = decoded(self._half.event, line.fields["event"])
                return event, self._step(line, event)
            case LineKind.REFUSED:
                event = decoded(self._half.event, line.fields["event"])
                self._check_refusal(line, event)
                return event, None
            case LineKind.REPORTED:
                self._check_report(line)
        return None, None

    def _step(self, line: Line, event: Any) -> Step:
        try:
            step = self._half.step(self._state, self._data, event)
        except WeightSyncError as error:
            raise _WrongLine(f"the model refuses this event: {error}", (possible(self._role, self._state),)) from error
        expected = {"input": step.input, "before": self._state, "after": step.to, "data": step.data}
        self._compare(line, {**expected, "effects": step.effects})
        self._state, self._data = step.to, step.data
        if isinstance(step.data, sending.SenderData):
            self._reports.step(event, step)
        return step

    def _check_refusal(self, line: Line, event: Any) -> None:
        try:
            step = self._half.step(self._state, self._data, event)
        except WeightSyncError as error:
            expected = {"error": type(error).__name__, "before": self._state, "after": self._state, "data": self._data}
            self._compare(line, expected)
            return
        named = step.input.value if step.input else "LATE"
        raise _WrongLine(f"the model accepts this event, as {named}", (possible(self._role, self._state),))

    def _check_report(self, line: Line) -> None:
        if not isinstance(self._data, sending.SenderData):
            raise _WrongLine("only senders report")
        try:
            self._compare(line, self._reports.expected(line.fields, self._data))
        except FalseReportError as error:
            raise _WrongLine(str(error)) from error

    def _compare(self, line: Line, wanted: dict[str, Any]) -> None:
        must = {name: plain(value) for name, value in wanted.items()}
        found = list(differences({name: line.fields.get(name) for name in must}, must))
        if found:
            raise _WrongLine("; ".join(found), (_describe_allowed(must), possible(self._role, self._state)))


_FIELDS: dict[LineKind, dict[str, type]] = {
    LineKind.LINK: {"link": int, "delivery": str},
    LineKind.SENT: {"link": int, "message": dict},
    LineKind.RECEIVED: {"link": int, "message": dict},
    LineKind.FAILED: {"link": int},
    LineKind.CLOSED: {"link": int},
    LineKind.REPORTED: {"outcomes": dict, "superseded": dict, "not_caught_up": dict, "left": dict},
}


def _require_fields(line: Line) -> None:
    for name, kind in _FIELDS.get(line.what, {}).items():
        if type(line.fields.get(name)) is not kind:
            raise ValueError(f"its {name} is {line.fields.get(name)!r}")
    if line.what is LineKind.LINK and line.fields["delivery"] not in Delivery.__members__:
        raise ValueError(f"there is no delivery {line.fields['delivery']}")
    if (
        line.what is LineKind.CLOSED
        and line.fields["role"] == Role.SENDER
        and type(line.fields.get("incarnation")) is not int
    ):
        raise ValueError("it has no incarnation")
    if line.what is LineKind.LINK and line.fields["role"] == Role.SENDER and type(line.fields.get("worker")) is not int:
        raise ValueError("it has no worker")


def _describe_allowed(must: dict[str, Any]) -> str:
    if "outcomes" in must:
        return f"the report says {value(must['outcomes'])}"
    if "input" not in must:
        return f"this event changes nothing: {must['before']} stays" if "before" in must else "see what must be"
    return f"this event is {must['input'] or 'LATE'}, and leads to {must['after']}"


def decoded(kind: Any, recorded: Any) -> Any:
    """The value of type ``kind`` that ``recorded`` encodes. Raises ValueError: it encodes no such value."""
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return _decode_union(typing.get_args(kind), recorded)
    if origin is tuple:
        return _decode_tuple(typing.get_args(kind)[0], recorded)
    if origin is not None and issubclass(origin, Mapping):
        return _decode_mapping(typing.get_args(kind)[1], recorded)
    if isinstance(kind, type) and issubclass(kind, Struct):
        return _decode_record(kind, recorded)
    return _decode_scalar(kind, recorded)


def _decode_scalar(kind: Any, recorded: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        if recorded not in kind.__members__:
            raise ValueError(f"{recorded!r} is not a {kind.__name__}")
        return kind[recorded]
    if kind is bytes and isinstance(recorded, str):
        return bytes.fromhex(recorded)
    if kind is float and type(recorded) in (int, float):
        return recorded
    if kind in (int, str, bool) and type(recorded) is kind:
        return recorded
    raise ValueError(f"{recorded!r} encodes no {getattr(kind, '__name__', kind)}")


def _decode_union(kinds: tuple[Any, ...], recorded: Any) -> Any:
    if recorded is None and types.NoneType in kinds:
        return None
    rest = [kind for kind in kinds if kind is not types.NoneType]
    if len(rest) == 1:
        return decoded(rest[0], recorded)
    named = recorded.get("is") if isinstance(recorded, dict) else None
    for kind in rest:
        if kind.__name__ == named:
            return decoded(kind, recorded)
    raise ValueError(f"{named!r} is none of {', '.join(kind.__name__ for kind in rest)}")


def _decode_tuple(kind: Any, recorded: Any) -> tuple[Any, ...]:
    """Decode a tuple; all tuples of events and messages have one element type and any length."""
    if not isinstance(recorded, list):
        raise ValueError(f"{recorded!r} is not a list")
    return tuple(decoded(kind, each) for each in recorded)


def _decode_mapping(kind: Any, recorded: Any) -> dict[int, Any]:
    if not isinstance(recorded, dict):
        raise ValueError(f"{recorded!r} is not a mapping")
    return {int(key): decoded(kind, each) for key, each in recorded.items()}


def _decode_record(kind: type, recorded: Any) -> Any:
    if not isinstance(recorded, dict) or recorded.get("is") != kind.__name__:
        raise ValueError(f"{recorded!r} is not a {kind.__name__}")
    hints = _hints(kind)
    unknown = set(recorded) - set(hints) - {"is"}
    if unknown:
        raise ValueError(f"a {kind.__name__} has no {', '.join(sorted(unknown))}")
    try:
        return kind(**{name: decoded(hints[name], each) for name, each in recorded.items() if name != "is"})
    except TypeError as error:
        raise ValueError(f"a {kind.__name__} is incomplete: {error}") from error


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


class FalseReportError(ValueError):
    """A report has contents that it cannot have."""


@dataclass
class Reports:
    """One sender's reports: which versions ended without a report, and what a report may say now."""

    _over: dict[int, sending.Conclude] = field(default_factory=dict)
    #: For each worker, the versions that were given up before it answered.
    _abandoned: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    #: The event that ended a caller's wait or its update; the next line must be its report.
    _due: object = None

    @property
    def due(self) -> object:
        """The event that must be reported now, or None."""
        return self._due

    def step(self, event: object, step: sending.Step) -> None:
        """Follow a step."""
        ends = isinstance(event, sending.Deadline | sending.Abandon) and step.input is not None
        self._due = event if ends else None
        for effect in step.effects:
            if isinstance(effect, sending.Conclude):
                self._conclude(effect)

    def _conclude(self, effect: sending.Conclude) -> None:
        out = effect.outstanding
        self._over[out.version] = effect
        for worker, outcome in out.outcomes.items():
            if outcome.kind is OutcomeKind.ABANDONED:
                self._abandoned[worker].add(out.version)

    def expected(self, recorded: Mapping[str, Any], data: sending.SenderData) -> dict[str, object]:
        """The contents that a report of this version must have.

        Raises FalseReportError: this version cannot be reported now.
        """
        outcomes = decoded(Mapping[int, Outcome], recorded["outcomes"])
        superseded = decoded(Mapping[int, tuple[int, ...]], recorded["superseded"])
        version, timed_out = recorded["version"], isinstance(self._due, sending.Deadline)
        self._due = None
        must: dict[str, object] = {"incarnation": data.incarnation, "not_caught_up": {}}
        if version is None:
            return must | {"outcomes": _ended_outcomes(outcomes, data), "superseded": {}, "left": {}}
        must["superseded"] = self._given_up(superseded, outcomes)
        over, out = self._over.pop(version, None), data.outstanding
        if over is not None:
            return must | {
                "outcomes": over.outstanding.outcomes,
                "not_caught_up": over.not_caught_up,
                "left": over.left,
            }
        if out is None or out.version != version:
            raise FalseReportError(f"version {version} is not outstanding, and no caller waits for its report")
        kind = OutcomeKind.TIMED_OUT if timed_out else OutcomeKind.PENDING
        owing = {worker: Outcome(kind=kind, reason=_reason(outcomes, worker, kind)) for worker in out.owed}
        return must | {"outcomes": {**out.outcomes, **owing}, "left": data.left}

    def _given_up(
        self, superseded: Mapping[int, tuple[int, ...]], outcomes: Mapping[int, Outcome]
    ) -> dict[int, tuple[int, ...]]:
        """The versions in ``superseded`` that were indeed given up in favour of this one."""
        known = {
            worker: tuple(v for v in versions if v in self._abandoned[worker])
            for worker, versions in superseded.items()
        }
        return {worker: versions for worker, versions in known.items() if versions and worker in outcomes}


def _reason(outcomes: Mapping[int, Outcome], worker: int, kind: OutcomeKind) -> str:
    """The reason of a LATE outcome is free text; every other reason is fixed."""
    outcome = outcomes.get(worker)
    return outcome.reason if outcome is not None and kind is OutcomeKind.TIMED_OUT else ""


def _ended_outcomes(outcomes: Mapping[int, Outcome], data: sending.SenderData) -> dict[int, Outcome]:
    """The outcomes of a send that was refused because no target has a link."""
    return {
        worker: sending.ended(entry) for worker, entry in data.workers.items() if worker in outcomes and not entry.open
    }
