"""What is pushed while a node dies."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from ray_alone import add_node
from ray_collectors import RemoteCollector
from updaters_support import weights

from weightsync import OutcomeKind, RayWeightUpdater, WorkerLostError

#: Seconds; reached only by a failure.
PATIENCE = 60.0


def node_killed_mid_push(cluster: Any) -> None:
    """Its collector is lost, and the others are served."""
    import ray  # noqa: PLC0415

    node = add_node(cluster, "away")
    collector = ray.remote(num_cpus=0, max_concurrency=2)(RemoteCollector)
    victim = collector.options(resources={"away": 1}).remote()
    others = [collector.options(resources={"node:__internal_head__": 0.001}).remote() for _ in range(2)]
    ray.get(victim.behave.remote("hang"), timeout=PATIENCE)
    updater = RayWeightUpdater(weights(18.0), [victim, *others])
    timer = threading.Timer(0.3, cluster.remove_node, (node,), {"allow_graceful": False})
    timer.start()

    with pytest.raises(WorkerLostError) as failure:
        updater.push_weights(timeout=PATIENCE)
    timer.join()

    assert failure.value.lost.keys() == {0}
    kinds = [outcome.kind for outcome in failure.value.report.outcomes.values()]
    assert kinds == [OutcomeKind.LOST, OutcomeKind.APPLIED, OutcomeKind.APPLIED]
    assert [ray.get(each.seen.remote(), timeout=PATIENCE)[-1] for each in others] == [18.0, 18.0]
