"""Copies, forks and second inits of the schemes of the second generation (fault 15)."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
from typing import Any

import pytest
from duo import Duo, beside
from fleet import PATIENCE, Crew, WorkerSetup, constants, descriptors, filled, opened_since, small

from weightsync import ConfigurationError, MultiProcessWeightSyncScheme, State, StateError


def is_uninitialized(scheme: Any) -> bool:
    """Whether a scheme is uninitialized: no side is initialized or connected, and it has no model, context or pipes."""
    sides = (scheme.initialized_on_sender, scheme.initialized_on_receiver)
    met = (scheme.synchronized_on_sender, scheme.synchronized_on_receiver)
    seen = (scheme.model, scheme.model_id, scheme.context, scheme.worker_idx, scheme._ends, scheme.sender_transports)
    return sides == met == (False, False) and seen == (None, None, None, None, {}, {})


def stages(scheme_class: Any) -> Any:
    """A pair of schemes in each stage of their lives."""
    duo = Duo(scheme_class, strategy="state_dict", sync=False)
    yield duo.sending, duo
    duo.arrive()
    yield duo.receiving, duo
    with beside(lambda: duo.sending.connect(timeout=PATIENCE)):
        duo.receiving.connect(timeout=PATIENCE)
    yield duo.sending, duo
    yield duo.receiving, duo
    duo.send(2.0)
    yield duo.sending, duo
    duo.sending.sync = True
    assert duo.send(3.0).ok
    assert duo.model() == {3.0}
    duo.end()
    yield duo.sending, duo
    yield duo.receiving, duo


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda scheme: pickle.loads(pickle.dumps(scheme))])
def test_a_copy_of_a_scheme_in_any_state_is_uninitialized_and_the_original_keeps_working(
    scheme_class: Any, how: Any
) -> None:
    for scheme, _ in stages(scheme_class):
        copied = how(scheme)

        assert is_uninitialized(copied)
        assert (copied.strategy, copied.sync) == ("state_dict", scheme.sync)
        with pytest.raises(StateError, match="init_on_sender"):
            copied.send()


def test_a_scheme_pickled_outside_a_process_start_carries_no_pipes() -> None:
    with MultiProcessWeightSyncScheme() as scheme:
        scheme.init_on_sender(model=small(), num_workers=1)
        copied = pickle.loads(pickle.dumps(scheme))
        with pytest.raises(ConfigurationError, match="started with the scheme after"):
            copied.init_on_receiver(model_id="policy", model=small(), worker_idx=0)


def test_initialising_a_side_twice_is_refused(duo: Duo) -> None:
    with pytest.raises(StateError, match=r"make a new scheme.*initialised on the sender"):
        duo.sending.init_on_sender(model_id="policy", model=duo.source, num_workers=1)
    with pytest.raises(StateError, match=r"make a new scheme.*initialised on the worker"):
        duo.receiving.init_on_receiver(model_id="policy", model=duo.model, pipe=duo.theirs)

    assert duo.send(2.0).ok


def test_initialising_a_closed_side_is_refused_and_the_error_says_closed(duo: Duo) -> None:
    duo.sending.close()
    duo.receiving.close()

    said = r"init_on_{}\(\): A closed scheme is not initialised again: make a new scheme\..*closed on the {}"
    with pytest.raises(StateError, match=said.format("sender", "sender")):
        duo.sending.init_on_sender(model_id="policy", model=duo.source, num_workers=1)
    with pytest.raises(StateError, match=said.format("worker", "worker")):
        duo.receiving.init_on_receiver(model_id="policy", model=duo.model, pipe=duo.theirs)


def test_both_sides_on_one_object_are_independent_machines(scheme_class: Any) -> None:
    scheme = scheme_class()
    model = small()
    scheme.init_on_sender(model=small(1.0), num_workers=1)
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=0)
    with beside(lambda: scheme.connect(timeout=PATIENCE)):
        scheme.connect(worker_idx=0, timeout=PATIENCE)

    assert scheme.send(filled(small(), 2.0)).ok
    assert constants(model) == {2.0}
    assert scheme.receive(timeout=PATIENCE) is not None
    scheme.shutdown()
    assert scheme.get_sender().state is scheme.get_receiver().state is State.CLOSED


def test_a_scheme_in_a_forked_child_is_uninitialized_but_keeps_its_pipe_end(scheme_class: Any) -> None:
    """So a forked worker needs only its index."""
    scheme = scheme_class()
    scheme.init_on_sender(model=small(1.0), num_workers=2)
    children = []
    for worker in range(2):
        child = os.fork()
        if child == 0:
            os._exit(forked(scheme, worker))
        children.append(child)
    scheme.connect(timeout=PATIENCE)

    assert scheme.send(filled(small(), 2.0)).ok
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    scheme.shutdown()


def forked(scheme: Any, worker: int) -> int:
    if scheme.initialized_on_sender:
        return 1
    model = small()
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=worker)
    scheme.connect(timeout=PATIENCE)
    while constants(model) != {2.0}:
        scheme.receive(timeout=PATIENCE)
    scheme.shutdown()
    return 0


def init_and_count_sockets(setup: WorkerSetup, worker: int) -> tuple[list[int], int]:
    """Initialise a worker. Returns the ends of pipes that came with the scheme, and the sockets open afterwards."""
    came = sorted(setup.scheme._ends)
    setup.scheme.init_on_receiver(model_id="policy", model=small(), worker_idx=worker)
    return came, sum("socket" in target for target in descriptors().values())


def test_each_worker_keeps_only_its_own_pipe_end_open(crew: Crew) -> None:
    with MultiProcessWeightSyncScheme() as many, MultiProcessWeightSyncScheme() as one:
        many.init_on_sender(model=small(), num_workers=5, ctx=crew.context)
        one.init_on_sender(model=small(), num_workers=1, ctx=crew.context)
        [of_many], [of_one] = crew.start(many), crew.start(one)

        came, sockets = of_many.do(init_and_count_sockets, 4)

        assert came == [0, 1, 2, 3, 4]
        assert sockets == of_one.do(init_and_count_sockets, 0)[1]


def test_a_worker_idx_without_a_pipe_end_is_refused_with_the_available_ids() -> None:
    with MultiProcessWeightSyncScheme() as scheme:
        scheme.init_on_sender(model=small(), num_workers=2)
        with pytest.raises(ConfigurationError, match="worker_idx="):
            scheme.init_on_receiver(model_id="policy", model=small())
        with pytest.raises(ConfigurationError, match=r"no pipe here: this scheme carries those of \[0, 1\]"):
            scheme.init_on_receiver(model_id="policy", model=small(), worker_idx=7)
        scheme.init_on_receiver(model_id="policy", model=small(), worker_idx=1)
        assert scheme.worker_idx == 1


def test_a_worker_comes_back_over_a_new_pipe(scheme_class: Any) -> None:
    duo = Duo(scheme_class, make=small)
    duo.connect()
    duo.receiving.shutdown()
    ours, theirs = multiprocessing.Pipe()
    with scheme_class() as another:
        duo.sending.get_sender().add_worker(0, ours)
        another.init_on_receiver(model_id="policy", pipe=theirs, model=small())
        another.connect(timeout=PATIENCE)

        assert constants(another.model) == {1.0}
        assert duo.send(2.0).ok
        assert constants(another.model) == {2.0}
    duo.end()
    ours.close()
    theirs.close()


def test_closed_schemes_leave_no_open_descriptors() -> None:
    gc.collect()  # of objects that other tests have left
    before = descriptors()
    for _ in range(3):
        with MultiProcessWeightSyncScheme() as scheme:
            scheme.init_on_sender(model=small(), num_workers=4)
    assert opened_since(before) == {}
