"""A copy of a machine is a new machine (G8), and no reference keeps a machine alive."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest

from weightsync.protocol._tables import State

COPIERS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda machine: pickle.loads(pickle.dumps(machine)),
    "oldest pickle": lambda machine: pickle.loads(pickle.dumps(machine, protocol=0)),
}


@pytest.fixture(params=COPIERS.values(), ids=COPIERS.keys())
def duplicate(request):
    return request.param


def test_a_copy_is_uninitialized_and_the_original_untouched(role, state, duplicate):
    original = role.at(state)

    copied = duplicate(original)

    assert type(copied) is type(original)
    assert copied.state is State.UNINITIALIZED
    assert original.state is state
    assert copied.lock is not original.lock


def test_a_copy_and_its_original_change_state_independently(role, duplicate):
    original = role.at(State.READY)
    copied = duplicate(original)

    copied.fire(role.inputs.CLOSE)
    assert (original.state, copied.state) == (State.READY, State.CLOSED)

    second = duplicate(original)
    original.fire(role.inputs.CLOSE)
    assert (original.state, second.state) == (State.CLOSED, State.UNINITIALIZED)


def test_listeners_are_not_copied(role, duplicate):
    steps = []
    original = role.machine()
    original.observe(lambda *step: steps.append(step))

    duplicate(original).fire(role.inputs.CLOSE)

    assert steps == []


def test_a_machine_can_be_copied_while_its_lock_is_held(role, duplicate):
    original = role.at(State.READY)

    with original.lock:
        copied = duplicate(original)

    assert copied.lock.acquire(blocking=False)


def test_a_pickled_machine_does_not_contain_the_table_of_rows(role):
    assert len(pickle.dumps(role.at(State.READY))) < 100


def test_the_shared_transitions_machine_registers_no_models(role, state):
    machine = role.at(state)

    assert machine.shared is role.machine().shared
    assert machine.shared.models == []


def test_a_machine_is_garbage_collected_when_its_last_reference_is_deleted(role):
    machine = role.at(State.READY)
    watch = weakref.ref(machine)

    del machine
    gc.collect()

    assert watch() is None
