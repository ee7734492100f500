"""Short runs with real processes: what is proved in the end, and what keeps a run from being a success."""

from __future__ import annotations

import demo_workers
import pytest

from weightsync.demo import (
    Board,
    Casualty,
    Phase,
    Result,
    SchemeName,
    Settings,
    SyncMode,
    Verdict,
    intake,
    run,
    syncing,
    trainer,
)


def ran(settings: Settings, board: Board, body: object = None) -> Result:
    return run(settings, board) if body is None else run(settings, board, body)  # type: ignore[arg-type]


@pytest.mark.parametrize("sync", SyncMode)
@pytest.mark.parametrize("scheme", [SchemeName.SHARED, SchemeName.PIPE])
def test_every_worker_proves_the_trainers_last_weights(scheme: SchemeName, sync: SyncMode) -> None:
    settings = Settings(scheme=scheme, sync=sync, seconds=1.5)
    board = Board(settings)

    result = ran(settings, board)

    assert result.shortcomings == []
    assert result.of(Verdict.PROVED) == [0, 1]
    assert {fate.proof.digest for fate in result.fates if fate.proof} == {result.digest}
    assert result.updates > 0
    assert result.version == result.updates + 2  # the first and the last are sent without an update
    assert result.steps == 512 * result.updates
    view = board.view()
    assert view.phase is Phase.ENDED
    assert view.sync.count == result.version
    assert [worker.version for worker in view.workers] == [result.version] * 2
    assert view.staleness <= 2


def test_the_policy_learns_from_what_workers_do_with_the_weights_they_were_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer, "SOLVED", 300.0)
    monkeypatch.setattr(trainer, "STAYS_SOLVED", 1)
    settings = Settings(seconds=90.0, sync=SyncMode.OVERLAPPED)

    result = ran(settings, Board(settings))

    assert result.shortcomings == []
    assert result.first_mean is not None
    assert result.last_mean is not None
    assert result.first_mean < 60.0
    assert result.last_mean >= 300.0


def test_a_killed_worker_is_reported_lost_and_the_rest_end_up_to_date() -> None:
    settings = Settings(workers=3, seconds=2.5, casualty=Casualty.ONE)
    board = Board(settings)

    result = ran(settings, board)

    assert result.shortcomings == []
    assert result.of(Verdict.PROVED) == [0, 1]
    assert result.of(Verdict.KILLED) == [2]
    assert any("worker 2 is LOST" in note for note in board.view().notes)
    assert board.view().workers[2].standing == "lost"


def test_other_weights_than_the_trainers_are_found_out() -> None:
    settings = Settings(scheme=SchemeName.PIPE, seconds=1.0)

    result = ran(settings, Board(settings), demo_workers.serves_something_else)

    assert result.of(Verdict.PROVED) == [0]
    assert result.of(Verdict.DIFFERS) == [1]
    [shortcoming] = result.shortcomings
    assert "worker 1: serves something else" in shortcoming


def test_a_worker_that_stops_is_given_up_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syncing, "WORKER_TIMEOUT", 1.0)
    monkeypatch.setattr(intake, "WORKER_TIMEOUT", 1.0)
    settings = Settings(seconds=4.0)
    board = Board(settings)

    result = ran(settings, board, demo_workers.stops_after_a_second)

    assert result.of(Verdict.PROVED) == [0]
    assert result.of(Verdict.LOST) == [1]
    assert result.shortcomings
    assert any("did not answer in time" in note for note in board.view().notes)


def test_workers_that_fail_end_the_run_and_say_why() -> None:
    settings = Settings(seconds=30.0)
    board = Board(settings)

    result = ran(settings, board, demo_workers.raises)

    assert result.of(Verdict.LOST) == [0, 1]
    assert result.updates == 0
    assert any("no training happened" in text for text in result.shortcomings)
    assert any("ZeroDivisionError: planted" in note for note in board.view().notes)
    assert result.seconds < 20


def test_a_worker_that_never_starts_is_lost_at_once() -> None:
    settings = Settings(seconds=1.0)

    result = ran(settings, Board(settings), demo_workers.never_starts)

    assert result.of(Verdict.PROVED) == [0]
    assert result.of(Verdict.LOST) == [1]
