"""Ray actors as workers, on the cluster that all folders share (tests/ray_cluster.py)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_fleet import Plain, WorkerSetup, ray

from weightsync import RayWeightSyncScheme
from weightsync.transports.ray import client

#: Compared as text with the path of each of thousands of tests, in each process.
HERE = f"{Path(__file__).parent}{os.sep}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path).startswith(HERE):
            item.add_marker(pytest.mark.ray)
            # Starting a process takes seconds, and minutes where many do so at once.
            item.add_marker(pytest.mark.timeout(300))
            # Ray's C++ and its background threads leave what they do not close to the collector.
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))


@pytest.fixture(scope="session")
def pool(cluster: Any) -> dict[str, Any]:
    """Actors that many tests use in turn, since each takes seconds to start."""
    setup, plain = ray.remote(num_cpus=0)(WorkerSetup), ray.remote(num_cpus=0)(Plain)
    return {"setups": [setup.remote(), setup.remote()], "plain": plain.remote()}


@pytest.fixture
def setups(pool: dict[str, Any]) -> list[Any]:
    """Two actors with our receiver, as new."""
    ray.get([setup.start_over.remote() for setup in pool["setups"]])
    return list(pool["setups"])


@pytest.fixture
def plain(pool: dict[str, Any]) -> Any:
    """An actor without our receiver, as new."""
    ray.get(pool["plain"].start_over.remote())
    return pool["plain"]


@pytest.fixture
def through_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """All payloads are put into Ray's object store, as large ones are for actors of another host."""
    monkeypatch.setattr(client, "INLINE_NBYTES", -1)
    monkeypatch.setattr(client.SharedPayloads, "shares", lambda *_: False)


@pytest.fixture
def trainer() -> Iterator[Callable[..., Any]]:
    """Makes senders to actors; all are closed when the test has ended."""
    schemes: list[Any] = []

    def make(actors: list[Any], model: Any = None, model_id: str = "policy", **options: Any) -> Any:
        scheme = RayWeightSyncScheme(**options)
        schemes.append(scheme)
        scheme.init_on_sender(model_id, remote_collectors=actors, model=model)
        return scheme.get_sender()

    yield make
    for scheme in schemes:
        scheme.close()
