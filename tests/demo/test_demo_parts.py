"""The parts of the demo that need no other process."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from weightsync.cli._demo_chart import chart
from weightsync.cli._demo_display import panel
from weightsync.demo import Board, Fate, Settings, Verdict
from weightsync.demo.environments import Environments
from weightsync.demo.proof import judge
from weightsync.demo.training import Training
from weightsync.demo.wire import Chunk, Proof, Status

SENT = Proof(7, b"d" * 16)


def chunk(steps: int = 4, environments: int = 2, returns: tuple[float, ...] = ()) -> Chunk:
    rng = np.random.default_rng(0)
    shape = (steps, environments)
    return Chunk(
        observations=rng.normal(size=(*shape, 4)).astype(np.float32),
        following=rng.normal(size=(*shape, 4)).astype(np.float32),
        actions=rng.integers(0, 2, shape),
        log_probabilities=np.full(shape, np.log(0.5), np.float32),
        fallen=np.zeros(shape, np.bool_),
        ended=np.zeros(shape, np.bool_),
        versions=np.full(steps, 3),
        returns=returns,
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
def test_a_worker_is_judged_by_what_it_answers(
    proof: Proof | None, lost: str | None, killed: bool, verdict: Verdict
) -> None:
    proofs = {0: proof} if proof else {}
    [fate] = judge([0], frozenset({0} if killed else ()), {0: lost} if lost else {}, proofs, SENT)

    assert fate.verdict is verdict


def test_the_display_is_there_before_torch_is() -> None:
    code = "import sys, weightsync.cli.demo; sys.exit('torch' in sys.modules or 'gymnasium' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_is_proved_against_no_digest() -> None:
    assert judge([0], frozenset(), {}, {0: Proof(7, b"")}, Proof(7, b"")) == [
        Fate(0, Verdict.DIFFERS, Proof(7, b""), "the trainer has no digest to compare with")
    ]


def test_learning_raises_the_odds_of_what_did_better_than_expected() -> None:
    training = Training(seed=0)
    lived = chunk(steps=64, environments=8)
    lived.fallen[...] = lived.ended[...] = lived.actions == 0  # action 0 always ends it
    before = float(np.mean(training.policy.act(lived.observations[0], training._order)[0]))

    for _ in range(10):
        training.learn([lived])

    after = [float(np.mean(training.policy.act(row, training._order)[0])) for row in lived.observations]
    assert before < 0.55 < np.mean(after) < 0.65  # no further than the clip allows in one go


def test_environments_begin_anew_and_say_what_was_before() -> None:
    environments = Environments(3, seed=0)
    returns: list[float] = []
    for _ in range(60):
        following, fallen, ended, finished = environments.step(np.zeros(3, np.int64))
        returns += finished
        assert (environments.observations[~ended] == following[~ended]).all()
        assert (np.abs(environments.observations[ended]) <= 0.05).all()
        assert (fallen == ended).all()
    environments.close()

    assert returns
    assert all(8 <= each <= 12 for each in returns)


def test_the_board_shows_what_it_was_told() -> None:
    board = Board(Settings())
    board.heard(0, Status("ready", 3))
    board.heard(1, chunk(returns=(10.0, 30.0)))
    board.trained(512, 1.0)

    view = board.view()

    assert [(worker.state, worker.version, worker.episodes) for worker in view.workers] == [
        ("ready", 3, 0),
        ("starting", 3, 2),
    ]
    assert view.curve == ((512, 20.0),)
    assert board.mean_return is None  # it takes 20 episodes
    assert board.first_mean == 20.0


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_panel_fits_its_width(width: int) -> None:
    board = Board(Settings(workers=3))
    board.heard(0, Status("ready", 3))
    board.note("something happened")
    console = Console(width=width, force_terminal=True, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(panel(board.view(), width, 30))

    lines = captured.get().splitlines()
    assert max(len(line) for line in lines) == width
    assert any("worker 2" in line for line in lines)
    assert width < 80 or any("episodes  " in line for line in lines)
    assert any("something happened" in line for line in lines)


def test_a_rising_curve_rises() -> None:
    lines = [line.plain for line in chart([(x, 5.0 * x) for x in range(1, 101)], 500.0, 10, 4)]

    assert all(len(line) == 10 for line in lines)
    leftmost = [min(i for i, cell in enumerate(line) if cell != "⠀") for line in lines]
    assert leftmost == sorted(leftmost, reverse=True)
    assert leftmost[-1] == 0
