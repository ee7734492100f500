"""The demo over torch's RPC, in new processes: a process that has left RPC cannot join new workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rpc_processes import run_in_own_process
from test_demo_runs import assert_proved, end_after

from weightsync import TransportError
from weightsync.demo import RunState, SchemeName, Settings, run
from weightsync.local_workers import joined_rpc

pytestmark = pytest.mark.rpc


def proved() -> None:
    """Run the demo, which kills a worker, and check what the others prove."""
    settings = Settings(scheme=SchemeName.RPC, workers=3, overlap=True, kill_worker=True)
    with pytest.MonkeyPatch.context() as patch:
        end_after(20, patch)
        assert_proved(run(RunState(settings)))


def test_every_remaining_worker_proves_the_trainers_last_weights(forkserver: Any) -> None:
    run_in_own_process(forkserver, proved)


def wait_for_an_absent_worker(folder: Path) -> None:
    """Wait for a worker that never joins."""
    address = f"file://{folder}/rendezvous"
    with pytest.raises(TransportError, match="have not joined torch's RPC"), joined_rpc(address, 2, 0.5):
        pass


def join_at_an_unknown_address() -> None:
    """Join at an address whose scheme torch does not know."""
    could_not_join = pytest.raises(
        TransportError, match="the trainer could not join torch's RPC: No rendezvous handler"
    )
    with could_not_join, joined_rpc("nowhere://", 1, 60.0):
        pass


def test_a_trainer_that_cannot_join_rpc_raises(forkserver: Any) -> None:
    run_in_own_process(forkserver, join_at_an_unknown_address)


def test_a_worker_that_never_joins_rpc_makes_the_trainer_raise(forkserver: Any, tmp_path: Path) -> None:
    run_in_own_process(forkserver, wait_for_an_absent_worker, tmp_path)
