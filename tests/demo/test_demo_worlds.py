"""The demo over RPC and over torch.distributed: the same proof, with workers that meet the trainer elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import demo_workers
import pytest

from weightsync import ConfigurationError, TransportError
from weightsync.demo import Board, Casualty, Result, SchemeName, Settings, SyncMode, Verdict, grounds, run

WORLDS = [
    pytest.param(SchemeName.RPC, marks=pytest.mark.rpc, id="rpc"),
    pytest.param(SchemeName.DISTRIBUTED, marks=pytest.mark.gloo, id="distributed"),
]


def apart(context: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function does in a process of its own: torch's RPC is not left for another world."""
    ours, theirs = context.Pipe()
    process = context.Process(target=_told, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    with contextlib.closing(ours):
        assert ours.poll(100), "it does not end"
        told = ours.recv()
    process.join(20)
    process.kill()
    process.join()
    if isinstance(told, Exception):
        raise told
    return told


def _told(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send(function(*arguments))
    except Exception as error:  # noqa: BLE001 - raised in the test
        pipe.send(error)


def ran(settings: Settings) -> tuple[Result, tuple[str, ...], int]:
    """A run; its notes, and how many syncs there were."""
    board = Board(settings)
    result = run(settings, board)
    return result, tuple(board.view().notes), board.view().sync.count


@pytest.mark.parametrize("scheme", WORLDS)
def test_a_killed_worker_is_lost_and_the_others_prove_the_last_weights(scheme: SchemeName, forkserver: Any) -> None:
    settings = Settings(scheme=scheme, workers=3, seconds=3.0, sync=SyncMode.OVERLAPPED, casualty=Casualty.ONE)

    result, notes, syncs = apart(forkserver, ran, settings)

    assert result.shortcomings == []
    assert result.of(Verdict.PROVED) == [0, 1]
    assert result.of(Verdict.KILLED) == [2]
    assert {fate.proof.digest for fate in result.fates if fate.proof} == {result.digest}
    assert any("worker 2 is LOST" in note for note in notes)
    assert syncs == result.version == result.updates + 2


@pytest.mark.gloo
def test_blocking_syncs_reach_everybody_over_torch_distributed() -> None:
    settings = Settings(scheme=SchemeName.DISTRIBUTED, seconds=1.5)

    result = run(settings, Board(settings))

    assert result.shortcomings == []
    assert result.of(Verdict.PROVED) == [0, 1]
    assert result.version == result.updates + 2


@pytest.mark.gloo
def test_a_worker_that_never_reaches_the_store_is_lost_as_its_process_ends() -> None:
    settings = Settings(scheme=SchemeName.DISTRIBUTED, seconds=1.0)
    board = Board(settings)

    result = run(settings, board, demo_workers.never_starts)

    assert (result.of(Verdict.PROVED), result.of(Verdict.LOST)) == ([0], [1])
    assert [note for note in board.view().notes if "worker 1 is LOST (worker 1 has ended" in note]


def twice(settings: Settings) -> str:
    """Two runs in one process; what became of the second."""
    result = run(settings, Board(settings))
    assert result.shortcomings == []
    assert result.of(Verdict.PROVED) == [0, 1]
    with pytest.raises(ConfigurationError, match="once a process") as refused:
        run(settings, Board(settings))
    return str(refused.value)


@pytest.mark.rpc
def test_blocking_syncs_reach_everybody_over_rpc_and_a_second_run_in_one_process_is_refused(forkserver: Any) -> None:
    settings = Settings(scheme=SchemeName.RPC, seconds=1.5)

    assert "--scheme rpc" in apart(forkserver, twice, settings)


@pytest.mark.rpc
def test_a_worker_that_never_joins_the_world_ends_the_run_at_once() -> None:
    settings = Settings(scheme=SchemeName.RPC, seconds=1.0)

    with pytest.raises(TransportError, match=r"workers \[1\] have ended"):
        run(settings, Board(settings), demo_workers.never_starts)


@pytest.mark.rpc
def test_a_world_that_is_never_complete_is_given_up(forkserver: Any) -> None:
    with pytest.raises(TransportError, match="trainer could not join"):
        apart(forkserver, alone)


def alone() -> None:
    """Join a world of two, alone."""
    grounds.START_TIMEOUT = 1.0
    world = grounds.RpcWorld(1)
    try:
        world.arguments(lambda: None, [])
    finally:
        world.close()
