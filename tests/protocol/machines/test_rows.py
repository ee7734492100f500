"""A machine changes state by the rows of `protocol.toml` and in no other way: every state and every input."""

from __future__ import annotations

import pytest
import transitions

from weightsync import WeightReceiver, WeightSender
from weightsync.errors import StateError
from weightsync.protocol._tables import RECEIVER_ROWS, SENDER_ROWS, ReceiverInput, SenderInput, State
from weightsync.protocol.machine import (
    LeanEvent,
    ReceiverMachine,
    SenderMachine,
    allowed_in,
    method_of,
    next_state,
    refusal,
)


class Model:
    """The object whose state a stock machine of the library `transitions` changes."""

    state: State


def test_the_generated_rows_equal_those_in_protocol_toml(role):
    rows = {"sender": SENDER_ROWS, "receiver": RECEIVER_ROWS}[role.name]

    assert role.rows == dict(rows)


def test_firing_an_input_changes_the_state_as_protocol_toml_says(row):
    role, state, step = row
    machine = role.at(state)
    steps = []
    machine.observe(lambda *arguments: steps.append(arguments))

    wanted = role.rows[state, step]
    assert machine.fire(step) is wanted
    assert machine.state is wanted
    assert steps == [(state, step, wanted)]


def test_an_input_without_a_row_raises_state_error_and_changes_nothing(gap):
    role, state, step = gap
    machine = role.at(state)
    steps = []
    machine.observe(lambda *arguments: steps.append(arguments))

    with pytest.raises(StateError):
        machine.fire(step)
    assert machine.state is state
    assert steps == []


def test_a_state_error_names_the_machine_the_state_the_call_and_the_allowed_methods(gap):
    role, state, step = gap
    with pytest.raises(StateError) as caught:
        role.at(state).fire(step)

    error = caught.value
    assert (error.machine, error.state, error.asked) == (role.name, state.value, method_of(step))
    assert error.allowed == allowed_in(role.rows, state, type(step))


def test_the_text_of_a_state_error_names_public_methods_and_no_other_inputs(gap):
    role, state, step = gap
    with pytest.raises(StateError) as caught:
        role.at(state).fire(step)

    inputs = {each.value for each in type(step)}
    assert not inputs & {word.strip("().,:") for word in str(caught.value).split()} - {step.value}
    owner = WeightSender if isinstance(step, SenderInput) else WeightReceiver
    assert all(callable(getattr(owner, method)) for method in caught.value.allowed)


def test_a_state_error_has_the_last_eight_steps(row):
    role, state, step = row
    machine = role.at(state)
    for _ in range(9):
        machine._state = state
        machine.fire(step)
    machine._state = State.CLOSED
    with pytest.raises(StateError) as caught:
        machine.fire(type(step).CONNECT)

    assert caught.value.steps == ((step.value, state.value, role.rows[state, step].value),) * 8


def test_every_row_still_works_after_a_state_error(gap):
    role, state, step = gap
    for allowed in (each for source, each in role.rows if source is state):
        machine = role.at(state)
        with pytest.raises(StateError):
            machine.fire(step)

        assert machine.fire(allowed) is role.rows[state, allowed]


def test_a_stock_transitions_machine_takes_the_same_steps(pair):
    role, state, step = pair
    lean = role.at(state)
    model = Model()
    stock = transitions.Machine(
        model=model,
        states=State,
        initial=state,
        auto_transitions=False,
        transitions=[
            {"trigger": event.name, "source": each.source, "dest": each.dest}
            for event in lean.shared.events.values()
            for each in lean.shared.get_transitions(event.name)
        ],
    )
    assert type(next(iter(stock.events.values()))) is transitions.Event

    try:
        model.trigger(step.value)
        expected = model.state
    except transitions.MachineError:
        expected = None
    try:
        found = lean.fire(step)
    except StateError:
        found = None

    assert expected is found
    assert model.state is lean.state


def test_next_state_returns_the_same_state_as_the_machine(row):
    role, state, step = row
    machine = role.at(state)

    assert next_state(machine.rows, state, step) is machine.fire(step)


def test_next_state_raises_the_same_error_as_the_machine(gap):
    role, state, step = gap
    machine = role.at(state)

    with pytest.raises(StateError) as by_machine:
        machine.fire(step)
    with pytest.raises(StateError) as by_next_state:
        next_state(machine.rows, state, step)
    assert str(by_machine.value) == str(by_next_state.value)


def test_every_input_is_a_lean_event_without_callbacks(role):
    shared = role.machine().shared

    assert list(shared.events) == [step.value for step in role.inputs]
    assert all(type(event) is LeanEvent for event in shared.events.values())
    assert not any(each.before or each.after or each.conditions or each.prepare for each in shared.get_transitions())


def test_a_machine_starts_uninitialized(role):
    assert role.machine().state is State.UNINITIALIZED


def test_the_state_cannot_be_set_from_outside(role, state):
    machine = role.at(state)

    with pytest.raises(AttributeError):
        machine.state = State.READY
    with pytest.raises(AttributeError):
        machine.shared.set_state(State.READY, machine)
    with pytest.raises(AttributeError):
        machine.to_ready()
    assert machine.state is state


def test_an_event_of_the_transitions_library_can_be_triggered_by_name():
    machine = SenderMachine()

    assert machine.shared.events["CONNECT"].trigger(machine) is True
    assert machine.state is State.READY
    with pytest.raises(StateError):
        machine.shared.events["CONNECT"].trigger(machine)


@pytest.mark.parametrize("model", [ReceiverMachine(), Model()], ids=["other role", "no machine"])
def test_an_event_refuses_a_model_that_is_not_a_machine_of_its_role(model):
    with pytest.raises(TypeError, match="CONNECT"):
        SenderMachine.shared.events["CONNECT"].trigger(model)


def test_an_event_takes_no_arguments():
    machine = SenderMachine()

    with pytest.raises(TypeError, match="CONNECT"):
        machine.shared.events["CONNECT"].trigger(machine, "anything")
    assert machine.state is State.UNINITIALIZED


def test_an_input_of_the_other_role_raises_key_error():
    machine = SenderMachine()

    with pytest.raises(KeyError):
        machine.fire(ReceiverInput.CONNECT)
    assert machine.state is State.UNINITIALIZED
    assert SenderInput.CONNECT != ReceiverInput.CONNECT


def test_the_error_of_a_refused_call_lists_the_allowed_methods_and_contains_the_hint() -> None:
    assert allowed_in(SenderMachine.rows, State.CLOSED, SenderInput) == ("close",)
    assert allowed_in(SenderMachine.rows, State.READY, SenderInput)[-1] == "poll"
    assert (method_of(ReceiverInput.CLOSE), method_of(ReceiverInput.ANSWERED)) == ("close", "an event ANSWERED")
    error = refusal(SenderMachine.rows, State.READY, SenderInput, "wait_async", hint="Call send_async() first.")
    assert "Call send_async() first." in str(error)
