"""An event that a machine may not take is refused by the documented error, and changes nothing.

Each value that a sender or receiver has anywhere in the small graphs is combined with every call and every event,
including those that no correct network delivers. The required answers are those of `refusing`, which is written from
spec/README.md and not from the code.
"""

from __future__ import annotations

import copy
from collections import Counter
from functools import cache

import pytest
import torch
from configurations import SMALL
from graph_support import ASKED, explored
from msgspec.structs import replace
from refusing import (
    effects_of_late_event,
    receiver_events,
    required_answer_of_receiver,
    required_answer_of_sender,
    sender_events,
)

from weightsync import MultiProcessWeightSyncScheme
from weightsync.engine.receiver_driver import ReceiverDriver
from weightsync.engine.sender_driver import SenderDriver
from weightsync.errors import ConfigurationError, ProtocolError, StateError, WorkerLostError
from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending
from weightsync.protocol._tables import ReceiverInput, SenderInput, State

names = pytest.mark.parametrize("name", ASKED)


@cache
def sender_values(name):
    """The values (state, data) of all living senders, each once."""
    _, worlds = explored(name)
    return {(t.state, t.data): None for world in worlds for t in world.trainers if t.life == "alive"}.keys()


@cache
def receiver_values(name):
    """The values (state, data) of all receivers, each once."""
    _, worlds = explored(name)
    return {(w.state, w.data): None for world in worlds for w in world.workers}.keys()


def _step_or_error(step, state, data, event):
    """The step that the shipped code returns, or the type of the error that it raises."""
    try:
        return step(state, data, event)
    except Exception as error:  # noqa: BLE001 - the caller compares its type
        return type(error)


def _compared(step, late, values, due_of, events):
    """Compare the shipped answers with the required ones. Returns how often each answer was required."""
    required_counts = Counter()
    for state, data in values:
        before = copy.deepcopy(data)
        for event in events:
            due, said = due_of(state, data, event), _step_or_error(step, state, data, event)
            if due is None:
                assert said == late(state, data, event), (state, data, event)
            elif isinstance(due, type):
                assert said is due, (state, data, event)
            else:
                assert said.input is due, (state, data, event)
            required_counts[due] += 1
        assert data == before, (state, before)
    return required_counts


@names
def test_a_sender_takes_or_refuses_each_event_as_the_specification_says(name):
    def late(state, data, _):
        return sending.Step(None, state, replace(data, late=data.late + 1))

    due = _compared(sending.step, late, sender_values(name), required_answer_of_sender, sender_events(SMALL[name]))
    assert {None, StateError, ConfigurationError, SenderInput.STALE, SenderInput.SETTLED} <= set(due)


@names
def test_a_receiver_takes_or_refuses_each_event_as_the_specification_says(name):
    def late(state, data, event):
        return receiving.Step(None, state, data, effects_of_late_event(data, event))

    due = _compared(
        receiving.step, late, receiver_values(name), required_answer_of_receiver, receiver_events(SMALL[name])
    )
    assert {None, StateError, ProtocolError, ReceiverInput.TAKEOVER, ReceiverInput.APPLIED} <= set(due)


def test_worker_lost_error_is_required_in_some_state_of_the_losses_graph():
    events = sender_events(SMALL["losses"])
    due = {required_answer_of_sender(*value, event) for value in sender_values("losses") for event in events}
    assert WorkerLostError in due


# ------------------------------------------------------------------------------------------------ drivers


@names
def test_a_sender_driver_raises_the_specified_error_and_changes_nothing(name):
    events = sender_events(SMALL[name])
    driver = SenderDriver("policy")
    for state, data in sender_values(name):
        refused = [event for event in events if isinstance(required_answer_of_sender(state, data, event), type)]
        _set_state(driver, state, data)
        for event in refused:
            with pytest.raises(required_answer_of_sender(state, data, event)):
                driver.take(event)
        assert (driver.machine.state, driver.data) == (state, data)
        assert (list(driver._todo), driver.concluded, driver.links()) == ([], {}, [])
    driver.waker.close()


