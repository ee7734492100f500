"""Threads that call `fire` at the same time take one row each, one after the other."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from weightsync.errors import StateError
from weightsync.protocol._tables import SenderInput, State
from weightsync.protocol.machine import REMEMBERED, SenderMachine

THREADS = 8


@pytest.fixture(autouse=True)
def frequent_switches():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def run_in_all_threads(work: Callable[[int], None]) -> None:
    """Run `work` in all threads, started at the same moment, and raise here what one of them raises."""
    barrier = threading.Barrier(THREADS)

    def run(number: int) -> None:
        barrier.wait()
        work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(run, range(THREADS)))


def sends_that_succeed(machine: SenderMachine) -> int:
    succeeded = []

    def send(number: int) -> None:
        with contextlib.suppress(StateError):
            succeeded.append(machine.fire(SenderInput.SEND))

    run_in_all_threads(send)
    return len(succeeded)


class SlowTargets(dict):
    """Rows whose look-up sleeps, so that every other thread can run."""

    def get(self, key, default=None):
        found = super().get(key, default)
        time.sleep(0.005)
        return found


@pytest.fixture
def slow_look_up(monkeypatch):
    event = SenderMachine.shared.events["SEND"]
    monkeypatch.setattr(event, "_targets", SlowTargets(event._targets))


def test_only_one_of_many_concurrent_sends_succeeds():
    for _ in range(50):
        machine = SenderMachine()
        machine.fire(SenderInput.CONNECT)

        assert sends_that_succeed(machine) == 1
        assert machine.state is State.AWAITING_ACK


@pytest.mark.usefixtures("slow_look_up")
def test_only_one_of_many_concurrent_sends_succeeds_if_the_look_up_of_rows_is_slow():
    machine = SenderMachine()
    machine.fire(SenderInput.CONNECT)

    assert sends_that_succeed(machine) == 1


class SharedTargets(dict):
    """Rows whose look-up returns only after all threads have begun one."""

    def __init__(self, rows):
        super().__init__(rows)
        self._all = threading.Barrier(THREADS)

    def get(self, key, default=None):
        self._all.wait(30)
        return super().get(key, default)


def test_several_concurrent_sends_succeed_if_the_lock_is_removed(monkeypatch):
    machine = SenderMachine()
    machine.fire(SenderInput.CONNECT)
    machine.lock = contextlib.nullcontext()
    event = SenderMachine.shared.events["SEND"]
    monkeypatch.setattr(event, "_targets", SharedTargets(event._targets))

    assert sends_that_succeed(machine) > 1


class SlowHistory(deque):
    """A history that sleeps between steps while it is read, so that other threads can take steps."""

    def __iter__(self):
        for step in super().__iter__():
            time.sleep(0.001)
            yield step


def test_the_history_of_steps_is_consistent_when_read_during_other_threads_steps(role):
    machine = role.machine()
    machine._history = SlowHistory(maxlen=REMEMBERED)
    inputs, read = [step for step in role.inputs if step.value not in ("CLOSE", "BROKEN")], []

    def fire_random_inputs(number: int) -> None:
        choose = random.Random(number)
        for _ in range(20):
            with contextlib.suppress(StateError):
                machine.fire(choose.choice(inputs))
            read.append(machine.steps)

    run_in_all_threads(fire_random_inputs)

    chains = (itertools.pairwise(steps) for steps in read)
    assert all(earlier[2] == later[1] for chain in chains for earlier, later in chain)
    assert max(map(len, read)) == REMEMBERED


def test_the_steps_of_all_threads_form_one_sequence_of_rows(role):
    machine, chain, taken = role.machine(), [], [0] * THREADS
    machine.observe(lambda *step: chain.append(step))
    inputs = [step for step in role.inputs if step.value not in ("CLOSE", "BROKEN")]

    def fire_random_inputs(number: int) -> None:
        choose = random.Random(number)
        for _ in range(300):
            with contextlib.suppress(StateError):
                machine.fire(choose.choice(inputs))
                taken[number] += 1

    run_in_all_threads(fire_random_inputs)

    assert len(chain) == sum(taken) > 0
    assert chain[0][0] is State.UNINITIALIZED
    assert all(earlier[2] is later[0] for earlier, later in itertools.pairwise(chain))
    assert all(role.rows[before, step] is after for before, step, after in chain)
    assert chain[-1][2] is machine.state
