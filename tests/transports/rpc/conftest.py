"""Everything here needs torch's RPC."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed import rpc


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.rpc)


@pytest.fixture(scope="session", autouse=True)
def _rpc_is_there() -> None:
    assert rpc.is_available(), "this torch was built without RPC, which these tests need"
