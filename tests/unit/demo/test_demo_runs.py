"""Short runs with real processes: what they prove at the end, and which faults make a run fail."""

from __future__ import annotations

from functools import partial

import demo_workers
import pytest
from clocks import advance_a_minute_once
from fleet import stat_of

from weightsync import WorkerFailedError, WorkerGroup
from weightsync.demo import Phase, RunState, SchemeName, Settings, Verdict, joined, run, trainer

SHARED_KILL = Settings(scheme=SchemeName.SHARED, workers=3, kill_worker=True)
PIPE_OVERLAP = Settings(scheme=SchemeName.PROCESS, workers=2, overlap=True)
STORE_KILL = Settings(scheme=SchemeName.DISTRIBUTED, workers=3, overlap=True, kill_worker=True)


def end_after(updates: int, patch: pytest.MonkeyPatch) -> None:
    """Make runs end after this many updates, however long they take. Any kill of a worker follows the first update."""
    patch.setattr(trainer, "SOLVED", 0.0)
    patch.setattr(trainer, "STAYS_SOLVED", updates)
    patch.setattr(trainer, "_HALF_WAY", 0.0)
    patch.setattr(trainer, "WORKER_TIMEOUT", 60.0)


def assert_proved(state: RunState) -> None:
    """The first two workers prove the trainer's last weights; a third was killed as asked, and is reported LOST."""
    assert state.failures == []
    assert state.of(Verdict.PROVED) == [0, 1]
    assert state.of(Verdict.KILLED) == [2][: state.settings.workers - 2]
    assert [worker.proof for worker in state.workers[:2]] == [state.sent] * 2
    assert len(state.sent.digest) == 16
    assert state.updates > 0
    assert state.syncs == state.sent.version
    # No update precedes the first version, the last one, or a version for which all experience was too old.
    assert state.sent.version >= state.updates + 2
    assert state.steps >= 512 * state.updates
    assert [worker.version for worker in state.workers[:2]] == [state.sent.version] * 2
    assert state.staleness <= 8
    assert any("worker 2 is LOST" in note for note in state.notes) == state.settings.kill_worker
    assert state.phase is Phase.ENDED


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(SHARED_KILL, id="shared-blocking-kill"),
        pytest.param(PIPE_OVERLAP, id="pipe-overlap"),
        pytest.param(STORE_KILL, id="distributed-overlap-kill", marks=pytest.mark.gloo),
    ],
)
def test_every_remaining_worker_proves_the_trainers_last_weights(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_after(20, monkeypatch)
    assert_proved(run(RunState(settings)))


def test_the_policy_learns_from_the_experience_of_its_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer, "SOLVED", 150.0)
    monkeypatch.setattr(trainer, "STAYS_SOLVED", 1)

    result = run(RunState(Settings(seconds=60.0, overlap=True)))

    assert result.failures == []
    assert result.first_mean is not None
    assert result.last_mean is not None
    assert result.first_mean < 60.0
    assert result.last_mean >= 100.0  # training ended at 150, and some episodes ended after it


def test_a_stopped_worker_is_reported_lost_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    end_after(3, monkeypatch)
    monkeypatch.setattr(trainer, "act", demo_workers.stops_in_its_first_chunk)
    state = RunState(Settings())

    def waits_for_the_stopped_worker() -> bool:
        if state.phase is not Phase.TRAINING or state.sender is None or state.sender.owing != (1,):
            return False
        return stat_of(state.workers[1].pid)[0] == "T"

    with advance_a_minute_once(waits_for_the_stopped_worker):
        result = run(state)

    assert result.of(Verdict.PROVED) == [0]
    assert result.of(Verdict.LOST) == [1]
    assert [failure for failure in result.failures if failure.startswith("worker 1: lost")]
    assert any("did not answer in time" in note for note in result.notes)


def test_failed_workers_end_the_run_and_their_error_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "act", demo_workers.raises)

    result = run(RunState(Settings(seconds=60.0)))

    assert result.of(Verdict.LOST) == [0, 1]
    assert result.updates == 0
    assert any("the policy was not trained" in text for text in result.failures)
    assert any("ZeroDivisionError: planted" in note for note in result.notes)
    assert result.elapsed < 50


def test_a_worker_that_never_starts_ends_the_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "WorkerGroup", partial(WorkerGroup, make_model=demo_workers.ends))

    with pytest.raises(WorkerFailedError, match=r"worker \d failed.* exit code 1 before it had started"):
        run(RunState(Settings()))


@pytest.mark.gloo
def test_a_worker_that_never_connects_to_the_trainer_ends_the_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "act_over_store", demo_workers.ends)

    with pytest.raises(WorkerFailedError, match=r"worker \d failed.* exit code 1"):
        run(RunState(Settings(scheme=SchemeName.DISTRIBUTED)))
