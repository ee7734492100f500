"""Functions that a worker cannot run, or that make no model, are refused before anything starts, with a remedy."""

from __future__ import annotations

import asyncio
import copy
import functools
import pickle
import sys
import threading
import types
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import group_workers as workers
import pytest
import ray
from group_worlds import PIPES, RANKS, RAY, SHARED, Make
from torch import nn

from weightsync import ConfigurationError, Worker, WorkerFailedError, WorkerGroup, run_worker
from weightsync.group import function


async def act_async(worker: Worker) -> None:
    worker.put(1)


def act_as_generator(worker: Worker) -> Iterator[int]:
    yield worker.index


async def act_as_async_generator(worker: Worker) -> AsyncIterator[int]:
    yield worker.index


class AsyncActor:
    async def __call__(self, worker: Worker) -> None:
        worker.put(1)

    async def act(self, worker: Worker) -> None:
        worker.put(1)


def act_alone() -> None: ...


def act_with_more(worker: Worker, games: int) -> None: ...


@ray.remote
def act_remotely(worker: Worker) -> None: ...


@ray.remote
class Actor:
    def act(self, worker: Worker) -> None: ...


def act_by_name(*, worker: Worker) -> None: ...


REFUSED = [
    (act_async, r"run= is act_async\(\), an async function: .*asyncio\.run\(act\(worker\)\)"),
    (functools.partial(act_async), r"run= is act_async\(\), an async function"),
    (AsyncActor(), r"run= is AsyncActor\(\), an async function"),
    (AsyncActor().act, r"run= is act\(\), an async function"),
    (act_as_generator, r"run= is act_as_generator\(\), a generator function: .*worker\.put\(item\) in place of `yield"),
    (act_as_async_generator, r"run= is act_as_async_generator\(\), an async generator function: .*put\(\)"),
    (act_alone, r"run= is act_alone\(\), .*too many positional.*`def act_alone\(worker: Worker\)`"),
    (act_with_more, r"act_with_more\(\), .*missing a required argument: 'games'.*functools\.partial"),
    (act_by_name, r"act_by_name\(\), .*`def act_by_name\(worker: Worker\)`"),
    (AsyncActor, r"run= is AsyncActor\(\), .*cannot be called with a worker"),
    (act_remotely, r"run= is decorated by ray\.remote, .*give the function itself\. .*scheme=\"ray\""),
    (Actor, r"run= is decorated by ray\.remote"),
    (7, "run= is 7: give the function that each worker runs"),
]


@pytest.mark.parametrize(("run", "named"), REFUSED)
def test_a_function_that_no_worker_can_run_is_refused_at_once(
    run: Any, named: str, model: nn.Module, make: Make
) -> None:
    calls: list[Callable[[], object]] = [
        lambda: make(run),
        lambda: WorkerGroup(run, model, 1, scheme="ray"),
        lambda: run_worker(run, model),
    ]
    for call in calls:
        with pytest.raises(ConfigurationError, match=named):
            call()


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"model": None}, r"^model= is None: give this rank's own nn\.Module"),
        ({"model": workers.policy}, r"^model= is <function policy .*: give this rank's own nn\.Module"),
        ({"scheme": "distributed"}, r"^scheme= is 'distributed': give a new DistributedWeightSyncScheme, or leave"),
    ],
)
def test_run_worker_refuses_invalid_arguments_before_it_joins_the_group(
    given: dict[str, Any], match: str, model: nn.Module
) -> None:
    with pytest.raises(ConfigurationError, match=match):
        run_worker(**{"run": workers.act, "model": model, **given})


@pytest.mark.parametrize(
    "run", [workers.act, functools.partial(act_with_more, games=2), AsyncActor().act.__get__, print, lambda *_: None]
)
def test_any_callable_that_takes_a_worker_is_accepted(run: Any) -> None:
    assert function.require_run(run) is run


