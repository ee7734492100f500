"""`spec/check.py model --second`: which configurations the second checker gets, and the output. TLC does not run."""

from __future__ import annotations

import contextlib
import importlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import check
import pytest
from modelcheck.second import SecondVerdict, second_line, second_summary
from rich.console import Console
from typer.testing import CliRunner

from weightsync.model import Counts, Manifest, Tier, Verdict
from weightsync.model.output import Findings
from weightsync.model.process import Ending, Job, Outcome

SPECS = Path(__file__).parents[1] / "tlc" / "specs"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "120")
    return CliRunner()


@pytest.fixture
def manifest() -> Manifest:
    return Manifest.read(SPECS)


def verdict(manifest: Manifest, name: str) -> Verdict:
    [configuration] = manifest.select([name])
    job = Job(SPECS, configuration.module, configuration.config.text)
    return Verdict(
        configuration,
        job,
        Outcome(Ending.EXITED, 0, Findings(counts=Counts(2003, 2002, 2002), completed=True), 1.25),
        (),
        (),
    )


def test_the_second_checker_prints_a_line_for_each_configuration_and_names_those_left_out(manifest: Manifest) -> None:
    console = Console(file=io.StringIO(), width=120)
    holds = SecondVerdict(verdict(manifest, "Holds"), Counts(6, 5, 5), 5, 6, seconds=1.25)
    small = SecondVerdict(verdict(manifest, "TooSmall"), None, 4, 3, complaints=("TLC found another",), seconds=0.5)
    large = SecondVerdict(verdict(manifest, "HoldsLarger"), left_out="too large")
    for each in (holds, small, large):
        console.print(second_line(each))
    for line in second_summary([holds, small, large], 2.0):
        console.print(line)

    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "agrees  Holds  5 states, 6 edges  1.2 s  all holds",
        "DISAGREES  TooSmall  4 states, 3 edges (as many as show it)  0.5 s  all holds",
        "left out  HoldsLarger  too large",
        "The second checker agrees with TLC on 1 of 2 configurations (9 edges), in 2 s.",
        "  not examined: HoldsLarger: too large",
    ]


@pytest.fixture
def examined(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The configurations passed to the second checker. Neither checker runs."""
    users, asked = importlib.import_module("weightsync.cli.check"), list[str]()

    class First(users.Suite):
        def run(self, configurations: Any) -> list[Verdict]:
            return [verdict(manifest, found.name) for found in configurations]

    class Second(check.SecondSuite):
        def run(self, verdicts: Any) -> list[SecondVerdict]:
            asked.extend(each.configuration.name for each in verdicts)
            return [SecondVerdict(each, left_out="nobody looks") for each in verdicts]

    monkeypatch.setattr(users, "find_toolchain", lambda: None)
    for module in (users, check):
        monkeypatch.setattr(module, "archived", lambda found, _runs: contextlib.nullcontext(found))
    monkeypatch.setattr(users, "Suite", First)
    monkeypatch.setattr(check, "SecondSuite", Second)
    return asked


@pytest.mark.parametrize("tier", Tier)
def test_the_second_checker_gets_the_configurations_of_its_tier(
    runner: CliRunner, manifest: Manifest, examined: list[str], tier: Tier
) -> None:
    result = runner.invoke(check.app, ["model", "--all", "--second", tier.value, "--model", str(SPECS)])

    assert result.exit_code == 0, result.output
    assert examined == [found.name for found in manifest.tier(tier)]


def change_first_verdict(monkeypatch: pytest.MonkeyPatch, manifest: Manifest, *changes: dict[str, Any]) -> None:
    """Apply the next of ``changes`` to the first configuration's verdict in each run, until none is left."""
    users, left = importlib.import_module("weightsync.cli.check"), list(changes)

    class First(users.Suite):
        def run(self, configurations: Any) -> list[Verdict]:
            found = [verdict(manifest, each.name) for each in configurations]
            return [replace(found[0], **left.pop(0)), *found[1:]] if left else found

    monkeypatch.setattr(users, "Suite", First)


@pytest.mark.usefixtures("examined")
def test_the_last_lines_of_output_show_the_configuration_that_differs(
    runner: CliRunner, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_first_verdict(monkeypatch, manifest, {"complaints": ("the state graph has changed",)})

    result = runner.invoke(check.app, ["model", "--all", "--second", "quick", "--model", str(SPECS)])

    assert result.exit_code == 1
    name = manifest.configurations[0].name
    assert result.output.splitlines()[-2:] == [
        f"DIFFERS  {name}  2,002 distinct states  1.2 s",
        "    the state graph has changed",
    ]


@pytest.mark.usefixtures("examined")
@pytest.mark.parametrize(("times", "exit_code"), [(1, 0), (2, 1)])
def test_a_run_without_a_verdict_is_shown_and_repeated_once(
    runner: CliRunner,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
    times: int,
    exit_code: int,
) -> None:
    killed = {
        "complaints": ("no verdict: TLC exited with -9",),
        "outcome": Outcome(Ending.EXITED, -9, Findings(), 1.25),
    }
    change_first_verdict(monkeypatch, manifest, *[killed] * times)

    result = runner.invoke(check.app, ["model", "--all", "--second", "quick", "--model", str(SPECS)])

    assert result.exit_code == exit_code, result.output
    name = manifest.configurations[0].name
    assert (
        f"Runs without a verdict: 1. They run once more:\nDIFFERS  {name}  1.2 s\n    no verdict: TLC exited with -9\n"
        in result.output
    )


def test_a_tier_of_which_no_configuration_was_chosen_is_refused(
    runner: CliRunner, manifest: Manifest, examined: list[str]
) -> None:
    larger = next(found.name for found in manifest.configurations if found.tier is Tier.ALL)

    result = runner.invoke(check.app, ["model", larger, "--second", "quick", "--model", str(SPECS)])

    assert result.exit_code == 2
    assert "none of these configurations is a quick one: use --second all" in result.stderr
    assert examined == []
