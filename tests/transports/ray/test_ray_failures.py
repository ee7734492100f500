"""Failures on Ray: each has its outcome in the sender's report, and none hangs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import textwrap
import time
import weakref
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from ray_environment import ENVIRONMENT
from ray_fleet import PATIENCE, Loop, Plain, Threads, WorkerSetup, ray, set_policy, small
from ray_isolated import run_isolated
from torch import nn

from weightsync import AckTimeoutError, Evidence, OutcomeKind, RefusedError, WeightSyncActor, WorkerLostError
from weightsync.protocol.messages import Update
from weightsync.transports.ray import object_store
from weightsync.transports.ray.session import ACTOR_WATCH, Session, failure_in_actor


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=PATIENCE)


@pytest.fixture(scope="module")
def fresh(cluster: Any) -> Any:
    """Actors for this module that die, or run several threads; all are started at once."""
    made = {
        "mortal": ray.remote(num_cpus=0, max_task_retries=0)(WorkerSetup).remote(),
        "threads": ray.remote(num_cpus=0, max_concurrency=4)(Threads).remote(),
        "loop": ray.remote(num_cpus=0)(Loop).remote(),
    }
    yield made
    for actor in made.values():
        ray.kill(actor)


def test_an_actor_killed_by_ray_is_lost(fresh: Any, trainer: Any) -> None:
    mortal = fresh["mortal"]
    sender = trainer([mortal], small(1.0))
    sender.send(timeout=PATIENCE)
    mortal.sleep.remote(600.0)
    sender.send_async(small(2.0))

    ray.kill(mortal)

    with pytest.raises(WorkerLostError):
        sender.wait_async(timeout=PATIENCE)
    with pytest.raises(WorkerLostError):
        sender.send(timeout=PATIENCE)


class SlowToRestart:
    """A mixin of an actor that takes longer to restart than Ray lets a plain call wait."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        started = Path(folder, str(os.getpid()))
        started.touch()
        if len(list(started.parent.iterdir())) > 1:
            time.sleep(4.0)

    def die(self) -> None:
        os._exit(1)


@pytest.mark.parametrize("kind", [WorkerSetup, Plain])
def test_an_actor_that_ray_is_restarting_is_waited_for_after_it_is_added_again(
    kind: type, trainer: Any, cluster: Any, tmp_path: Path
) -> None:
    restarting = ray.remote(num_cpus=0, max_restarts=1)(type("Restarting", (SlowToRestart, kind), {}))
    actor = restarting.remote(str(tmp_path))
    sender = trainer([actor], small(1.0))
    sender.send(timeout=PATIENCE)
    ray.wait([actor.die.remote()])
    with pytest.raises(WorkerLostError):
        sender.send(small(2.0), timeout=PATIENCE)

    sender.add_worker(0, actor)

    assert sender.send(small(3.0), timeout=PATIENCE).ok
    assert get(actor.shows.remote()) == {3.0}
    ray.kill(actor)


@pytest.fixture
def lost_object(cluster: Any) -> Any:
    """A reference to an object that is lost forever, since its owner died."""

    @ray.remote(num_cpus=0)
    class Owner:
        def make(self) -> list[Any]:
            return [ray.put(bytearray(10 * 2**20))]

    owner = Owner.remote()
    (ref,) = get(owner.make.remote())
    ray.kill(owner)
    for _ in range(int(PATIENCE / 0.05)):
        try:
            ray.get(ref)
        except ray.exceptions.ObjectLostError:
            return ref
        time.sleep(0.05)
    raise AssertionError("the object outlives its owner")


