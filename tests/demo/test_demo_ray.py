"""The demo over Ray: the same proof, with actors for workers."""

from __future__ import annotations

import sys
from typing import Any

import demo_workers
import pytest

from weightsync import ConfigurationError, MissingExtraError
from weightsync.demo import Board, Casualty, Result, SchemeName, Settings, SyncMode, Verdict, run

pytestmark = [
    pytest.mark.ray,
    # Ray's C++ and its background threads leave what they do not close to the collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def ran(**options: Any) -> tuple[Result, Board]:
    chosen = Settings(scheme=SchemeName.RAY, **options)
    board = Board(chosen)
    return run(chosen, board), board


@pytest.mark.usefixtures("cluster")
def test_a_killed_actor_is_lost_and_the_others_prove_the_last_weights() -> None:
    result, board = ran(workers=3, seconds=3.0, sync=SyncMode.OVERLAPPED, casualty=Casualty.ONE)

    assert result.shortcomings == []
    assert result.of(Verdict.PROVED) == [0, 1]
    assert result.of(Verdict.KILLED) == [2]
    assert {fate.proof.digest for fate in result.fates if fate.proof} == {result.digest}
    assert any("worker 2 is LOST" in note for note in board.view().notes)
    assert board.view().sync.count == result.version == result.updates + 2


def test_a_body_for_processes_is_refused() -> None:
    chosen = Settings(scheme=SchemeName.RAY)

    with pytest.raises(ConfigurationError, match="body="):
        run(chosen, Board(chosen), demo_workers.raises)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(MissingExtraError, match=r"weightsync demo --scheme ray needs the extra 'ray'"):
        ran()
