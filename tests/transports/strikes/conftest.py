"""Fixtures of the strikes: a fleet of each transport, and fleets behind a network that can fail."""

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
from proxy_network import Network
from ray_adapters import RayFleet, StrikableActor
from striking import WorkerPoint


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Make the session's RPC world before the leak check of tests/conftest.py, which then ignores its processes."""
    for item in items:
        wanted = getattr(item, "callspec", None) and item.callspec.params.get("fleet")
        if isinstance(wanted, Wanted) and wanted.transport == "rpc" and not wanted.dies:
            item.fixturenames.insert(0, "world")


@pytest.fixture(scope="module")
def actors(cluster: Any) -> Iterator[list[Any]]:
    """Three actors: the victim, which dies and is restarted again and again, the other worker, and the trainer."""
    kind = ray_fleet.ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(StrikableActor)
    made = [kind.remote() for _ in range(3)]
    yield made
    for actor in made:
        ray_fleet.ray.kill(actor)


@pytest.fixture
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """The fleet that the test's parameter asks for."""
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
        # Use an actor that Ray does not restart: the trainer would repeat its handshake and reach a restarted one.
        once = ray_fleet.ray.remote(num_cpus=0)(StrikableActor).remote()
        return RayFleet(once, other, spare=victim)
    return RayFleet(victim, other, leader if wanted.led else None)


@pytest.fixture
def cut(request: pytest.FixtureRequest) -> Iterator[Cut]:
    """A fleet behind a network, over the transport in the parameter, whose workers serve version 1."""
    match request.param:
        case "tcp":
            made = over_tcp_pipes(request.getfixturevalue("crew"))
        case "rpc":
            made = over_rpc(request.getfixturevalue("wired"))
        case _:
            made = request.getfixturevalue("unstarted")
    made.fleet.start()
    yield made
    made.fleet.close()


@pytest.fixture
def wired(forkserver: Any, tmp_path: Path) -> Iterator[WiredWorld]:
    made = WiredWorld(forkserver, tmp_path, 3)
    yield made
    made.end()


@pytest.fixture
def unstarted(crew: Crew, store: Any) -> Iterator[Cut]:  # noqa: F811 - the fixture
    """A fleet over torch.distributed behind a network, not started. Its processes end before their network."""
    network = Network(store.port)
    yield over_store(crew, store.port, network)
    crew.end()
    network.end()
