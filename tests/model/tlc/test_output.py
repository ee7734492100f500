"""The reader of TLC's output, on captured output of TLC."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from weightsync.model.output import Action, Counts, Findings, MessageReader, Progress, StatementKind, Step, Violation

Captured = Callable[[str], tuple[Findings, tuple[str, ...]]]


def test_all_findings_of_a_run_without_errors_are_read(captured: Captured) -> None:
    findings, loose = captured("holds_with_coverage")

    assert findings.completed
    assert findings.temporal
    assert Counts(generated=6, distinct=5, depth=5) == findings.counts
    assert Progress(generated=6, distinct=5, queue=0) == findings.progress
    assert (findings.violations, findings.trace, findings.errors) == ([], [], [])
    assert loose == ()


def test_coverage_counts_each_action(captured: Captured) -> None:
    findings, _ = captured("holds_with_coverage")

    assert [(action.name, action.taken) for action in findings.actions] == [
        ("Init", 1),
        ("Up", 3),
        ("Finish", 2),
        ("Reset", 0),
    ]
    assert Action("Counter", "Finish", 18, 1, 2) == findings.actions[2]


@pytest.mark.parametrize(
    ("name", "violations"),
    [
        ("invariant", [Violation(StatementKind.INVARIANT, "Small")]),
        ("initial_state", [Violation(StatementKind.INVARIANT, "Never")]),
        (
            "action_property_by_place",
            [Violation(StatementKind.ACTION, "line 41, col 23 to line 41, col 34 of module Counter")],
        ),
        ("stuttering", [Violation(StatementKind.TEMPORAL, "")]),
        ("deadlock", [Violation(StatementKind.DEADLOCK, "")]),
        ("assertion", [Violation(StatementKind.ASSERTION, "")]),
        (
            "assumptions",
            [
                Violation(StatementKind.ASSUMPTION, "line 5, col 8 to line 5, col 22 of module Odd"),
                Violation(StatementKind.ASSUMPTION, "line 6, col 8 to line 6, col 31 of module Odd"),
            ],
        ),
    ],
)
def test_violated_properties_are_named(captured: Captured, name: str, violations: list[Violation]) -> None:
    findings, _ = captured(name)

    assert violations == findings.violations
    assert findings.errors
    assert not findings.completed


def test_a_counterexample_has_its_actions_and_values(captured: Captured) -> None:
    findings, _ = captured("invariant")

    assert [
        Step(1, "Init", {"done": "FALSE", "n": "0"}),
        Step(2, "Up", {"done": "FALSE", "n": "1"}),
        Step(3, "Up", {"done": "FALSE", "n": "2"}),
    ] == findings.trace


def test_a_violation_by_the_initial_state_has_that_state(captured: Captured) -> None:
    findings, _ = captured("initial_state")

    assert [Step(1, "Init", {"done": "FALSE", "n": "0"})] == findings.trace


def test_a_counterexample_may_end_in_stuttering(captured: Captured) -> None:
    findings, _ = captured("stuttering")

    assert Step(5, "Stuttering") == findings.trace[-1]
    assert findings.trace[-2].action == "Up"


def test_a_counterexample_may_end_with_back_to_state(captured: Captured) -> None:
    findings, _ = captured("back_to_state")

    assert Step(2, "Back to state") == findings.trace[-1]


def test_large_numbers_have_commas(captured: Captured) -> None:
    findings, _ = captured("progress")

    assert Counts(generated=2235871, distinct=753571, depth=271) == findings.counts
    assert Progress(generated=2235871, distinct=753571, queue=0) == findings.progress


def test_a_message_nested_in_another_is_separated_from_it(captured: Captured) -> None:
    findings, _ = captured("nested")

    assert len(findings.errors) == 1
    assert "ConfigFileException" in findings.errors[0]
    assert "STARTMSG" not in findings.errors[0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("syntax_error", 'Encountered "3" at line 8, column 16 and token "<" '),
        ("unknown_operator", "Unknown operator: `m'."),
    ],
)
def test_text_outside_of_messages_is_kept(captured: Captured, name: str, said: str) -> None:
    _, loose = captured(name)

    assert said in loose


def test_values_over_several_lines_are_kept_whole() -> None:
    reader, findings = MessageReader(), Findings()
    lines = [
        "@!@!@STARTMSG 2217:4 @!@!@",
        "1: <Initial predicate>",
        "/\\ a = [ x |-> 1,",
        "  y |-> 2 ]",
        "/\\ b = 3",
    ]
    for line in [*lines, "@!@!@ENDMSG 2217 @!@!@"]:
        message = reader.feed(line)
        if message is not None:
            findings.take(message)

    assert [Step(1, "Init", {"a": "[ x |-> 1,\n  y |-> 2 ]", "b": "3"})] == findings.trace
