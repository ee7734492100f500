"""Fixtures of Ray actors as workers, on the cluster that all folders share (tests/ray_cluster.py)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_fleet import Plain, WorkerSetup, ray

from weightsync import RayWeightSyncScheme
from weightsync.transports.ray import client

#: A string for fast comparison, since every test process compares it with the paths of thousands of tests.
HERE = f"{Path(__file__).parent}{os.sep}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path).startswith(HERE):
            item.add_marker(pytest.mark.ray)
            # Starting a process takes seconds, and minutes if many start at once.
            item.add_marker(pytest.mark.timeout(300))
            # Ray's C++ and its background threads leave sockets and files to the garbage collector.
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))


@pytest.fixture(scope="session")
def pool(cluster: Any) -> dict[str, Any]:
    """Actors that many tests share, since each takes seconds to start."""
    setup, plain = ray.remote(num_cpus=0)(WorkerSetup), ray.remote(num_cpus=0)(Plain)
    return {"setups": [setup.remote(), setup.remote()], "plain": plain.remote()}


@pytest.fixture
def setups(pool: dict[str, Any]) -> list[Any]:
    """Two actors with a weightsync receiver, reset."""
    ray.get([setup.start_over.remote() for setup in pool["setups"]])
    return list(pool["setups"])


@pytest.fixture
def plain(pool: dict[str, Any]) -> Any:
    """An actor without a weightsync receiver, reset."""
    ray.get(pool["plain"].start_over.remote())
    return pool["plain"]


@pytest.fixture
def through_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put all payloads into Ray's object store, as is done with large ones for actors on another host."""
    monkeypatch.setattr(client, "INLINE_NBYTES", -1)
    monkeypatch.setattr(client.SharedPayloads, "shares", lambda *_: False)


@pytest.fixture
def trainer() -> Iterator[Callable[..., Any]]:
    """A function that makes senders to actors. They are closed after the test."""
    schemes: list[Any] = []

    def make(actors: list[Any], model: Any = None, model_id: str = "policy", **options: Any) -> Any:
        scheme = RayWeightSyncScheme(**options)
        schemes.append(scheme)
        scheme.init_on_sender(model_id, remote_collectors=actors, model=model)
        return scheme.get_sender()

    yield make
    for scheme in schemes:
        scheme.close()
