"""Models that are known to be wrong, which detect a checker that accepts everything.

Two faults of TLC 2.18 itself are tested as well, since they are the reason for our rules against them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tlc_support import Recorder

from weightsync.model import Manifest, Suite, Toolchain, due
from weightsync.model.config import Config, config_traps
from weightsync.model.output import StatementKind
from weightsync.model.process import Outcome
from weightsync.model.text import Library, traps

pytestmark = [pytest.mark.tlc, pytest.mark.timeout(180)]

FAULTS = Path(__file__).parent / "faults"
_MOST_TRIES = 16


@pytest.mark.parametrize(
    ("name", "exit_code"),
    [
        ("TooSmall", 12),
        ("AlwaysFalse", 12),
        ("WrongWay", 13),
        ("WrongWayInside", 13),
        ("Overpromises", 13),
        ("Unfair", 13),
        ("Stuck", 11),
        ("FalseAssumption", 10),
    ],
)
def test_tlc_finds_the_expected_violation_of_each_wrong_model(
    toolchain: Toolchain, manifest: Manifest, recorder: Recorder, name: str, exit_code: int
) -> None:
    [verdict] = Suite(toolchain, manifest, recorder).run(manifest.select([name]))

    assert verdict.complaints == ()
    assert verdict.outcome is not None
    assert exit_code == verdict.outcome.exit_code
    assert (due(verdict.configuration),) == verdict.found


def test_tlc_is_wrong_about_except_on_a_literal_and_our_lint_refuses_it(
    run_fault: Callable[[str, int], Outcome],
) -> None:
    outcome = run_fault("LiteralExcept", 1)

    module = Library(FAULTS).module("LiteralExcept")
    assert module is not None
    assert len(list(traps(module))) == 1
    assert (outcome.exit_code, outcome.findings.completed, outcome.findings.violations) == (0, True, [])


def test_with_one_worker_tlc_finds_what_two_may_miss(run_fault: Callable[[str, int], Outcome]) -> None:
    for _ in range(3):
        outcome = run_fault("TwoWorkers", 1)

        assert [violation.kind for violation in outcome.findings.violations] == [StatementKind.TEMPORAL]
        assert outcome.exit_code == 13


def test_tlc_may_be_wrong_with_two_workers_and_our_lint_refuses_them(
    run_fault: Callable[[str, int], Outcome],
) -> None:
    config = Config("Spec", properties=("LitOnce",))
    assert len(list(config_traps(Library(FAULTS), "TwoWorkers", config, workers=2))) == 1

    for _ in range(_MOST_TRIES):
        outcome = run_fault("TwoWorkers", 2)
        assert outcome.exit_code in (0, 13)
        if outcome.findings.completed:
            return
    pytest.skip(f"TLC found the violation in all of {_MOST_TRIES} runs with two workers; it need not")
