"""The exact texts of the machines' errors, and the tables that the library `transitions` gets."""

from __future__ import annotations

import pytest

from weightsync.errors import StateError
from weightsync.protocol._tables import INITIAL, RECEIVER_ROWS, SENDER_ROWS, ReceiverInput, SenderInput, State
from weightsync.protocol.machine import LeanEvent, ReceiverMachine, SenderMachine, next_state


def test_the_error_of_a_refused_call_names_the_method_the_state_and_the_allowed_methods() -> None:
    for refuse in (lambda: SenderMachine().fire(SenderInput.SEND), lambda: look_up_in_table(SenderInput.SEND)):
        with pytest.raises(StateError) as caught:
            refuse()
        assert str(caught.value) == (
            "send(): the sender is uninitialized and allows connect(), add_worker(), remove_worker(), close(), poll(). "
            "Nothing has changed."
        )
        assert (caught.value.machine, caught.value.state, caught.value.asked) == ("sender", "uninitialized", "send")
        assert caught.value.allowed == ("connect", "add_worker", "remove_worker", "close", "poll")


def look_up_in_table(asked: SenderInput) -> State:
    return next_state(SENDER_ROWS, State.UNINITIALIZED, asked)


def test_the_error_of_a_receiver_calls_it_a_receiver() -> None:
    with pytest.raises(StateError, match="an event APPLIED: the receiver is uninitialized"):
        ReceiverMachine().fire(ReceiverInput.APPLIED)


@pytest.mark.parametrize(("machine", "rows"), [(SenderMachine, SENDER_ROWS), (ReceiverMachine, RECEIVER_ROWS)])
def test_the_shared_transitions_machine_has_exactly_the_rows_of_the_table(machine: type, rows: dict) -> None:
    shared = machine.shared
    found = {
        (State[transition.source], name): State[transition.dest]
        for name, event in shared.events.items()
        for transitions in event.transitions.values()
        for transition in transitions
    }

    assert found == {(state, each.value): to for (state, each), to in rows.items()}
    assert [State[name] for name in shared.states] == list(State)
    assert shared.initial == INITIAL.name
    assert (shared.models, shared.auto_transitions, shared.ignore_invalid_triggers) == ([], False, False)
    assert all(type(event) is LeanEvent for event in shared.events.values())


@pytest.mark.parametrize("arguments", [((), {"x": 1}), ((1,), {})])
def test_a_trigger_takes_no_arguments(arguments: tuple) -> None:
    machine = SenderMachine()
    event = machine.shared.events["CONNECT"]
    with pytest.raises(TypeError) as caught:
        event.trigger(machine, *arguments[0], **arguments[1])

    assert str(caught.value) == "CONNECT takes a machine of its own role and no arguments"
    assert machine.state is State.UNINITIALIZED


def test_a_trigger_takes_a_machine_of_its_own_role_only() -> None:
    event = SenderMachine.shared.events["CONNECT"]
    for other in (ReceiverMachine(), object()):
        with pytest.raises(TypeError, match="a machine of its own role"):
            event.trigger(other)
    machine = SenderMachine()

    assert event.trigger(machine) is True
    assert machine.state is State.READY


def test_the_error_of_a_listener_that_fires_names_the_input_and_the_machine_stays_usable() -> None:
    machine, seen = SenderMachine(), []

    def fires(*_: object) -> None:
        seen.append(machine.state)
        if len(seen) == 1:
            machine.fire(SenderInput.CLOSE)

    machine.observe(fires)
    with pytest.raises(RuntimeError) as caught:
        machine.fire(SenderInput.CONNECT)

    assert str(caught.value) == "a listener fired CLOSE: listeners must not call fire()"
    assert machine.state is State.READY
    assert machine.fire(SenderInput.CLOSE) is State.CLOSED
    assert seen == [State.READY, State.CLOSED]


def test_repr_shows_the_class_and_the_state() -> None:
    assert repr(SenderMachine()) == "<SenderMachine: uninitialized>"
