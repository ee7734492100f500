"""Validates a protocol: no unknown or repeated names, no unreachable states, traps or dead rows.

Each complaint names its location in `protocol.toml`, e.g. ``sender.row 7 (ready, SEND)``: the seventh
``[[sender.row]]``, for the state `ready` in its `from`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol as Shape

from protocolgen.source import SAME, Protocol, Role, Row, SpecError

_LOWER = re.compile(r"[a-z][a-z_]*")
_UPPER = re.compile(r"[A-Z][A-Z_]*")
_CAMEL = re.compile(r"([A-Z][a-z]*)+")
#: Every message has these fields, so none lists them.
_COMMON_FIELDS = ("model_id", "incarnation")


class _Named(Shape):
    @property
    def place(self) -> str: ...
    @property
    def name(self) -> str: ...


def check(protocol: Protocol) -> None:
    """Validate a protocol.

    Args:
        protocol: as `source.read` returns it.

    Raises:
        SpecError: with all complaints. The graphs are checked only if all names are valid, so that one mistake is not
            reported many times.
    """
    for inspect in (_wrong_names, _wrong_graphs):
        complaints = list(inspect(protocol))
        if complaints:
            raise SpecError(complaints)


def _wrong_names(protocol: Protocol) -> Iterator[str]:
    yield from _misnamed(protocol.states, _LOWER)
    yield from _misnamed(protocol.kinds, _LOWER)
    yield from _misnamed(protocol.messages, _CAMEL)
    yield from _misnamed(protocol.refusals, _UPPER)
    yield from _misnamed(protocol.deliveries, _UPPER)
    yield from _misnamed(protocol.guarantees, _CAMEL)
    yield from _wrong_ends(protocol)
    for role in protocol.roles:
        yield from _misnamed(role.inputs, _UPPER)
        yield from _unknown_in_rows(protocol, role)
        yield from _repeated_rows(role)
    yield from _wrong_kinds(protocol)
    yield from _wrong_messages(protocol)
    yield from _same_deliveries(protocol)
    yield from _misnumbered_guarantees(protocol)


def _wrong_graphs(protocol: Protocol) -> Iterator[str]:
    for role in protocol.roles:
        yield from _leaving_final(protocol, role)
        yield from _unreachable(protocol, role)
        yield from _traps(protocol, role)
        yield from _dead_inputs(role)


def _misnamed(things: Iterable[_Named], shape: re.Pattern[str]) -> Iterator[str]:
    seen: dict[str, str] = {}
    for thing in things:
        if not shape.fullmatch(thing.name) or thing.name == SAME:
            yield f"{thing.place}: '{thing.name}' cannot be a name here (wanted: {shape.pattern})"
        if thing.name in seen:
            yield f"{thing.place} ({thing.name}): the name is taken by {seen[thing.name]}"
        seen.setdefault(thing.name, thing.place)


def _wrong_ends(protocol: Protocol) -> Iterator[str]:
    known = {state.name for state in protocol.states}
    for key, name in (("initial", protocol.initial), ("final", protocol.final)):
        if name not in known:
            yield f"protocol.{key}: unknown state '{name}'"


def _unknown_in_rows(protocol: Protocol, role: Role) -> Iterator[str]:
    states = {state.name for state in protocol.states}
    inputs = {each.name for each in role.inputs}
    for row in role.rows:
        for name in dict.fromkeys((row.source, row.target)):
            if name not in states:
                yield f"{row}: unknown state '{name}'"
        if row.input not in inputs:
            yield f"{row}: unknown input '{row.input}' of the {role.name}"


def _repeated_rows(role: Role) -> Iterator[str]:
    seen: dict[tuple[str, str], Row] = {}
    for row in role.rows:
        first = seen.setdefault((row.source, row.input), row)
        if first is not row:
            yield f"{row}: duplicate row, {first.place} has that state and input already"


def _wrong_kinds(protocol: Protocol) -> Iterator[str]:
    inputs = [each for role in protocol.roles for each in role.inputs]
    known = {kind.name for kind in protocol.kinds}
    for each in inputs:
        if each.kind not in known:
            yield f"{each.place} ({each.name}): unknown kind '{each.kind}'"
    for kind in protocol.kinds:
        if kind.name not in {each.kind for each in inputs}:
            yield f"{kind.place} ({kind.name}): no input is of this kind"


def _wrong_messages(protocol: Protocol) -> Iterator[str]:
    roles = {role.name for role in protocol.roles}
    for message in protocol.messages:
        label = f"{message.place} ({message.name})"
        for speaker in message.speakers:
            if speaker not in roles:
                yield f"{label}: unknown speaker '{speaker}'"
        for field in message.fields:
            if not _LOWER.fullmatch(field) or message.fields.count(field) > 1:
                yield f"{label}: the field '{field}' is listed twice, or cannot be a name"
            if field in _COMMON_FIELDS:
                yield f"{label}: every message has '{field}', so it is not listed"


def _same_deliveries(protocol: Protocol) -> Iterator[str]:
    seen: dict[tuple[bool, bool, bool], str] = {}
    for each in protocol.deliveries:
        promise = (each.reorders, each.duplicates, each.loses)
        if promise in seen:
            yield f"{each.place} ({each.name}): promises the same as {seen[promise]}"
        seen.setdefault(promise, each.name)


def _misnumbered_guarantees(protocol: Protocol) -> Iterator[str]:
    for number, each in enumerate(protocol.guarantees, start=1):
        if each.id != f"G{number}":
            yield f"{each.place} ({each.name}): its id is '{each.id}', wanted 'G{number}'"


def _leaving_final(protocol: Protocol, role: Role) -> Iterator[str]:
    for row in role.rows:
        if row.source == protocol.final != row.target:
            yield f"{row}: leaves the final state '{protocol.final}' for '{row.target}'"


def _unreachable(protocol: Protocol, role: Role) -> Iterator[str]:
    reached = _closure(protocol.initial, role.rows, lambda row: (row.source, row.target))
    for state in protocol.states:
        if state.name not in reached:
            yield f"{state.place} ({state.name}): unreachable, no rows of the {role.name} lead to it"
    for row in role.rows:
        if row.source not in reached:
            yield f"{row}: dead row, the {role.name} never is in '{row.source}'"


def _traps(protocol: Protocol, role: Role) -> Iterator[str]:
    ending = _closure(protocol.final, role.rows, lambda row: (row.target, row.source))
    for state in protocol.states:
        if state.name not in ending:
            yield f"{state.place} ({state.name}): a trap, the {role.name} cannot get to '{protocol.final}'"
    for row in role.rows:
        if row.source in ending and row.target not in ending:
            yield f"{row}: leads into the trap '{row.target}'"


def _dead_inputs(role: Role) -> Iterator[str]:
    used = {row.input for row in role.rows}
    for each in role.inputs:
        if each.name not in used:
            yield f"{each.place} ({each.name}): dead input, no row of the {role.name} uses it"


def _closure(start: str, rows: Iterable[Row], arrow: Callable[[Row], tuple[str, str]]) -> set[str]:
    """The states that can be reached from one state, including itself."""
    arrows = [arrow(row) for row in rows]
    reached, frontier = {start}, {start}
    while frontier:
        frontier = {end for begin, end in arrows if begin in frontier} - reached
        reached |= frontier
    return reached
