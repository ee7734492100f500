"""The mark of all tests in this folder, which need torch's RPC."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch.distributed import rpc

#: A string for fast comparison, since every test process compares it with the paths of thousands of tests.
HERE = f"{Path(__file__).parent}{os.sep}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path).startswith(HERE):
            item.add_marker(pytest.mark.rpc)


@pytest.fixture(scope="session", autouse=True)
def _rpc_is_there() -> None:
    assert rpc.is_available(), "this torch was built without RPC, which these tests need"
