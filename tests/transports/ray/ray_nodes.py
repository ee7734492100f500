"""The program of a test with a cluster of which a node dies."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from ray_collectors import RemoteCollector
from ray_fleet import PATIENCE, WorkerSetup, ray, small
from ray_isolated import add_node
from updaters_support import weights

from weightsync import OutcomeKind, RayWeightSyncScheme, RayWeightUpdater, WorkerLostError

NEAR, FAR = {"node:__internal_head__": 0.001}, {"far": 1}


def node_killed(cluster: Any) -> None:
    """Kill a node amid a send and a push: its workers are lost, and the others get this version and the next."""
    node = add_node(cluster, {"far": 2})
    near, far = (ray.remote(num_cpus=0, resources=place)(WorkerSetup).remote() for place in (NEAR, FAR))
    collector = ray.remote(num_cpus=0, max_concurrency=2)(RemoteCollector)
    victim, other = (collector.options(resources=place).remote() for place in (FAR, NEAR))
    ray.get(victim.behave.remote("hang"), timeout=PATIENCE)
    updater = RayWeightUpdater(weights(18.0), [victim, other])
    with RayWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", remote_collectors=[near, far], model=small(1.0))
        sender = scheme.get_sender()
        sender.send(timeout=PATIENCE)
        far.sleep.remote(600.0)
        sender.send_async(small(2.0))

        timer = threading.Timer(0.3, cluster.remove_node, (node,), {"allow_graceful": False})
        timer.start()
        with pytest.raises(WorkerLostError) as failure:
            updater.push_weights(timeout=PATIENCE)
        report = sender.wait_async(timeout=PATIENCE, on_failure="report")
        timer.join()

        assert failure.value.lost.keys() == {0}
        assert [outcome.kind for outcome in failure.value.report.outcomes.values()] == [
            OutcomeKind.LOST,
            OutcomeKind.APPLIED,
        ]
        assert ray.get(other.seen.remote(), timeout=PATIENCE)[-1] == 18.0
        assert (report[0].kind, report[1].kind) == (OutcomeKind.APPLIED, OutcomeKind.LOST)
        sender.remove_worker(1)
        assert sender.send(small(3.0), timeout=PATIENCE).ok
        assert ray.get(near.shows.remote(), timeout=PATIENCE) == {3.0}
