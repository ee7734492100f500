"""The pure halves and the machines used at run time agree on each step and each refusal: both use one table.

Every value that a sender or receiver has in the small graphs is combined with every event, including events that no
correct network delivers. Each (state, input) that occurs is driven on both.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import pytest
from configurations import SMALL
from graph_support import explored
from refusing import receiver_events, sender_events

from weightsync.errors import ConfigurationError, ProtocolError, StateError, SyncError
from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending
from weightsync.protocol._tables import RECEIVER_ROWS, SENDER_ROWS, ReceiverInput, SenderInput, State
from weightsync.protocol.machine import ReceiverMachine, SenderMachine, next_state
from weightsync.protocol.sender import name as sender_name

#: The errors that guards raise, whatever the row.
GUARD_ERRORS = (ConfigurationError, SyncError, ProtocolError)
#: Graphs that together take every row.
GRAPHS = (
    "two versions",
    "crashes",
    "losses",
    "ends",
    "one of two leaves",
    "one of two is removed",
    "deferred answers",
    "deferred answers, copies",
)
_BEFORE, _READY, _PENDING, _AWAITING, _CLOSED = State
#: Inputs that no event becomes in these states, which have no row for them: there it becomes another input, or is LATE.
UNREACHABLE_INPUTS = {
    "sender": {
        **{name: {_BEFORE, _CLOSED} for name in ("ARRIVED", "CAUGHT_UP", "LEFT", "LOST")},
        **{name: {_BEFORE, _READY, _PENDING, _CLOSED} for name in ("DEADLINE", "INTERRUPTED", "SETTLED")},
        "REPLY": {_BEFORE, _READY, _CLOSED},
        "STALE": {_CLOSED},
        "WAIT_SETTLED": {_BEFORE, _READY, _AWAITING, _CLOSED},
    },
    "receiver": {
        "CONNECT": {_READY, _PENDING, _AWAITING, _CLOSED},
        **{name: {_BEFORE, _CLOSED} for name in ("DUPLICATE", "STALE")},
        **{name: {_CLOSED} for name in ("LINK_DOWN", "SEND_ACK")},
        "NEWER": {_BEFORE, _READY, _AWAITING, _CLOSED},
        "TAKEOVER": {_BEFORE},
        "UPDATE": {_PENDING},
    },
}


class Half(NamedTuple):
    """A role: its pure half, and the machine that is used at run time."""

    name: Any
    step: Any
    machine: Any
    inputs: Any
    values: Any
    events: Any


def drive(half, state, data, event):
    """Take an event on both.

    Returns the row (state, input) and whether it was taken; None if the event is LATE or a guard refused it.
    """
    named = result_or_error(half.name, state, data, event)
    step = result_or_error(half.step, state, data, event)
    if named is None or isinstance(named, Exception) or isinstance(step, GUARD_ERRORS):
        return None
    moving = half.machine()
    moving._state = state
    if isinstance(step, StateError):
        with pytest.raises(StateError) as other:
            moving.fire(named)
        words = ("machine", "state", "asked", "allowed")
        assert [getattr(other.value, word) for word in words] == [getattr(step, word) for word in words]
        assert moving.state is state
        return state, named, False
    assert step.input is named
    assert moving.fire(named) is step.to is moving.state
    return state, named, True


def result_or_error(call, state, data, event):
    """The result of a pure function, or the error by which it refuses."""
    try:
        return call(state, data, event)
    except (*GUARD_ERRORS, StateError) as refused:
        return refused


@cache
def driven(role):
    """All (state, input) that were driven on both halves of a role, each with whether it was taken."""
    half, found, known = HALVES[role], set(), set()
    for name in GRAPHS:
        for state, data in half.values(name):
            for event in half.events(SMALL[name]):
                key = (state, type(event), str(result_or_error(half.name, state, data, event)))
                if key not in known and (row := drive(half, state, data, event)):
                    known.add(key)
                    found.add(row)
    return found


def _sender_values(name):
    return {(t.state, t.data) for world in explored(name)[1] for t in world.trainers if t.life == "alive"}


def _receiver_values(name):
    return {(w.state, w.data) for world in explored(name)[1] for w in world.workers}


HALVES = {
    "sender": Half(sender_name, sending.step, SenderMachine, SenderInput, _sender_values, sender_events),
    "receiver": Half(receiving.name, receiving.step, ReceiverMachine, ReceiverInput, _receiver_values, receiver_events),
}


@pytest.mark.parametrize(("role", "rows"), [("sender", SENDER_ROWS), ("receiver", RECEIVER_ROWS)])
def test_every_row_is_taken_by_the_pure_half_and_the_machine_alike(role, rows):
    assert {(state, named) for state, named, taken in driven(role) if taken} == set(rows)


@pytest.mark.parametrize(("role", "rows"), [("sender", SENDER_ROWS), ("receiver", RECEIVER_ROWS)])
def test_an_input_without_a_row_is_refused_by_the_pure_half_and_the_machine_alike(role, rows):
    inputs, machine = HALVES[role].inputs, HALVES[role].machine
    gaps = {(state, named) for state in State for named in inputs} - set(rows)
    refused = {(state, named) for state, named, taken in driven(role) if not taken}

    unnamed = {(state, inputs[name]) for name, states in UNREACHABLE_INPUTS[role].items() for state in states}
    assert refused == gaps - unnamed
    for state, named in unnamed:
        moving = machine()
        moving._state = state
        with pytest.raises(StateError):
            next_state(rows, state, named)  # by this function the pure halves look up rows
        with pytest.raises(StateError):
            moving.fire(named)
