"""Fixtures that several folders share: RPC worlds of real processes, and a TCP store."""

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
    """An RPC world of a trainer and three workers, for tests that leave all of them alive."""
    made = World(forkserver, tmp_path_factory.mktemp("world"), 3)
    yield made
    made.end()


@pytest.fixture
def short_lived(forkserver: Any, tmp_path: Path) -> Iterator[Callable[..., World]]:
    """A function that makes RPC worlds whose processes a test may kill."""
    made: list[World] = []

    def make(workers: int, **options: Any) -> World:
        made.append(World(forkserver, tmp_path, workers, **options))
        return made[-1]

    yield make
    for world in made:
        world.end()


@pytest.fixture
def store() -> Any:
    """A TCP store that this process hosts."""
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
