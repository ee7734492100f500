"""A fleet of each transport, in turn, and the same behind a network that can fail."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray_fleet
from fleet import Crew, crew  # noqa: F401 - crew: the fixture
from fleet_adapters import PIPES, FanoutFleet, PipeFleet, RpcFleet, StoreFleet
from fleets import Fleet, Wanted
from networks import Cut, WiredWorld, over_rpc, over_store, over_tcp_pipes
from ray_adapters import RayFleet, StrikableActor
from severed import Network
from striking import WorkerPoint


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A world that outlives a test is there before what looks at what the test leaves behind (tests/conftest.py)."""
    for item in items:
        wanted = getattr(item, "callspec", None) and item.callspec.params.get("fleet")
        if isinstance(wanted, Wanted) and wanted.transport == "rpc" and not wanted.dies:
            item.fixturenames.insert(0, "world")


@pytest.fixture(scope="module")
def actors(cluster: Any) -> Iterator[list[Any]]:
    """One who dies again and again, one who does not, and one who leads."""
    kind = ray_fleet.ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(StrikableActor)
    made = [kind.remote() for _ in range(3)]
    yield made
    for actor in made:
        ray_fleet.ray.kill(actor)


@pytest.fixture
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """The one that is wanted."""
    wanted: Wanted = request.param
    made = _fleet(wanted, request.getfixturevalue)
    yield made
    made.close()
    if isinstance(made, RpcFleet) and not wanted.dies:
        made.retire()
    if isinstance(made, RayFleet) and wanted.led:
        with contextlib.suppress(OSError):
            made.leader.resume()


def _fleet(wanted: Wanted, fixture: Any) -> Fleet:
    match wanted.transport:
        case "ray":
            return _ray_fleet(wanted, fixture("actors"))
        case "rpc":
            return RpcFleet(fixture("short_lived")(3) if wanted.dies else fixture("world"))
        case "store":
            return StoreFleet(fixture("crew"), fixture("store").port)
        case "fanout":
            return FanoutFleet(fixture("crew"), fixture("store").port)
        case pipes:
            return PipeFleet(fixture("crew"), PIPES[pipes])


def _ray_fleet(wanted: Wanted, actors: list[Any]) -> RayFleet:
    victim, other, leader = actors
    if wanted.dies and wanted.at in (WorkerPoint.AHEAD, WorkerPoint.HANDSHAKE):
        # Ray would restart any other, which would then be met: the handshake is repeated.
        once = ray_fleet.ray.remote(num_cpus=0)(StrikableActor).remote()
        return RayFleet(once, other, spare=victim)
    return RayFleet(victim, other, leader if wanted.led else None)


@pytest.fixture
def cut(request: pytest.FixtureRequest) -> Iterator[Cut]:
    """A fleet behind a network, which serves version 1; its transport is the parameter."""
    match request.param:
        case "tcp":
            made = over_tcp_pipes(request.getfixturevalue("crew"))
        case "rpc":
            made = over_rpc(request.getfixturevalue("wired"))
        case _:
            made = request.getfixturevalue("unmet")
    made.fleet.start()
    yield made
    made.fleet.close()


@pytest.fixture
def wired(forkserver: Any, tmp_path: Path) -> Iterator[WiredWorld]:
    made = WiredWorld(forkserver, tmp_path, 3)
    yield made
    made.end()


@pytest.fixture
def unmet(crew: Crew, store: Any) -> Iterator[Cut]:  # noqa: F811 - the fixture
    """A store's fleet behind a network, not started yet. Its processes end before the network that they use."""
    network = Network(store.port)
    yield over_store(crew, store.port, network)
    crew.end()
    network.end()
