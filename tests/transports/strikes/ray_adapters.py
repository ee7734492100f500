"""The subclass of `fleets.Fleet` for Ray, and its actors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray_fleet
from fleet import PATIENCE
from fleets import Fleet, LocalTrainer, Order, Process
from striking import Place, add_worker, megabytes

from weightsync import RayWeightSyncScheme, WeightSyncActor
from weightsync.engine import applier
from weightsync.transports.ray import client as call_clients


class StrikableActor(ray_fleet.Bench, WeightSyncActor):
    """An actor that may be struck, as a worker or as the trainer."""

    def start_over(self) -> None:
        for scheme in getattr(self, "schemes", []):
            scheme.close()
        self.schemes: list[Any] = []
        super().start_over()


class Actor(Process):
    """An actor with the interface of a process. Ray may restart a dead actor: see `RayFleet.replace_victim`."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.pid = ray_fleet.ray.get(handle.pid.remote(), timeout=ray_fleet.PATIENCE)
        ray_fleet.ray.get(handle.start_over.remote(), timeout=PATIENCE)
        self._calls: list[Any] = []

    def tell(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._calls.append(self.handle.do.options(max_task_retries=0).remote(function, *arguments))

    def answered(self) -> bool:
        return bool(ray_fleet.ray.wait(self._calls[:1], timeout=0)[0])

    def answer(self) -> Any:
        return ray_fleet.ray.get(self._calls.pop(0), timeout=PATIENCE)


class RayFleet(Fleet):
    """Two actors as workers, and a trainer in the test's process or in a third actor.

    An actor does not read links by itself: it reaches a strike's point in the call that carries the weights.
    """

    worker_payload = (Place(applier.__name__, "Applier", "verified", after=True),)
    trainer_payload = (Place(call_clients.__name__, "ActorCallClient", "_begin_call", after=True),)
    receives = False

    def __init__(self, victim: Any, other: Any, leader: Any = None, spare: Any = None) -> None:
        self._spare, self._local = spare, LocalTrainer()
        self.victim, self.other = Actor(victim), Actor(other)
        self.trainer = self.leader = self._local if leader is None else Actor(leader)

    def receiver_order(self, worker: Any) -> Order:
        return join_by_calls, ()

    def sender_order(self) -> Order:
        return lead_actors, ([self.victim.handle, self.other.handle],)

    def replace_victim(self) -> str:
        handle = self.victim.handle if self._spare is None else self._spare
        self.victim = Actor(handle)
        self.start_receiver(self.victim)
        self.trainer.do(add_worker, 0, lambda _: handle)
        return ""

    def successor(self) -> Any:
        return self._local

    def close(self) -> None:
        self._local.close()


def join_by_calls(setup: Any) -> None:
    """Create a receiver that is driven by calls."""
    setup.model = setup.policy = megabytes()
    scheme = RayWeightSyncScheme()
    setup.schemes.append(scheme)
    scheme.init_on_worker("policy", model=setup.model)
    setup.receiver = scheme.get_receiver()


def lead_actors(setup: Any, actors: list[Any]) -> None:
    setup.model = megabytes()
    scheme = RayWeightSyncScheme()
    setup.schemes.append(scheme)
    scheme.init_on_sender("policy", remote_collectors=actors, model=setup.model)
    setup.kept["sender"] = scheme.get_sender()
