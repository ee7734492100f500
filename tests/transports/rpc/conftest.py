"""RPC worlds of real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rpc_fleet import World
from torch.distributed import rpc


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.rpc)


@pytest.fixture(scope="session", autouse=True)
def _rpc_is_there() -> None:
    assert rpc.is_available(), "this torch was built without RPC, which these tests need"


@pytest.fixture(scope="session")
def world(forkserver: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A trainer and three workers, for tests after which all of them live."""
    made = World(forkserver, tmp_path_factory.mktemp("world"), 3)
    yield made
    made.end()


@pytest.fixture
def short_lived(forkserver: Any, tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Makes worlds in which somebody may die."""
    made: list[World] = []

    def make(workers: int, **options: Any) -> World:
        made.append(World(forkserver, tmp_path, workers, **options))
        return made[-1]

    yield make
    for world in made:
        world.end()