@names
def test_a_receiver_driver_raises_the_specified_error_and_changes_nothing(name):
    events = receiver_events(SMALL[name])
    driver = ReceiverDriver("policy")
    for state, data in receiver_values(name):
        refused = [event for event in events if isinstance(required_answer_of_receiver(state, data, event), type)]
        _set_state(driver, state, data)
        for event in refused:
            with pytest.raises(required_answer_of_receiver(state, data, event)):
                driver.take(event)
        assert (driver.machine.state, driver.data) == (state, data)
        assert (list(driver._todo), driver.pending, driver.ended) == ([], None, "")
    driver.waker.close()


def _set_state(driver, state, data):
    """Put a driver into the state of a node of the graph."""
    driver.machine._state, driver.data = state, data


#: Public calls, and the event that each becomes.
_CALLS = {
    "send": (lambda sender: sender.send(WEIGHTS, timeout=0), sending.Send(None)),
    "send to one": (lambda sender: sender.send(WEIGHTS, 1, timeout=0), sending.Send((1,))),
    "send to no workers": (lambda sender: sender.send(WEIGHTS, []), sending.Send(())),
    "send to an unknown worker": (lambda sender: sender.send(WEIGHTS, [9]), sending.Send((9,))),
    "send_async": (lambda sender: sender.send_async(WEIGHTS), sending.SendAsync(None)),
    "wait_async": (lambda sender: sender.wait_async(timeout=0), sending.Wait()),
    "abandon": (lambda sender: sender.abandon(), sending.Abandon()),
    "connect": (lambda sender: sender.connect(), sending.Connect(1)),
    "remove an unknown worker": (lambda sender: sender.remove_worker(9), sending.Remove(9)),
}
WEIGHTS = {"weight": torch.zeros(1)}


@pytest.mark.untraced("puts machines into states that no step of theirs led to")
@names
@pytest.mark.parametrize("call", _CALLS)
def test_a_refused_public_call_of_a_sender_changes_nothing(name, call):
    asked, event = _CALLS[call]
    with MultiProcessWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", pipes=[], model=torch.nn.Linear(1, 1))
        sender = scheme.get_sender()
        first = sender._driver.machine.state, sender._driver.data
        for state, data in sender_values(name):
            due = required_answer_of_sender(state, data, event)
            if not isinstance(due, type) or (not data.workers and event.__class__ in _SENDS and due is not StateError):
                continue
            _set_state(sender._driver, state, data)
            with pytest.raises(due):
                asked(sender)
            assert (sender.state, sender._driver.data) == (state, data)
            assert (sender._driver._packed, sender._driver.concluded) == ({}, {})
        _set_state(sender._driver, *first)


_SENDS = (sending.Send, sending.SendAsync)


_RECEIVER_CALLS = {
    "receive": lambda receiver: receiver.receive(timeout=0),
    "apply_weights": lambda receiver: receiver.apply_weights(torch.nn.Linear(1, 1).state_dict()),
}


@names
@pytest.mark.parametrize("call", _RECEIVER_CALLS)
def test_a_refused_public_call_of_a_receiver_changes_nothing(name, call):
    with MultiProcessWeightSyncScheme() as scheme, scheme.create_receiver() as receiver:
        receiver.register_model(torch.nn.Linear(1, 1))
        first = receiver._driver.machine.state, receiver._driver.data
        refusing = {State.CLOSED, *([State.UNINITIALIZED] if call == "receive" else [])}
        for state, data in receiver_values(name):
            if state in refusing:
                _set_state(receiver._driver, state, data)
                with pytest.raises(StateError):
                    _RECEIVER_CALLS[call](receiver)
                assert (receiver.state, receiver._driver.data) == (state, data)
        _set_state(receiver._driver, *first)
