"""What tests of several folders run over: RPC worlds of real processes, and stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from rpc_fleet import World


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


@pytest.fixture
def store() -> Any:
    """A store hosted by this process."""
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