def test_a_module_named_ray_that_is_not_ray_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))  # a user's folder, or Ray while it is imported

    assert function.require_run(workers.act) is workers.act


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (nn.Linear(1, 1), r"make_model= is a model \(Linear\): give a function that takes no argument"),
        (7, "make_model= is 7: give a function that takes no argument"),
        (nn.Linear, r"make_model= is Linear\(\), .*missing a required argument: 'in_features'.*functools\.partial"),
        (Actor, r"make_model= is decorated by ray\.remote"),
        (act_async, r"make_model= is act_async\(\), an async function: give a function"),
    ],
)
def test_an_invalid_make_model_is_refused_at_once(made: Any, named: str, make: Make) -> None:
    with pytest.raises(ConfigurationError, match=named):
        make(workers.act, make_model=made)


@pytest.mark.parametrize("make_over", [SHARED, PIPES, RANKS], indirect=True)
@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (workers.act_by_coroutine, r"act_by_coroutine\(\)\) returned what an async function makes.*asyncio\.run"),
        (workers.act_by_generator, r"returned what a generator function makes, whose body has not run"),
    ],
)
def test_a_function_that_returns_a_coroutine_or_generator_fails_in_its_worker(
    run: Any, reason: str, make_over: Make
) -> None:
    with make_over(run) as group, pytest.raises(WorkerFailedError, match=reason):
        list(group.results())


def test_a_make_model_that_returns_no_model_fails_in_its_worker(make: Make) -> None:
    named = r"(?s)make_model= \(nothing\(\)\) returned None.*nn\.Module.*would fail in the same way"
    with (
        make(workers.act, make_model=workers.nothing) as group,
        pytest.raises(WorkerFailedError, match=named) as failed,
    ):
        list(group.results())
    assert "max_restarts" not in str(failed.value)


def test_an_async_function_runs_if_wrapped_as_the_refusal_advises(make: Make) -> None:
    with make(workers.act_by_asyncio_run) as group:
        assert [result.value for result in group.results()] == [1.0, 1.0]


@pytest.mark.parametrize("make_over", [RAY], indirect=True)
def test_an_unpicklable_function_for_an_actor_is_named_and_starts_nothing(make_over: Make) -> None:
    lock = threading.Lock()

    def act(worker: Worker) -> None:
        with lock:
            worker.put(1)

    group = make_over(act)
    with pytest.raises(ConfigurationError, match=r"run= is act\(\), and fails at run -> lock \(.*lock") as caught:
        group.start()
    assert "Create it inside run= or make_model=, in the worker" in str(caught.value)
    assert group.processes == {}

    group = make_over(workers.act, make_model=functools.partial(id, lock))
    with pytest.raises(ConfigurationError, match=r"make_model= is id\(\), and fails at make_model"):
        group.start()


def test_an_unpicklable_function_for_a_process_is_named(make: Make) -> None:
    def act(worker: Worker) -> None: ...

    with pytest.raises(ConfigurationError, match=r"cannot be pickled \(run= is act\(\); .*top level of a module"):
        make(act).start()


class Trainer:
    """An object that has the group in which its method runs."""

    group: WorkerGroup

    def act(self, worker: Worker) -> None: ...


@pytest.mark.parametrize("make_over", [PIPES, RAY], indirect=True)
def test_a_method_of_an_object_that_has_the_group_is_refused_before_a_worker_runs(make_over: Make) -> None:
    trainer = Trainer()
    trainer.group = make_over(trainer.act)
    with pytest.raises(ConfigurationError, match="its object may have the group as an attribute: give a function"):
        trainer.group.start()
    assert trainer.group.processes == {}


def test_a_group_can_be_neither_pickled_nor_copied(make: Make) -> None:
    with make(workers.act) as group:
        for copying in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(ConfigurationError, match="a WorkerGroup can be neither pickled nor copied"):
                copying(group)


def test_a_coroutine_that_is_refused_is_closed() -> None:
    made = act_async(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError):
        function.require_ran(act_async, made)
    with pytest.raises(RuntimeError, match="cannot reuse"):
        asyncio.run(made)


class WithoutSignature:
    """A function whose signature Python cannot tell, as that of some builtins."""

    __signature__ = "unknown"

    def __call__(self, worker: Worker) -> None:
        """Do nothing."""


def test_a_function_whose_signature_is_unknown_is_accepted() -> None:
    run = WithoutSignature()
    assert function.require_run(run) is run
