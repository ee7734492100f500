"""Parts of a model that no run evaluates are read from TLC's coverage, and named by definition and text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tlc_support import Recorder

from weightsync.errors import ConfigurationError
from weightsync.model import Coverage, Manifest, Suite, Toolchain, idle
from weightsync.model.manifest import Idle
from weightsync.model.output import Findings, MessageReader
from weightsync.model.places import Expression, TextRange, Unreached, read_expression, unreached
from weightsync.model.text import Library

TEXT = """\
---- MODULE M ----
A(x) == /\\ x > 0
        /\\ IF x = 5 THEN B
           ELSE C
B == x + 1
====
"""


@pytest.fixture
def library(tmp_path: Path) -> Library:
    (tmp_path / "M.tla").write_text(TEXT)
    return Library(tmp_path)


def seen(depth: int, line: int, first: int, last: int, count: int) -> Expression:
    return Expression(depth, TextRange("M", line, first, line, last), count)


def missed(library: Library, *runs: Sequence[Expression]) -> list[tuple[str, str]]:
    return [(each.definition, each.text) for each in unreached(runs, library, {"M"})]


def test_a_line_of_tlcs_coverage_is_parsed() -> None:
    assert read_expression("  ||line 3, col 14 to line 4, col 18 of module M: 7") == Expression(
        2, TextRange("M", 3, 14, 4, 18), 7
    )
    assert read_expression("<A line 3, col 14 to line 4, col 18 of module M>: 1:2") is None


def test_only_the_last_coverage_report_is_kept() -> None:
    reader, findings = MessageReader(), Findings()
    line = "  line 2, col 12 to line 2, col 16 of module M: 3"
    for code, text in ((2201, "start"), (2221, line), (2201, "start again"), (2221, line)):
        for each in (f"@!@!@STARTMSG {code}:0 @!@!@", text, f"@!@!@ENDMSG {code} @!@!@"):
            message = reader.feed(each)
            if message is not None:
                findings.take(message)

    assert findings.expressions == [seen(0, 2, 12, 16, 3)]


def test_an_expression_that_is_never_evaluated_is_named_once_as_a_whole(library: Library) -> None:
    branch = seen(0, 4, 17, 17, 0)
    run = [seen(0, 2, 12, 16, 3), seen(0, 3, 15, 19, 3), Expression(0, TextRange("M", 3, 26, 4, 17), 0), branch]

    assert missed(library, run) == [("A", "B ELSE C")]


def test_an_expression_that_any_run_evaluates_is_reached(library: Library) -> None:
    idle_run = [seen(0, 3, 15, 19, 3), seen(0, 4, 17, 17, 0)]
    busy_run = [seen(0, 3, 15, 19, 3), seen(0, 4, 17, 17, 1)]

    assert missed(library, idle_run) == [("A", "C")]
    assert missed(library, idle_run, busy_run) == []


def test_an_evaluated_definition_whose_parts_tlc_does_not_list_is_reached(library: Library) -> None:
    elsewhere = [seen(0, 5, 6, 10, 0)]
    whole = [seen(0, 3, 26, 26, 4)]

    assert missed(library, elsewhere) == [("B", "x + 1")]
    assert missed(library, elsewhere, whole) == []


def test_only_the_given_modules_are_searched_for_unreached_expressions(library: Library) -> None:
    assert list(unreached([[seen(0, 4, 17, 17, 0)]], library, {"N"})) == []
    assert list(unreached([[seen(0, 4, 17, 17, 0)]], library, {"M"})) == [Unreached("A", "C", 4)]


@pytest.mark.tlc
@pytest.mark.timeout(180)
def test_an_expression_that_is_never_evaluated_is_a_complaint_unless_it_is_listed_as_idle(
    toolchain: Toolchain, manifest: Manifest, recorder: Recorder
) -> None:
    verdicts = Suite(toolchain, manifest, recorder, Coverage.COUNTED).run(manifest.select(["Holds"]))
    complaints = list(idle(verdicts, manifest))
    known = (Idle("Reset", "x > 5", "never so high"), Idle("Reset", "no such text", "gone"))

    assert [each for each in complaints if each.startswith("Reset")] == complaints
    assert complaints
    text = complaints[0].partition("evaluates ")[2]
    after = list(idle(verdicts, replace(manifest, idle=(*known, Idle("Reset", text, "why")))))
    assert "Reset: listed as idle, but some proof evaluates it or it no longer exists: no such text" in after
    assert complaints[0] not in after


def test_an_expression_that_is_listed_as_idle_needs_a_reason(specs: Path) -> None:
    path = specs / "manifest.toml"
    path.write_text(path.read_text() + '\n[coverage]\nidle = [{ definition = "A", text = "b" }]\n')

    with pytest.raises(ConfigurationError, match=r"coverage\.idle"):
        Manifest.read(specs)
