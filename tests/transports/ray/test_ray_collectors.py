"""TorchRL's `RayCollector` with weightsync's schemes and updaters: its actors have a weightsync receiver."""

from __future__ import annotations

import functools
import gc
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from collecting import MARKS, cartpole, choose, chosen, policy, random_policy, tensordict
from ray_fleet import ray
from torch import nn
from torchrl.collectors import MultiSyncCollector

from weightsync import Evidence, LayoutError, RayWeightSyncScheme, RayWeightUpdater, WorkerLostError
from weightsync.clock import Deadline

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # from TorchRL's own updaters, all of which it imports
    from torchrl.collectors.distributed import RayCollector

pytestmark = [*MARKS, pytest.mark.slow]

FRAMES, WORKERS = 20, 2


@pytest.fixture
def collector(cluster: Any) -> Iterator[Callable[..., Any]]:
    """A function that makes a `RayCollector`. After the test it is shut down, and its actors must end."""
    made: list[Any] = []

    def make(workers: int = WORKERS, **options: Any) -> Any:
        given = {"policy": None, "sync": True, "collector_kwargs": [{} for _ in range(workers)], **options}
        made.append(
            RayCollector(
                [cartpole] * workers,
                frames_per_batch=FRAMES,
                total_frames=10**6,
                num_collectors=workers,
                ray_init_config={"address": cluster.address},
                remote_configs={"num_cpus": 0, "num_gpus": 0},
                **given,
            )
        )
        return made[-1]

    yield make
    for each in made:
        actors = list(each.remote_collectors)
        each.shutdown()
        for actor in actors:
            await_death(actor)
    made.clear()
    gc.collect()


def await_death(actor: Any) -> None:
    """Wait until the actor has ended, since it may still answer for a moment."""
    waited = Deadline(60.0)
    while not waited.passed:
        try:
            ray.get(actor.stats.remote(), timeout=60)
        except ray.exceptions.RayActorError:
            return
        time.sleep(0.05)
    pytest.fail(f"{actor} still answers")


def acted(batches: Iterator[Any]) -> list[set[int]]:
    """The actions of each worker in the next batch."""
    return [chosen(part) for part in next(batches)]


def served(scheme: Any) -> list[int]:
    return [entry.served for entry in scheme.get_sender().workers.values()]


def test_workers_act_with_weights_of_every_form_once_the_update_returns(collector: Callable[..., Any]) -> None:
    made, scheme = policy(0), RayWeightSyncScheme()
    running = collector(policy=made, weight_sync_schemes={"policy": scheme})
    running.update_policy_weights_()
    batches = iter(running)
    assert acted(batches) == [{0}, {0}]
    for weights, action in ((policy(1), 1), (tensordict(policy(0)), 0), (dict(policy(1).state_dict()), 1)):
        running.update_policy_weights_(weights)
        assert acted(batches) == [{action}, {action}]
    choose(made, 0)
    assert acted(batches) == [{1}, {1}]
    running.update_policy_weights_(worker_ids=[1])
    assert acted(batches) == [{1}, {0}]

    report = scheme.send(policy(1))

    assert {outcome.evidence for outcome in report.outcomes.values()} == {Evidence.ANSWER}
    assert acted(batches) == [{1}, {1}]


def test_workers_with_policy_factories_get_the_same_or_separate_weights(
    collector: Callable[..., Any],
) -> None:
    scheme = RayWeightSyncScheme("tensordict")
    factories = [functools.partial(policy, action) for action in (0, 1)]
    running = collector(policy_factory=factories, weight_sync_schemes={"policy": scheme})
    batches = iter(running)
    assert acted(batches) == [{0}, {1}]
    running.update_policy_weights_(policy(1))
    assert acted(batches) == [{1}, {1}]
    running.update_policy_weights_({0: tensordict(policy(1)), 1: tensordict(policy(0))})
    assert acted(batches) == [{1}, {0}]

    running.update_policy_weights_({0: tensordict(policy(0))})

    assert acted(batches) == [{0}, {0}]


def test_a_policy_without_weights_also_gets_versions_and_acks(collector: Callable[..., Any]) -> None:
    """The actor's own method would raise, since the policy has no weights."""
    scheme = RayWeightSyncScheme()
    running = collector(policy=random_policy(), weight_sync_schemes={"policy": scheme})
    batches = iter(running)
    assert next(batches).numel() == FRAMES

    running.update_policy_weights_()
    first = served(scheme)
    running.update_policy_weights_()

    assert served(scheme) == [version + 1 for version in first]
    assert next(batches).numel() == FRAMES


def test_the_workers_of_a_remote_multi_collector_act_with_the_sent_weights(collector: Callable[..., Any]) -> None:
    running = collector(
        workers=1,
        policy_factory=functools.partial(policy, 0),
        collector_class=MultiSyncCollector,
        num_workers_per_collector=2,
        weight_sync_schemes={"policy": RayWeightSyncScheme()},
    )
    batches = iter(running)
    assert acted(batches) == [{0}]
    running.update_policy_weights_(policy(1))

    assert acted(batches) == [{1}]


def test_actors_survive_a_failed_first_update_and_goodbyes(collector: Callable[..., Any]) -> None:
    """Ray ends the process of a TorchRL collector's actor if anything raises in it."""
    scheme = RayWeightSyncScheme()
    running = collector(policy=policy(0), weight_sync_schemes={"policy": scheme})
    with pytest.raises(LayoutError):
        running.update_policy_weights_(nn.Linear(1, 1))

    running.update_policy_weights_(policy(1))
    scheme.get_sender().remove_worker(1)
    scheme.close()

    assert acted(iter(running)) == [{1}, {1}]


def test_a_first_update_that_failed_succeeds_once_the_dead_actor_is_removed(collector: Callable[..., Any]) -> None:
    """The recipe of docs/migrating.md: remove the dead actor from TorchRL's list as well, since TorchRL calls it."""
    scheme = RayWeightSyncScheme()
    running = collector(policy=policy(0), weight_sync_schemes={"policy": scheme})
    ray.kill(running.remote_collectors[1])
    with pytest.raises(WorkerLostError, match="worker 1"):
        running.update_policy_weights_(policy(1))

    scheme.get_sender().remove_worker(1)
    with pytest.raises(ray.exceptions.RayActorError):
        running.update_policy_weights_(policy(1))
    running.remote_collectors.pop(1)
    running.num_collectors -= 1
    running.update_policy_weights_(policy(1))
    assert acted(iter(running)) == [{1}]


def test_our_updater_pushes_to_a_collectors_actors(collector: Callable[..., Any]) -> None:
    updater = RayWeightUpdater(policy_weights=tensordict(policy(1)), remote_collectors=[], max_interval=0)
    running = collector(policy=policy(0), weight_updater=lambda: updater)
    updater.remote_collectors = running.remote_collectors
    batches = iter(running)
    assert acted(batches) == [{0}, {0}]

    running.update_policy_weights_()

    assert updater.collector is running
    assert acted(batches) == [{1}, {1}]
