"""The parts of the demo that need no other process."""

from __future__ import annotations

import ast
import contextlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from rich.console import Console

import weightsync
from weightsync import WeightReceiver, demo, local_workers
from weightsync.cli._demo_display import panel
from weightsync.demo import Phase, Proof, RunState, Settings, Verdict, WorkerState
from weightsync.demo.learning import Chunk, Learner, Policy
from weightsync.demo.worker import Rollout

SENT = Proof(7, b"d" * 16)


def chunk(steps: int = 4, environments: int = 2, returns: tuple[float, ...] = ()) -> Chunk:
    rng = np.random.default_rng(0)
    shape = (steps, environments)
    return Chunk(
        observations=rng.normal(size=(*shape, 4)).astype(np.float32),
        next_observations=rng.normal(size=(*shape, 4)).astype(np.float32),
        actions=rng.integers(0, 2, shape),
        log_probabilities=np.full(shape, np.log(0.5), np.float32),
        terminated=np.zeros(shape, np.bool_),
        done=np.zeros(shape, np.bool_),
        versions=np.full(steps, 3),
        returns=returns,
        state="ready",
    )


@pytest.mark.parametrize(
    ("proof", "lost", "killed", "verdict"),
    [
        (SENT, None, False, Verdict.PROVED),
        (Proof(6, SENT.digest), None, False, Verdict.DIFFERS),
        (Proof(None, SENT.digest), None, False, Verdict.DIFFERS),
        (Proof(7, b"e" * 16), None, False, Verdict.DIFFERS),
        (None, None, False, Verdict.SILENT),
        (None, "it died", False, Verdict.LOST),
        (SENT, "it died", False, Verdict.LOST),
        (None, "it died", True, Verdict.KILLED),
        (None, None, True, Verdict.SILENT),
    ],
)
def test_a_workers_verdict_depends_on_its_proof_and_on_whether_it_was_lost_or_killed(
    proof: Proof | None, lost: str | None, killed: bool, verdict: Verdict
) -> None:
    worker = WorkerState(0, proof=proof, lost=lost or "", killed=killed)

    assert worker.judge(SENT)[0] is verdict


def test_the_demo_command_is_imported_without_torch_and_gymnasium() -> None:
    code = "import sys, weightsync.cli.demo; sys.exit('torch' in sys.modules or 'gymnasium' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_demo_uses_only_the_public_api() -> None:
    imported = set()
    for path in (*Path(demo.__file__).parent.glob("*.py"), Path(local_workers.__file__)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "weightsync":
                assert {alias.name for alias in node.names} <= set(weightsync.__all__)
            if isinstance(node, ast.Import | ast.ImportFrom):
                imported |= {node.module} if isinstance(node, ast.ImportFrom) else {each.name for each in node.names}

    ours = {name for name in imported if name.partition(".")[0] == "weightsync"}
    assert "weightsync" in ours
    assert {name for name in ours if not name.startswith("weightsync.demo")} == {"weightsync", local_workers.__name__}


def test_nothing_is_proved_without_a_digest_of_the_trainer() -> None:
    nothing = Proof(7, b"")

    assert WorkerState(0, proof=nothing).judge(nothing) == (
        Verdict.DIFFERS,
        "the trainer has no digest to compare with",
    )


def test_learning_raises_the_probability_of_better_actions() -> None:
    learner = Learner(seed=0)
    lived = chunk(steps=64, environments=8)
    lived.terminated[...] = lived.done[...] = lived.actions == 0  # action 0 always ends an episode
    before = float(np.mean(learner.policy.act(lived.observations[0], learner._generator)[0]))

    for _ in range(10):
        learner.learn([lived])

    after = [float(np.mean(learner.policy.act(row, learner._generator)[0])) for row in lived.observations]
    assert before < 0.55 < np.mean(after) < 0.65  # no further than the clip allows for one chunk


class _AnyVersion:
    """The part of a receiver that a rollout uses."""

    def __init__(self) -> None:
        self.model = Policy()
        self.state = SimpleNamespace(value="ready")

    def serving(self) -> contextlib.nullcontext[int]:
        return contextlib.nullcontext(5)


def test_ended_episodes_restart_and_a_chunk_has_their_last_observations_and_returns() -> None:
    rollout = Rollout(0, Settings(workers=4))

    lived = rollout.collect(cast(WeightReceiver, _AnyVersion()))

    assert lived.observations.shape == (32, 4, 4)
    assert list(lived.versions) == [5] * 32
    going_on = ~lived.done[:-1]
    assert (lived.observations[1:][going_on] == lived.next_observations[:-1][going_on]).all()
    assert (np.abs(lived.observations[1:][~going_on]) <= 0.05).all()  # where an episode begins
    assert (lived.terminated == lived.done).all()  # no episode lasts for 500 steps
    assert (np.abs(lived.next_observations[lived.done][:, [0, 2]]) > 0.2).any(axis=1).all()  # the pole has fallen
    assert len(lived.returns) == lived.done.sum() > 0
    first = [int(np.argmax(column)) + 1 for column in lived.done.T if column.any()]
    assert set(first) <= set(lived.returns)


def test_a_run_state_has_the_elapsed_time_and_the_mean_returns() -> None:
    state = RunState(Settings())
    assert (state.first_mean, state.last_mean) == (None, None)
    state.enter(Phase.TRAINING)
    state.enter(Phase.PROVING)
    trained = state.elapsed
    assert trained == state.elapsed  # the clock has stopped

    state.returns += [10.0] * 15 + [30.0] * 25

    assert state.first_mean == 15.0
    assert state.last_mean == 30.0


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_panel_fits_its_width(width: int) -> None:
    state = RunState(Settings(workers=3))
    state.workers[0].version = 3
    state.notes.append("something happened")
    console = Console(width=width, force_terminal=True, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(panel(state, width))

    lines = captured.get().splitlines()
    assert max(len(line) for line in lines) == width
    assert any("worker 2" in line for line in lines)
    assert width < 80 or any("episodes  " in line for line in lines)
    assert any("something happened" in line for line in lines)
