"""RPC and torch.distributed keep to the contract of links, as all adapters do (issue 4, point 8)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from adapters import CALLS, NO_CABLE, ONE_MODEL
from fleet import Crew
from world_adapters import distributed_conforms, rpc_conforms

from weightsync.testing import SCENARIOS

#: Seconds; reached only by a failure.
PATIENCE = float(os.environ.get("WEIGHTSYNC_KIT_PATIENCE", "20"))
THREADS = "a thread writes: flush() does not wait for it, and close() gives up what payloads it has not written"
STORE = {
    "the sender's last words": THREADS,
    **{name: THREADS for name in SCENARIOS if name.startswith("walk ")},
    "several models": ONE_MODEL,
    "a cut": NO_CABLE,
    "a cut with an update outstanding": NO_CABLE,
}


@pytest.mark.rpc
def test_rpc_conforms(crew: Crew, tmp_path: Path) -> None:
    (worker,) = crew.start(None)
    found = worker.do(rpc_conforms, str(tmp_path), CALLS, PATIENCE)

    assert {*found.passed, *found.unreachable} == set(SCENARIOS)
    worker.kill()


@pytest.mark.gloo
def test_distributed_conforms(crew: Crew) -> None:
    (worker,) = crew.start(None)
    found = worker.do(distributed_conforms, STORE, PATIENCE)

    assert {*found.passed, *found.unreachable} == set(SCENARIOS)
    worker.kill()
