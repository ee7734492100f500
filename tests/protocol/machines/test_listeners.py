"""Listeners are called with each step, and cannot harm the machine."""

from __future__ import annotations

import threading

import pytest

from weightsync.errors import StateError
from weightsync.protocol._tables import SenderInput, State
from weightsync.protocol.machine import SenderMachine


@pytest.fixture
def machine():
    return SenderMachine()


def test_each_listener_is_called_with_each_step_in_order(machine):
    first, second = [], []
    machine.observe(lambda *step: first.append(step))
    machine.fire(SenderInput.CONNECT)
    machine.observe(lambda *step: second.append(step))
    machine.fire(SenderInput.SEND)
    with pytest.raises(StateError):
        machine.fire(SenderInput.SEND)
    machine.fire(SenderInput.CLOSE)

    send = (State.READY, SenderInput.SEND, State.AWAITING_ACK)
    close = (State.AWAITING_ACK, SenderInput.CLOSE, State.CLOSED)
    assert first == [(State.UNINITIALIZED, SenderInput.CONNECT, State.READY), send, close]
    assert second == [send, close]


def test_a_listener_sees_the_state_after_the_step(machine):
    seen = []
    machine.observe(lambda before, step, after: seen.append((before, after, machine.state)))

    machine.fire(SenderInput.CONNECT)

    assert seen == [(State.UNINITIALIZED, State.READY, State.READY)]


def test_an_exception_of_a_listener_propagates_and_the_step_is_kept(machine):
    def fail(before, step, after):
        raise ZeroDivisionError

    machine.observe(fail)

    with pytest.raises(ZeroDivisionError):
        machine.fire(SenderInput.CONNECT)
    assert machine.state is State.READY
    with pytest.raises(ZeroDivisionError):
        machine.fire(SenderInput.SEND)
    assert machine.state is State.AWAITING_ACK


def test_the_lock_is_released_after_a_listener_raised(machine):
    def fail(before, step, after):
        raise ZeroDivisionError

    machine.observe(fail)
    with pytest.raises(ZeroDivisionError):
        machine.fire(SenderInput.CONNECT)

    free = []
    other = threading.Thread(target=lambda: free.append(machine.lock.acquire(timeout=5)))
    other.start()
    other.join()
    assert free == [True]


def test_a_listener_that_fires_an_input_raises_and_changes_nothing(machine):
    steps = []

    def meddle(before, step, after):
        steps.append(step)
        machine.fire(SenderInput.CLOSE)

    machine.observe(meddle)

    with pytest.raises(RuntimeError, match="a listener fired CLOSE"):
        machine.fire(SenderInput.CONNECT)
    assert machine.state is State.READY
    assert steps == [SenderInput.CONNECT]


def test_a_listener_that_fires_a_disallowed_input_gets_state_error(machine):
    refusals = []

    def look(before, step, after):
        with pytest.raises(StateError) as caught:
            machine.fire(SenderInput.WAIT)
        refusals.append(caught.value.state)

    machine.observe(look)
    machine.fire(SenderInput.CONNECT)

    assert refusals == ["ready"]
    assert machine.state is State.READY
