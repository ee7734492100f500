"""kill -9 and SIGSTOP over Ray, of worker and trainer, at each point (G10).

The worker is an actor that Ray restarts: each killed one comes back as another life, and is added anew. An actor reads
nothing by itself: a point is come to in the call that brings the weights.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import judging
import pytest
from judging import some
from ray_fleet import Bench, ray
from striking import PATIENCE, At, Field, Hand, Place, TrainerAt, add_worker, gone_or_stopped, megabytes

from weightsync import RayWeightSyncScheme, WeightSyncActor
from weightsync.engine import applier
from weightsync.transports.ray import client as call_clients

pytestmark = pytest.mark.slow

#: Of an actor that Ray does not restart, below.
RESTARTED = [at for at in At if at is not At.AHEAD]


class Fighter(Bench, WeightSyncActor):
    """An actor that may be struck, and may lead."""

    def start_over(self) -> None:
        for scheme in getattr(self, "schemes", []):
            scheme.close()
        self.schemes: list[Any] = []
        super().start_over()


class Actor(Hand):
    """An actor, told as a process is."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.pid = self._get(handle.pid.remote())
        self._get(handle.start_over.remote())
        self._told: list[Any] = []

    def _get(self, ref: Any) -> Any:
        return ray.get(ref, timeout=PATIENCE)

    def tell(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._told.append(self.handle.do.options(max_task_retries=0).remote(function, *arguments))

    def answer(self) -> Any:
        return self._get(self._told.pop(0))

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.tell(function, *arguments)
        return self.answer()

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        gone_or_stopped(self.pid)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        gone_or_stopped(self.pid)

    def again(self) -> Actor:
        """Its next life, once there is one."""
        return Actor(self.handle)


class Here(Hand):
    """The test's own process, whose calls run in a thread."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.setup = SimpleNamespace(kept={}, schemes=[], model=None)
        self._thread = ThreadPoolExecutor(1)
        self._told: list[Future[Any]] = []

    def tell(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._told.append(self._thread.submit(function, self.setup, *arguments))

    def answer(self) -> Any:
        return self._told.pop(0).result(PATIENCE)

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.tell(function, *arguments)
        return self.answer()

    def resume(self) -> None:
        raise AssertionError("the test itself is not stopped")

    kill = resume

    def end(self) -> None:
        for scheme in self.setup.schemes:
            scheme.close()
        self._thread.shutdown()


class RayField(Field):
    """Two actors, and a trainer in the test's process or in an actor of its own."""

    worker_payload = Place(applier.__name__, "Applier", "verified", after=True)
    trainer_payload = Place(call_clients.__name__, "ActorCallClient", "_begin", after=True)
    receives = False

    def __init__(self, victim: Any, other: Any, trainer: Hand, spare: Any = None) -> None:
        self._spare = spare
        self.victim, self.other, self.trainer = Actor(victim), Actor(other), trainer
        self.here = Here()

    def join(self, worker: Any) -> Any:
        return listen, ()

    def lead(self) -> Any:
        return command, ([self.victim.handle, self.other.handle],)

    def readmit(self) -> str:
        self.victim = self.victim.again() if self._spare is None else Actor(self._spare)
        self.enlist(self.victim)
        handle = self.victim.handle
        self.trainer.do(add_worker, 0, lambda _: handle)
        return ""

    def successor(self) -> Any:
        return self.here


def listen(setup: Any) -> None:
    """Make a receiver that calls drive."""
    setup.model = setup.policy = megabytes()
    scheme = RayWeightSyncScheme()
    setup.schemes.append(scheme)
    scheme.init_on_worker("policy", model=setup.model)
    setup.receiver = scheme.get_receiver()


def command(setup: Any, actors: list[Any]) -> None:
    """Make a sender."""
    setup.model = megabytes()
    scheme = RayWeightSyncScheme()
    setup.schemes.append(scheme)
    scheme.init_on_sender("policy", remote_collectors=actors, model=setup.model)
    setup.kept["sender"] = scheme.get_sender()


@pytest.fixture(scope="module")
def fighters(cluster: Any) -> Iterator[list[Any]]:
    """One who dies again and again, one who does not, and one who leads."""
    kind = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Fighter)
    made = [kind.remote() for _ in range(3)]
    yield made
    for actor in made:
        ray.kill(actor)


@pytest.fixture
def field(fighters: list[Any]) -> Iterator[RayField]:
    """Led by the test's own process."""
    here = Here()
    made = RayField(fighters[0], fighters[1], here)
    yield made
    here.end()
    made.here.end()


@pytest.fixture
def led(fighters: list[Any]) -> Iterator[RayField]:
    """Led by an actor."""
    made = RayField(fighters[0], fighters[1], Actor(fighters[2]))
    leader = made.trainer
    yield made
    made.here.end()
    with contextlib.suppress(OSError):
        leader.resume()


@pytest.mark.parametrize("at", some(RESTARTED, At.PAYLOAD, At.APPLIED))
def test_g10_a_killed_worker_is_lost_and_the_others_are_served(field: RayField, at: At) -> None:
    judging.a_killed_worker_is_lost_and_the_others_are_served(field, at)


@pytest.mark.slow
def test_g10_an_actor_dead_before_its_handshake_is_lost_if_ray_does_not_restart_it(fighters: list[Any]) -> None:
    here, once = Here(), ray.remote(num_cpus=0)(Fighter).remote()
    field = RayField(once, fighters[1], here, fighters[0])
    judging.a_killed_worker_is_lost_and_the_others_are_served(field, At.AHEAD)
    here.end()


@pytest.mark.parametrize("at", some(At, At.PAYLOAD, At.APPLIED))
def test_g10_a_stopped_worker_costs_the_deadline_and_its_late_answer_counts(field: RayField, at: At) -> None:
    judging.a_stopped_worker_costs_the_deadline_and_its_late_answer_counts(field, at)


@pytest.mark.parametrize("at", some(TrainerAt, TrainerAt.PAYLOAD))
def test_g10_a_killed_trainer_leaves_whole_weights_and_room_for_the_next(led: RayField, at: TrainerAt) -> None:
    judging.a_killed_trainer_leaves_whole_weights_and_room_for_the_next(led, at)


@pytest.mark.parametrize("at", some([TrainerAt.DISPATCH, TrainerAt.PAYLOAD, TrainerAt.ANSWERED], TrainerAt.PAYLOAD))
def test_g10_a_stopped_trainer_holds_nobody_up_and_goes_on(led: RayField, at: TrainerAt) -> None:
    judging.a_stopped_trainer_holds_nobody_up_and_goes_on(led, at)


@pytest.mark.parametrize("where", ["worker", "trainer"])
def test_an_adapter_that_raises_loses_its_link_with_the_reason(field: RayField, where: str) -> None:
    judging.an_adapter_that_raises_loses_its_link_with_the_reason(field, where)
