"""Weights of every kind to a Ray actor, bit by bit, and to a plain one by what its method was given."""

from __future__ import annotations

from typing import Any

import pytest
from weight_kinds import KINDS, snapshot
from world_adapters import everything

from weightsync import RayWeightSyncScheme, WeightSyncActor

pytestmark = [
    pytest.mark.ray,
    # Ray's C++ and its background threads leave what they do not close to the collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]


class Holder(WeightSyncActor):
    """Holds weights of every kind."""

    def __init__(self) -> None:
        self.policy = everything(9)

    def shows(self) -> dict[str, Any]:
        return snapshot(self.policy)


def test_everything_arrives_bit_by_bit(cluster: Any) -> None:
    import ray  # noqa: PLC0415 - an extra

    actor = ray.remote(num_cpus=0)(Holder).remote()
    with RayWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", remote_collectors=[actor])
        for seed in (1, 2, 3):
            source = everything(seed)
            report = scheme.get_sender().send(source, timeout=60.0)
            assert (report.ok, report.version) == (True, seed)
            assert ray.get(actor.shows.remote()) == snapshot(source)
    ray.kill(actor)
    assert len(everything(1)) > len(KINDS) / 2
