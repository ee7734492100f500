"""A run counts as expected only if its exit code, its counts and the violated property are all as expected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from weightsync.model.manifest import Configuration, Manifest
from weightsync.model.output import Counts, Findings
from weightsync.model.process import Ending, Job, Outcome
from weightsync.model.text import Library
from weightsync.model.verdict import Verdict, explain, judge, vacuity

Captured = Callable[[str], tuple[Findings, tuple[str, ...]]]


class CapturedRuns:
    """Judges captured output as if it came from a run of a configuration."""

    def __init__(self, specs: Path, captured: Captured) -> None:
        self._manifest = Manifest.read(specs)
        self._library = Library(specs)
        self._captured = captured

    def configuration(self, name: str) -> Configuration:
        return self._manifest.select([name])[0]

    def judge(
        self,
        configuration: Configuration,
        run: str,
        exit_code: int | None,
        ending: Ending = Ending.EXITED,
    ) -> Verdict:
        findings, loose = self._captured(run)
        job = Job(self._manifest.folder, configuration.module, configuration.config.text, configuration.workers)
        return judge(configuration, job, Outcome(ending, exit_code, findings, 1.5, loose), self._library)


@pytest.fixture
def captured_runs(specs: Path, captured: Captured) -> CapturedRuns:
    return CapturedRuns(specs, captured)


@pytest.mark.parametrize(
    ("name", "run", "exit_code"),
    [
        ("Holds", "holds_with_coverage", 0),
        ("TooSmall", "invariant", 12),
        ("AlwaysFalse", "initial_state", 12),
        ("WrongWayInside", "action_property_by_place", 13),
        ("Unfair", "stuttering", 13),
        ("Stuck", "deadlock", 11),
        ("FalseAssumption", "assumptions", 10),
    ],
)
def test_a_run_with_the_expected_result_has_no_complaints(
    captured_runs: CapturedRuns, name: str, run: str, exit_code: int
) -> None:
    verdict = captured_runs.judge(captured_runs.configuration(name), run, exit_code)

    assert verdict.complaints == ()
    assert verdict.as_expected


@pytest.mark.parametrize("changed", [{"generated": 7}, {"distinct": 6}, {"depth": 4}])
def test_a_changed_count_is_a_complaint_that_says_how_to_repin(
    captured_runs: CapturedRuns, changed: dict[str, int]
) -> None:
    pinned = replace(Counts(6, 5, 5), **changed)
    configuration = replace(captured_runs.configuration("Holds"), pinned=pinned)

    verdict = captured_runs.judge(configuration, "holds_with_coverage", 0)

    assert len(verdict.complaints) == 1
    assert "python spec/check.py model --pin Holds" in verdict.complaints[0]
    assert Counts(6, 5, 5) == verdict.repin


def test_a_configuration_that_holds_must_have_counts_pinned(captured_runs: CapturedRuns) -> None:
    verdict = captured_runs.judge(replace(captured_runs.configuration("Holds"), pinned=None), "holds_with_coverage", 0)

    assert verdict.complaints == (
        "no counts are pinned; pin the new counts with python spec/check.py model --pin Holds",
    )
    assert Counts(6, 5, 5) == verdict.repin


@pytest.mark.parametrize(
    ("name", "run", "exit_code", "said"),
    [
        ("Holds", "invariant", 12, "everything should hold, but TLC found Small violated (exit code 12)"),
        ("Holds", "invariant", 0, "everything should hold, but TLC found Small violated (exit code 0)"),
        ("Holds", "holds_with_coverage", 255, "no verdict: TLC exited with 255: nothing"),
        (
            "Holds",
            "syntax_error",
            150,
            "no verdict: TLC exited with 150: Parsing or semantic analysis failed. / ***Parse",
        ),
        ("Holds", "evaluation", 75, "no verdict: TLC exited with 75: TLC threw an unexpected exception."),
        ("Holds", "no_such_invariant", 151, "no verdict: TLC exited with 151: The invariant Typo specified"),
        (
            "TooSmall",
            "holds_with_coverage",
            0,
            "TLC should find Small violated, but found no error (exit code 0)",
        ),
        ("TooSmall", "initial_state", 12, "TLC should find Small violated, but found Never violated"),
        ("TooSmall", "invariant", 0, "TLC found Small violated, but exited with 0 instead of 12"),
        (
            "TooSmall",
            "syntax_error",
            150,
            "TLC should find Small violated, but printed: Parsing or semantic analysis",
        ),
        ("Stuck", "stuttering", 13, "TLC should find a deadlock, but found "),
    ],
)
def test_each_unexpected_result_is_one_complaint(
    captured_runs: CapturedRuns, name: str, run: str, exit_code: int, said: str
) -> None:
    verdict = captured_runs.judge(captured_runs.configuration(name), run, exit_code)

    assert verdict.complaints[0].startswith(said)
    assert len(verdict.complaints) == 1
    assert verdict.repin is None


def test_a_run_that_timed_out_is_no_verdict(captured_runs: CapturedRuns) -> None:
    verdict = captured_runs.judge(captured_runs.configuration("Holds"), "progress", None, Ending.TIMED_OUT)

    assert verdict.complaints == ("no verdict: timed out after 2 s (753,571 distinct states so far, 0 in the queue)",)


@pytest.mark.parametrize(
    ("run", "exit_code", "ending", "undecided"),
    [
        ("holds_with_coverage", 0, Ending.EXITED, False),
        ("invariant", 12, Ending.EXITED, False),
        ("syntax_error", 150, Ending.EXITED, True),
        ("syntax_error", 0, Ending.EXITED, True),
        ("progress", -9, Ending.EXITED, True),
        ("progress", None, Ending.TIMED_OUT, True),
    ],
)
def test_a_run_is_undecided_unless_tlc_ended_with_a_verdict(
    captured_runs: CapturedRuns, run: str, exit_code: int | None, ending: Ending, undecided: bool
) -> None:
    assert captured_runs.judge(captured_runs.configuration("Holds"), run, exit_code, ending).undecided is undecided


def test_a_violation_of_one_of_two_temporal_properties_names_both(captured_runs: CapturedRuns) -> None:
    unfair = captured_runs.configuration("Unfair")
    configuration = replace(unfair, config=replace(unfair.config, properties=("Ends", "Settles")))

    verdict = captured_runs.judge(configuration, "stuttering", 13)

    assert "Ends or Settles" in verdict.complaints[0]
    assert "check each in its own configuration" in verdict.complaints[0]


def test_temporal_properties_checked_by_two_workers_do_not_count(captured_runs: CapturedRuns) -> None:
    verdict = captured_runs.judge(replace(captured_runs.configuration("Holds"), workers=2), "holds_with_coverage", 0)

    assert verdict.complaints == ("temporal properties were checked with 2 workers, which can miss a violation",)


def test_the_explanation_shows_the_counterexample_and_the_commands_to_repeat_the_run(
    captured_runs: CapturedRuns,
) -> None:
    explained = "\n".join(explain(captured_runs.judge(captured_runs.configuration("Holds"), "invariant", 12)))

    assert "3. Up\n         n = 2" in explained
    assert "weightsync check Holds" in explained
    assert "weightsync check --model . --write-cfg $T Holds" in explained
    assert "-workers 1 -metadir $T -config $T/Holds.cfg Counter.tla" in explained


def test_an_action_that_no_proof_takes_is_reported(captured_runs: CapturedRuns) -> None:
    holds = captured_runs.judge(captured_runs.configuration("Holds"), "holds_with_coverage", 0)

    assert list(vacuity([holds], [])) == ["Counter.Reset (line 23) is never taken by any proof"]
    assert list(vacuity([], [])) == []


def test_an_action_planted_for_reverts_must_not_be_taken_by_proofs(captured_runs: CapturedRuns) -> None:
    holds = captured_runs.judge(captured_runs.configuration("Holds"), "holds_with_coverage", 0)

    assert list(vacuity([holds], ["Reset"])) == []
    assert list(vacuity([holds], ["Reset", "Up"])) == [
        "Counter.Up (line 12) is planted for reverts, but proofs take it"
    ]
