"""`weightsync demo` as a command: options, plain lines, exit codes, and how it can be ended."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import demo_workers
import pytest
from commands import assert_all_gone, marked, running
from test_demo_runs import end_after
from typer.testing import CliRunner

from weightsync import cli
from weightsync.cli._app import build


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("TERM", "dumb")
    return CliRunner()


def complaint(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The text that the command writes to stderr before it exits with 1."""
    monkeypatch.setattr(sys, "argv", ["weightsync", "demo", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--workers", "0"), "the demo needs at least 1 worker, not 0."),
        (("--workers", "1001"), "the demo takes at most 1000 workers, not 1001."),
        (("--seconds", "0"), "the demo needs more than 0 seconds, not 0."),
        (("--seconds", "nan"), "the demo needs more than 0 seconds, not nan."),
        (("--seed", "-1"), "the demo's seed must be 0 or more, and below 2**32, not -1."),
        (("--seed", str(2**60)), f"the demo's seed must be 0 or more, and below 2**32, not {2**60}."),
        (
            ("--kill-worker", "--workers", "1"),
            "--kill-worker needs at least 2 workers: one to kill and one to continue with.",
        ),
    ],
)
def test_bad_options_are_refused_in_one_line(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complaint(monkeypatch, capsys, *arguments) == f"weightsync: {said}\n"


def test_an_unknown_scheme_is_refused_with_the_names_of_all_schemes(runner: CliRunner) -> None:
    shown = runner.invoke(build(), ["demo", "--scheme", "pigeon"])

    assert shown.exit_code == 2
    said = " ".join(shown.output.replace("│", " ").split())  # the box around the message wraps lines
    assert "'pigeon' is not one of 'shared', 'process', 'ray', 'rpc', 'distributed'." in said


def test_a_missing_gymnasium_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    said = complaint(monkeypatch, capsys)

    assert said == "weightsync: weightsync demo needs the extra 'rl': pip install 'weightsync[rl]'.\n"


def test_the_plain_lines_and_the_json_file_report_the_whole_run(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    end_after(20, monkeypatch)
    monkeypatch.setattr("weightsync.cli._demo_display._SECONDS_PER_LINE", 0.02)

    report = tmp_path / "demo.json"
    options = ["--scheme", "process", "--async", "--kill-worker", "--json", str(report)]
    shown = runner.invoke(build(), ["demo", *options])

    assert shown.exit_code == 0, shown.output
    assert "CartPole-v1, 2 workers over pipes, asynchronous sync, seed 0" in shown.output
    assert re.search(
        r"s  training  mean return \d+\.\d  [\d,]+ steps  trainer \w+ v\d+  worker 0 ready v\d+", shown.output
    )
    assert re.search(r"worker 1 \(process \d+\) is killed with SIGKILL half way", shown.output)
    assert re.search(r"report of version \d+: worker 1 is LOST", shown.output)
    assert re.search(r"worker 1 .* killed, and reported LOST", shown.output)
    assert re.search(r"proved: the only remaining worker serves version \d+, by digest", shown.output)
    record = json.loads(report.read_text(encoding="utf-8"))
    assert [worker["verdict"] for worker in record["workers"]] == ["PROVED", "KILLED"]
    assert record["workers"][0]["serves"] == record["sent"]
    assert (record["failures"], record["scheme"]) == ([], "process")


def test_a_digest_that_differs_fails_the_run_with_exit_code_1(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightsync.demo.trainer.act", demo_workers.serves_changed_weights)

    shown = runner.invoke(build(), ["demo", "--scheme", "process", "--seconds", "1"])

    assert shown.exit_code == 1
    assert re.search(r"worker 0 +. +proved", shown.output)
    assert "FAILED: worker 1: serves other weights (the digest of its live model differs)" in shown.output
    assert "proved:" not in shown.output


def training(scheme: str = "shared") -> contextlib.AbstractContextManager[tuple[subprocess.Popen[str], str]]:
    """Run the demo with two workers, and enter the context once it trains. See `running` for what it returns."""
    return running("demo", "--plain", "--workers", "2", "--scheme", scheme, begun="training")


# Over Ray, the demo starts a cluster of its own.
@pytest.mark.parametrize("scheme", ["shared", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])])
def test_ctrl_c_ends_the_demo_and_leaves_no_process(scheme: str) -> None:
    with training(scheme) as (process, mark):
        assert len(marked(mark)) >= 3
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout is not None
        rest = process.stdout.read()

        assert process.wait(60) == 130
        assert rest.splitlines()[-1] == "weightsync: interrupted; all workers have ended."
        assert "Traceback" not in rest
        assert_all_gone(mark)


def test_workers_end_when_the_trainer_is_killed() -> None:
    with training() as (process, mark):
        process.kill()

        assert_all_gone(mark)
