"""A step of a machine takes few bytecode instructions.

Instructions are counted and not timed, so that a busy computer does not make a test fail.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType

import pytest
import transitions

from weightsync.protocol._tables import SENDER_ROWS, SenderInput, State
from weightsync.protocol.machine import SenderMachine


def instructions(call: Callable[[], object]) -> int:
    """Count the bytecode instructions that a call executes, including those of the functions that it calls.

    Garbage collection is off meanwhile: it would run finalizers of objects that other tests have left.
    """
    count = 0

    def trace(frame: FrameType, event: str, arg: object):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.disable()
    try:
        for _ in range(2):  # Python 3.12 reports no instruction of a function that was not traced before
            count = 0
            sys.settrace(trace)
            try:
                call()
            finally:
                sys.settrace(before)
    finally:
        gc.enable()
    return count


@pytest.fixture
def machine():
    machine = SenderMachine()
    machine.fire(SenderInput.CONNECT)
    return machine


def test_the_instruction_count_of_a_step_is_reproducible(machine):
    def call():
        return machine.fire(SenderInput.STALE)

    assert instructions(call) == instructions(call) > 0


def test_a_step_takes_at_most_80_instructions(machine):
    assert instructions(lambda: machine.fire(SenderInput.STALE)) <= 80


def test_a_step_with_a_listener_takes_at_most_130_instructions(machine):
    machine.observe(lambda before, step, after: None)

    assert instructions(lambda: machine.fire(SenderInput.STALE)) <= 130


def test_a_step_takes_a_tenth_of_the_instructions_of_a_stock_transitions_machine(machine):
    class Model:
        pass

    model = Model()
    transitions.Machine(
        model=model,
        states=State,
        initial=State.READY,
        auto_transitions=False,
        transitions=[
            {"trigger": step.value, "source": source, "dest": target} for (source, step), target in SENDER_ROWS.items()
        ],
    )

    assert 10 * instructions(lambda: machine.fire(SenderInput.STALE)) <= instructions(model.STALE)
