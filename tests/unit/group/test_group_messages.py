"""What a group says when something is wrong: what happened, to which worker and version, and what to do next."""

from __future__ import annotations

import os
import signal

import group_workers as workers
import pytest
from group_worlds import Make, await_results

from weightsync import StateError, WorkerFailedError


def test_a_killed_worker_is_named_with_the_version_that_it_served_and_where_to_look(make: Make) -> None:
    with make(workers.act, capacity=1) as group:
        await_results(group)
        os.kill(group.processes[0].pid, signal.SIGKILL)
        with pytest.raises(WorkerFailedError) as caught:
            list(group.results())
    assert (caught.value.worker, caught.value.version) == (0, 1)
    said = "worker 0 failed while it served version 1: its process was ended by SIGKILL"
    assert str(caught.value).startswith(said)
    assert "run out of memory: see the kernel's log" in str(caught.value)


def test_a_worker_whose_model_does_not_fit_says_which_argument_makes_one_that_does(make: Make) -> None:
    with (
        make(workers.act, make_model=workers.biased) as group,
        pytest.raises(WorkerFailedError, match=r"(?s)refused the trainer's weights .* missing 'bias'.*make_model="),
    ):
        list(group.results())


def test_a_result_that_cannot_be_pickled_is_named_with_what_can(make: Make) -> None:
    with (
        make(workers.put_what_cannot_be_pickled) as group,
        pytest.raises(WorkerFailedError, match=r"put\(\) was given a function that cannot be pickled .*: put tensors"),
    ):
        list(group.results())


def test_a_group_that_was_not_entered_or_has_ended_says_what_to_do(make: Make) -> None:
    group = make(workers.act)
    with pytest.raises(StateError, match=r"Enter the group by `with`, or call start\(\), first"):
        group.send()
    with pytest.raises(StateError, match=r"send_async\(\)"):
        group.send_async()
    group.start()
    group.close()
    with pytest.raises(StateError, match=r"Make a new WorkerGroup"):
        group.send()
