"""The demo over RPC and over torch.distributed: the same proof, with workers that meet the trainer elsewhere."""

from __future__ import annotations

import demo_workers
import pytest

from weightsync import TransportError
from weightsync.demo import Board, Casualty, SchemeName, Settings, SyncMode, Verdict, grounds, run, trainer

WORLDS = [
    pytest.param(SchemeName.RPC, marks=pytest.mark.rpc, id="rpc"),
    pytest.param(SchemeName.DISTRIBUTED, marks=pytest.mark.gloo, id="distributed"),
]


@pytest.mark.parametrize("scheme", WORLDS)
def test_the_policy_learns_a_killed_worker_is_lost_and_the_others_prove_the_last_weights(
    scheme: SchemeName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "SOLVED", 300.0)
    monkeypatch.setattr(trainer, "STAYS_SOLVED", 1)
    chosen = Settings(scheme=scheme, workers=3, seconds=45.0, sync=SyncMode.OVERLAPPED, casualty=Casualty.ONE)
    board = Board(chosen)

    result = run(chosen, board)

    assert result.shortcomings == []
    assert result.of(Verdict.PROVED) == [0, 1]
    assert result.of(Verdict.KILLED) == [2]
    assert {fate.proof.digest for fate in result.fates if fate.proof} == {result.digest}
    assert any("worker 2 is LOST" in note for note in board.view().notes)
    assert result.first_mean is not None
    assert result.last_mean is not None
    assert result.first_mean < 60.0
    assert result.last_mean >= 300.0
    assert board.view().sync.count == result.version == result.updates + 2


@pytest.mark.parametrize("scheme", WORLDS)
def test_blocking_syncs_reach_everybody(scheme: SchemeName) -> None:
    chosen = Settings(scheme=scheme, seconds=1.5)

    result = run(chosen, Board(chosen))

    assert result.shortcomings == []
    assert result.of(Verdict.PROVED) == [0, 1]
    assert result.version == result.updates + 2


@pytest.mark.rpc
def test_a_world_that_not_all_join_is_a_transport_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grounds, "START_TIMEOUT", 3.0)
    chosen = Settings(scheme=SchemeName.RPC, seconds=1.0)

    with pytest.raises(TransportError, match="did not all join"):
        run(chosen, Board(chosen), demo_workers.never_starts)