@pytest.mark.usefixtures("through_store")
def test_a_payload_lost_from_the_object_store_is_a_refusal_and_the_link_stays_up(
    setups: list[Any], plain: Any, trainer: Any, lost_object: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = trainer([setups[0], plain], small(1.0))
    sender.send(timeout=PATIENCE)
    real = ray.put
    monkeypatch.setattr(ray, "put", lambda *args, **kwargs: lost_object)

    with pytest.raises(RefusedError, match="lost from Ray's object store") as refused:
        sender.send(small(2.0), timeout=PATIENCE)

    assert [OutcomeKind.REFUSED] * 2 == [refused.value.report[worker].kind for worker in (0, 1)]
    assert refused.value.report[0].evidence is Evidence.NONE
    assert get(setups[0].shows.remote()) == {1.0}
    monkeypatch.setattr(ray, "put", real)
    assert sender.send(small(3.0), timeout=PATIENCE).ok
    assert get(setups[0].shows.remote()) == {3.0}


@pytest.mark.usefixtures("through_store")
def test_the_layout_that_a_lost_call_carried_is_sent_again(
    setups: list[Any], trainer: Any, lost_object: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = trainer(setups[:1], small(1.0))
    with monkeypatch.context() as patched:
        patched.setattr(ray, "put", lambda *args, **kwargs: lost_object)
        assert sender.send(timeout=PATIENCE, on_failure="report")[0].kind is OutcomeKind.REFUSED

    assert sender.send(timeout=PATIENCE).ok


@pytest.mark.usefixtures("through_store")
def test_calls_lost_one_after_another_are_not_waited_for(
    setups: list[Any], trainer: Any, lost_object: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second lost call was the one that named the first."""
    sender = trainer(setups[:1], small(1.0))
    with monkeypatch.context() as patched:
        patched.setattr(ray, "put", lambda *args, **kwargs: lost_object)
        for _ in range(2):
            assert sender.send(timeout=PATIENCE, on_failure="report")[0].kind is OutcomeKind.REFUSED

    assert sender.send(timeout=PATIENCE).ok


class Indexing(Exception):
    """Its repr() raises where Ray has put other ``args`` into it."""

    def __repr__(self) -> str:
        return f"Indexing({self.args[0]}, {self.args[1]})"


def test_an_actors_exception_whose_repr_raises_in_the_trainer_still_gives_its_reason() -> None:
    error = ray.exceptions.RayTaskError("f", "Traceback:\nIndexing: not for me", Indexing(1, 2)).as_instanceof_cause()
    assert isinstance(error, Indexing)

    assert failure_in_actor(error) == ("Indexing: not for me", "Traceback:\nIndexing: not for me")


@pytest.mark.usefixtures("through_store")
def test_a_full_object_store_is_a_refusal(setups: list[Any], trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = trainer(setups[:1], small(1.0))

    def full(*args: Any, **kwargs: Any) -> Any:
        raise ray.exceptions.ObjectStoreFullError("no room for this object")

    with monkeypatch.context() as patched:
        patched.setattr(ray, "put", full)
        with pytest.raises(RefusedError, match="no room"):
            sender.send(timeout=PATIENCE)

    assert sender.send(timeout=PATIENCE).ok


class Reference:
    """A stand-in for Ray's references, which do not support weak references."""


def test_each_version_is_put_only_after_the_former_one_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: weakref.WeakSet[Reference] = weakref.WeakSet()
    beside: list[int] = []

    class Store:
        @staticmethod
        def put(_: Any) -> Reference:
            beside.append(len(stored))
            reference = Reference()
            stored.add(reference)
            return reference

    monkeypatch.setattr(object_store, "require_ray", lambda _: Store)
    cached = object_store.CachedObject(lambda *_: None)

    for version in (1, 2, 3):
        cached.put(Update(model_id="policy", incarnation=1, version=version, layout_digest=b""), None)

    assert beside == [0, 0, 0]


@pytest.mark.timeout(300)
def test_a_node_killed_during_a_send_and_a_push_loses_only_its_workers() -> None:
    run_isolated("ray_nodes", "node_killed")


def test_a_threaded_actor_applies_a_version_only_once_no_thread_is_serving(fresh: Any, trainer: Any) -> None:
    threads = fresh["threads"]
    sender = trainer([threads], small(1.0))
    sender.send(timeout=PATIENCE)
    served = threads.serve.remote()
    get(threads.is_inside.remote())

    sender.send_async(small(2.0))
    with pytest.raises(AckTimeoutError, match=r"the call to its actor has not returned: .* inside serving\(\)"):
        sender.wait_async(timeout=0.5)
    get(threads.open_gate.remote())

    assert ({1.0}, {1.0}) == get(served)
    assert sender.wait_async(timeout=PATIENCE).ok
    assert get(threads.shows.remote()) == {2.0}


class Slow(nn.Module):
    """A module whose forward reads its two weights with a pause in between."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor(value))
        self.second = nn.Parameter(torch.tensor(value))
        self.seconds = 0.005

    def forward(self) -> tuple[float, float]:
        first = self.first.item()
        time.sleep(self.seconds)
        return first, self.second.item()


def act(actor: Any, in_blocks: bool) -> set[tuple[float, float]]:
    """Run forwards without a pause until asked to stop. Returns the pairs of weights that they read."""
    actor.inside.set()
    seen = set()
    while not actor.released.is_set():
        with actor.weight_receiver().serving() if in_blocks else contextlib.nullcontext():
            seen.add(actor.policy())
    return seen


@pytest.mark.parametrize("in_blocks", [True, False])
def test_g3_threads_that_act_without_a_pause_see_whole_versions_and_starve_no_update(
    in_blocks: bool, cluster: Any, trainer: Any
) -> None:
    threads = ray.remote(num_cpus=0, max_concurrency=4)(Threads).remote()
    get(threads.do.remote(set_policy, Slow))
    sender = trainer([threads], Slow(1.0))
    sender.send(timeout=PATIENCE)
    acting = [threads.do.remote(act, in_blocks) for _ in range(2)]
    get(threads.is_inside.remote())

    for version in range(2, 12):
        sender.send(Slow(float(version)), timeout=PATIENCE)

    get(threads.open_gate.remote())
    seen = set.union(*get(acting))
    assert all(first == second for first, second in seen)
    ray.kill(threads)


def test_calls_of_a_threaded_actor_are_delivered_in_order(fresh: Any, trainer: Any) -> None:
    sender = trainer([fresh["threads"]], small(0.0))
    for version in range(1, 20):
        sender.send_async(small(float(version)), on_pending="supersede")

    assert sender.wait_async(timeout=PATIENCE).ok
    assert get(fresh["threads"].shows.remote()) == {19.0}


def test_an_async_actor_applies_between_awaits_and_is_lost_if_serving_spans_one(fresh: Any, trainer: Any) -> None:
    loop = fresh["loop"]
    sender = trainer([loop], small(1.0))

    assert sender.send(timeout=PATIENCE).ok

    assert get(loop.shows.remote()) == {1.0}
    held = loop.hold.remote()
    report = sender.send(small(2.0), timeout=PATIENCE, on_failure="report")
    assert report[0].kind is OutcomeKind.LOST
    assert "serving() before you await" in report[0].reason
    get([loop.let_go.remote(), held])
    assert get(loop.shows.remote()) == {1.0}


class AsyncActorWithExecutor(WeightSyncActor):
    """An async actor whose forwards run in executor threads."""

    def __init__(self) -> None:
        self.policy = Slow()
        self.begun, self.released = asyncio.Event(), asyncio.Event()

    async def act(self) -> set[tuple[float, float]]:
        seen = set()
        while not self.released.is_set():
            self.begun.set()
            seen.add(await asyncio.get_running_loop().run_in_executor(None, self.policy))
        return seen

    async def has_begun(self) -> bool:
        return await self.begun.wait()

    async def let_go(self) -> None:
        self.released.set()


@pytest.mark.parametrize(("seconds", "threads", "versions"), [(0.02, 2, 10), (2.5, 1, 2)])
def test_g3_no_version_goes_live_during_a_forward_in_another_thread_of_an_async_actor(
    seconds: float, threads: int, versions: int, cluster: Any, trainer: Any
) -> None:
    actor = ray.remote(num_cpus=0)(AsyncActorWithExecutor).remote()
    sender = trainer([actor], Slow(1.0))
    sender.send(timeout=PATIENCE)
    get(actor.__ray_call__.remote(_set_pause, seconds))
    acting = [actor.act.remote() for _ in range(threads)]
    get(actor.has_begun.remote())

    for version in range(2, 2 + versions):
        sender.send(Slow(float(version)), timeout=PATIENCE)

    get(actor.let_go.remote())
    assert all(first == second for first, second in set.union(*get(acting)))
    ray.kill(actor)


def _set_pause(actor: Any, seconds: float) -> None:
    actor.policy.seconds = seconds


PROGRAM = """
    import sys, threading
    import ray
    from ray_fleet import WorkerSetup, small
    from weightsync import RayWeightSyncScheme

    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
    actor = ray.get_actor(sys.argv[2], namespace=sys.argv[3])
    scheme = RayWeightSyncScheme()
    scheme.init_on_sender("policy", remote_collectors=[actor], model=small(1.0))
    sender = scheme.get_sender()
    actor.sleep.remote(600.0)
    sender.send_async()
    ending = threading.Timer(0.3, ray.shutdown)
    ending.start()
    during = sender.wait_async(timeout=60, on_failure="report")
    try:
        after = sender.send(timeout=60)
    except ConnectionError as error:
        after = error
    ending.join()
    assert not ray.is_initialized(), f"{during} {after!r}: a send has started a cluster of its own"
    scheme.close()
    print(during[0].kind.name, during[0].reason, type(after).__name__)
"""


def test_shutting_down_ray_during_a_send_loses_the_workers_and_does_not_hang(cluster: Any) -> None:
    """The trainer is another process, whose connection the actor outlives."""
    setup = ray.remote(num_cpus=0)(WorkerSetup).options(name="outlives").remote()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), cluster.address, "outlives", _namespace()],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    ray.kill(setup)
    assert done.returncode == 0, done.stderr[-3000:]
    # Ray sometimes ends the calls in transit itself at its shutdown, as if the actor were dead.
    assert done.stdout.startswith("LOST ")
    assert done.stdout.rstrip().endswith(" WorkerLostError")


def _namespace() -> str:
    return str(ray.get_runtime_context().namespace)


def test_a_send_without_a_ray_session_reports_the_workers_lost(
    setups: list[Any], trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = trainer(setups[:1], small(1.0))
    with monkeypatch.context() as patched:
        patched.setattr(ray, "is_initialized", lambda: False)
        try:
            report = sender.send(timeout=PATIENCE, on_failure="report")
        except WorkerLostError as error:  # the link noticed the end of the session before the send began
            report = error.report

    assert report[0].kind is OutcomeKind.LOST
    assert "Ray" in report[0].reason


def test_calls_fail_when_ray_shuts_down_although_their_futures_stay_open(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    call: Future[Any] = Future()

    ACTOR_WATCH.watch(call, "worker 7")

    with pytest.raises(ConnectionError, match="shut down before worker 7"):
        call.result(PATIENCE)


def test_a_link_of_an_earlier_session_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = iter([("job", "node"), ("job", "another node")])
    monkeypatch.setattr("weightsync.transports.ray.session._session_key", lambda _: next(keys))
    session = Session("worker 0")

    with pytest.raises(ConnectionError, match="add_worker"):
        session.require()
