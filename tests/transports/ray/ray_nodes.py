"""What is done with a cluster of which a node dies."""

from __future__ import annotations

import time
from typing import Any

from ray_alone import add_node
from ray_fleet import PATIENCE, WorkerSetup, ray, small

from weightsync import OutcomeKind, RayWeightSyncScheme

#: Seconds within which a death is noticed; the timeout of the send is far beyond.
SOON = 15.0


def node_killed_mid_send(cluster: Any) -> None:
    """Its worker is lost, soon; the other is served, and goes on."""
    node = add_node(cluster, "far")
    near = ray.remote(num_cpus=0, resources={"node:__internal_head__": 0.001})(WorkerSetup).remote()
    far = ray.remote(num_cpus=0, resources={"far": 1})(WorkerSetup).remote()
    with RayWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", remote_collectors=[near, far], model=small(1.0))
        sender = scheme.get_sender()
        sender.send(timeout=PATIENCE)
        far.sleep.remote(600.0)
        sender.send_async(small(2.0))

        started = time.monotonic()
        cluster.remove_node(node, allow_graceful=False)
        report = sender.wait_async(timeout=PATIENCE, on_failure="report")

        assert time.monotonic() - started < SOON
        assert report[1].kind is OutcomeKind.LOST
        assert report[0].kind is OutcomeKind.APPLIED
        sender.remove_worker(1)
        assert sender.send(small(3.0), timeout=PATIENCE).ok
        assert ray.get(near.shows.remote(), timeout=PATIENCE) == {3.0}
