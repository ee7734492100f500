"""Every adapter keeps to the contract of links, and to the delivery that it declares (issue 4, point 8).

And over each the machines go through what they go through in the model (issue 5, point 5).
"""

from __future__ import annotations

import os

import pytest
from adapters import ADAPTERS, Adapter

from weightsync.testing import SCENARIOS

#: Seconds; reached only by a failure.
PATIENCE = float(os.environ.get("WEIGHTSYNC_KIT_PATIENCE", "20"))
GRAPHS = [name for name in SCENARIOS if name.startswith("the graph of ")]
#: Over every adapter in every run; the others over one adapter, and over all in `make verify`.
SMALL = ["the graph of one version", "the graph of copies"]
WHOLE = "pipe shared"


def holds(adapter: Adapter, request: pytest.FixtureRequest, names: list[str]) -> None:
    found = adapter.check(request, patience=PATIENCE, only=names)

    assert found.ok, str(found)
    assert {*found.passed, *found.unreachable, *found.beside} >= set(names)
    assert all(why.strip() for why in found.unreached.values())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("adapter", [adapter.param() for adapter in ADAPTERS])
def test_it_conforms(adapter: Adapter, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "weightsync")
    whole = adapter.name == WHOLE
    holds(adapter, request, [name for name in SCENARIOS if whole or name not in GRAPHS or name in SMALL])


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("adapter", [each.param() for each in ADAPTERS if each.name != WHOLE])
def test_all_graphs_are_replayed(
    adapter: Adapter, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "weightsync")
    holds(adapter, request, [name for name in GRAPHS if name not in SMALL])
