"""Every adapter fulfils the contract of links and keeps its declared delivery.

Over each of them the machines take the same steps as in the TLA+ model.
"""

from __future__ import annotations

import os

import pytest
from adapters import ADAPTERS, Adapter, InChildProcess, OnRay

from weightsync.testing import SCENARIOS

#: Seconds. Only a failing check waits this long.
PATIENCE = float(os.environ.get("WEIGHTSYNC_KIT_PATIENCE", "20"))
GRAPHS = [name for name in SCENARIOS if name.startswith("the graph of ")]
#: The graphs that every run replays over each adapter in this process. The adapter `WHOLE` replays all graphs;
#: `make verify` replays all graphs over each adapter.
SMALL = ["the graph of one version", "the graph of copies"]
WHOLE = "pipe shared"


def check_conforms(adapter: Adapter, request: pytest.FixtureRequest, names: list[str]) -> None:
    found = adapter.check(request, patience=PATIENCE, only=names)

    assert found.ok, str(found)
    assert {*found.passed, *found.unreachable, *found.beside} >= set(names)
    assert all(why.strip() for why in found.unreached.values())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("adapter", [adapter.param() for adapter in ADAPTERS])
def test_each_adapter_conforms_to_the_contract_of_links(
    adapter: Adapter, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "weightsync")
    graphs = GRAPHS if adapter.name == WHOLE else [] if isinstance(adapter, InChildProcess | OnRay) else SMALL
    check_conforms(adapter, request, [name for name in SCENARIOS if name not in GRAPHS or name in graphs])


@pytest.mark.untraced("is compared with the model after each step already")
@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("adapter", [each.param() for each in ADAPTERS if each.name != WHOLE])
def test_each_adapter_replays_all_graphs_of_the_model(
    adapter: Adapter, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "weightsync")
    check_conforms(adapter, request, GRAPHS)
