"""Fixtures of pairs over torch.distributed, and the mark of all tests in this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from fleet import crew  # noqa: F401 - the fixture
from skipping import not_tested
from store_fleet import StorePair

#: A string for fast comparison, since every test process compares it with the paths of thousands of tests.
HERE = f"{Path(__file__).parent}{os.sep}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path).startswith(HERE):
            item.add_marker(pytest.mark.gloo)


@pytest.fixture(autouse=True)
def _gloo() -> None:
    if not dist.is_available() or not dist.is_gloo_available():
        not_tested("ANYTHING OVER A STORE", "this torch was built without torch.distributed over gloo")


@pytest.fixture
def pair(store: Any) -> Iterator[StorePair]:
    """A sender and one receiver in this process."""
    made = StorePair(store)
    yield made
    made.close()


@pytest.fixture
def three(store: Any) -> Iterator[StorePair]:
    """A sender and three receivers in this process."""
    made = StorePair(store, workers=3)
    yield made
    made.close()
