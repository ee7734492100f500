"""Every adapter keeps to the contract of links, and to the delivery that it declares (issue 4, point 8)."""

from __future__ import annotations

import os

import pytest
from adapters import ADAPTERS, Adapter

from weightsync.testing import SCENARIOS

#: Seconds; reached only by a failure.
PATIENCE = float(os.environ.get("WEIGHTSYNC_KIT_PATIENCE", "20"))


@pytest.mark.parametrize("adapter", [adapter.param() for adapter in ADAPTERS])
def test_it_conforms(adapter: Adapter, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "weightsync")
    found = adapter.check(request, patience=PATIENCE)

    assert found.ok, str(found)
    assert {*found.passed, *found.unreachable, *found.beside} == set(SCENARIOS)
