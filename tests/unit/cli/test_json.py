"""Every command has `--json`, documents its exit codes, and writes only JSON to standard output."""

from __future__ import annotations

import errno
import inspect
import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import separate_outputs
from typer.main import get_command
from typer.testing import CliRunner

import weightsync
from weightsync import cli
from weightsync.bench import running
from weightsync.bench.results import Results
from weightsync.cli import demo as demo_command
from weightsync.cli import doctor
from weightsync.cli._app import build, with_file_of_json
from weightsync.cli._probes import Finding, Status
from weightsync.demo.state import Proof
from weightsync.engine import recorder
from weightsync.errors import ConfigurationError
from weightsync.soak.run import Soak, Tally, Usage


def commands() -> Iterator[list[str]]:
    """The words of each command, and of each command in a group."""
    context: Any = None
    whole: Any = get_command(build())
    for name in whole.list_commands(context):
        _, found, _ = whole.resolve_command(context, [name])
        under = found.list_commands(context) if hasattr(found, "list_commands") else [""]
        yield from ([name, each] if each else [name] for each in under)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder, scheme = tmp_path_factory.mktemp("traces"), weightsync.MultiProcessWeightSyncScheme()
    ours, theirs = multiprocessing.Pipe()
    with recorder.record(folder), ours, theirs:
        sender = weightsync.WeightSender(scheme)
        sender.add_worker(0, ours)
        sender.send_async(torch.nn.Linear(2, 2))
        sender.close()
    return str(folder)


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_the_help_of_every_command_lists_json_and_the_exit_codes(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "200")

    said = CliRunner().invoke(build(), [*words, "--help"])

    assert said.exit_code == 0, said.output
    assert "--json" in said.output
    assert re.search(r"exit\s+code", said.output), said.output


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_defaults_of_enum_options_are_strings_for_the_lowest_release_of_typer(words: list[str]) -> None:
    context: Any = None
    command: Any = get_command(build())
    for word in words:
        _, command, _ = command.resolve_command(context, [word])

    chosen = {each.name: each.default for each in inspect.signature(command.callback).parameters.values()}

    assert all(isinstance(each, str) for each in chosen.values() if isinstance(each, Enum)), chosen


def test_the_help_of_bench_names_the_plot_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "200")

    said = CliRunner().invoke(build(), ["bench", "--help"])

    assert "Needs weightsync[plot]." in said.output


def test_the_documents_have_every_command_and_its_exit_codes() -> None:
    table = Path(__file__).parents[3].joinpath("docs", "commands.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `weightsync ([a-z ]+)` \| .* \| (0.*) \|$", table, re.MULTILINE)

    assert sorted(name for name, _ in rows) == sorted(" ".join(words) for words in commands())


#: For each command, its other arguments, and a check of its JSON.
JSON_EXAMPLES: Mapping[str, tuple[Callable[[str, Path], list[str]], Callable[[Any], bool]]] = {
    "check": (lambda trace, folder: ["--list", "MCAsync"], lambda data: data[0]["name"] == "MCAsync"),
    "doctor": (lambda trace, folder: [], lambda data: data["healthy"]),
    "verify": (lambda trace, folder: [trace], lambda data: len(data["runs"]) == 1),
    "trace show": (lambda trace, folder: [trace], lambda data: len(data["rows"]) > 1),
    "trace export": (
        lambda trace, folder: [trace, "--to", str(folder / "a.svg")],
        lambda data: (data["format"], data["machines"]) == ("svg", ["sender (policy)"]),
    ),
    "soak": (lambda trace, folder: [], lambda data: data["versions"] == 3),
    "bench": (lambda trace, folder: [], lambda data: data["machine"] == {"cores": "2"} and data["cases"] == []),
    "demo": (lambda trace, folder: [], lambda data: data["sent"]["version"] == 1),
}


def test_every_command_has_a_json_example() -> None:
    assert sorted(JSON_EXAMPLES) == sorted(" ".join(words) for words in commands())


@pytest.fixture
def fixed_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the work of slow commands by fixed results."""
    used = Usage(1, 2, 3, 0)
    monkeypatch.setattr(Soak, "run", lambda *_: Tally(versions=3, before=used, after=used))
    monkeypatch.setattr(running, "run", lambda *_: Results({"cores": "2"}, 0.25, ()))
    monkeypatch.setattr(demo_command, "run", lambda state: setattr(state, "sent", Proof(1, b"d")))
    monkeypatch.setattr(doctor, "PROBES", {name: lambda: Finding(Status.WORKS, "so it is") for name in doctor.PROBES})


@pytest.mark.usefixtures("fixed_results")
@pytest.mark.parametrize("option", [["--json", "-"], ["--json"]], ids=" ".join)
@pytest.mark.parametrize("name", JSON_EXAMPLES)
def test_standard_output_has_only_json_and_standard_error_the_readable_text(
    name: str, option: list[str], trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    arguments, holds = JSON_EXAMPLES[name]

    ran = separate_outputs().invoke(build(), [*name.split(), *arguments(trace, tmp_path), *option])

    assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.exception
    assert holds(json.loads(ran.stdout)), ran.stdout
    assert ran.stderr


_NOISY = """
import os, subprocess
from weightsync.cli import doctor, main
from weightsync.cli._probes import Finding, Status

def noise():
    print("from Python")
    os.write(1, b"from C\\n")
    subprocess.run(["echo", "from a child"])
    return Finding(Status.WORKS, "so it is")

doctor.PROBES = {name: noise for name in doctor.PROBES}
main()
"""


def test_output_of_libraries_and_child_processes_is_not_mixed_into_the_json() -> None:
    ran = subprocess.run([sys.executable, "-c", _NOISY, "doctor", "--json"], capture_output=True, text=True, check=True)

    assert json.loads(ran.stdout)["healthy"]
    assert all(each in ran.stderr for each in ("from Python", "from C", "from a child"))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("soak --json --minutes 1", "soak --json - --minutes 1"),
        ("verify --json - traces", "verify --json - traces"),
        ("verify --json file traces", "verify --json file traces"),
        ("verify --json -- traces --json", "verify --json - -- traces --json"),
        ("--json", "--json -"),
    ],
)
def test_json_without_a_file_means_standard_output(given: str, meant: str) -> None:
    assert with_file_of_json(given.split()) == meant.split()


@pytest.mark.usefixtures("fixed_results")
@pytest.mark.parametrize("name", JSON_EXAMPLES)
def test_unwritable_results_are_a_one_line_error_with_exit_code_1(
    name: str, trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, _ = JSON_EXAMPLES[name]
    nowhere = str(tmp_path / "no" / "folder.json")
    monkeypatch.setattr("sys.argv", ["weightsync", *name.split(), *arguments(trace, tmp_path), "--json", nowhere])

    with pytest.raises(SystemExit) as end:
        cli.main()

    assert end.value.code == 1
    assert f"weightsync: the results cannot be written to {nowhere}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["soak", "bench", "demo"])
@pytest.mark.parametrize("nowhere", ["no/folder.json", ".", "long" * 100, "file/folder.json"])
def test_an_unwritable_path_for_results_is_refused_before_the_command_runs(
    name: str, nowhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for begin in ("weightsync.bench.running.run", "weightsync.soak.run.Soak.run", "weightsync.cli.demo.run"):
        monkeypatch.setattr(begin, lambda *_: pytest.fail("the command ran"))
    (tmp_path / "file").touch()

    refused = CliRunner().invoke(build(), [name, "--json", str(tmp_path / nowhere)])

    assert isinstance(refused.exception, ConfigurationError), refused.output
    assert f"cannot be written to {tmp_path / nowhere}" in str(refused.exception)


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("option", ["", "--json -"])
def test_a_command_works_with_closed_standard_streams(closed: str, option: str, trace: str, tmp_path: Path) -> None:
    drawn = tmp_path / "run.svg"
    command = f'exec "$0" -m weightsync trace export "$1" --to "$2" {option} {closed}'

    shell = ["sh", "-c", command, sys.executable, trace, str(drawn)]
    ran = subprocess.run(shell, stderr=subprocess.PIPE, text=True, check=False)

    assert (ran.returncode, "Traceback" in ran.stderr, drawn.exists()) == (0, False, True), ran.stderr


def test_output_to_a_full_disk_is_a_one_line_error_with_exit_code_1() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "weightsync", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )

    assert (ran.returncode, ran.stderr) == (
        1,
        "weightsync: standard output cannot be written: No space left on device.\n",
    )


@pytest.mark.parametrize(
    "error", [ConnectionRefusedError(errno.ECONNREFUSED, "refused"), OSError(errno.ENOSPC, "full", "/tmp/x")]
)
def test_errors_unrelated_to_standard_output_are_raised_and_print_nothing(
    error: OSError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "_run", fail)

    with pytest.raises(type(error)) as raised:
        cli.main()
    assert raised.value is error
    assert capsys.readouterr() == ("", "")


def test_characters_missing_from_the_encoding_are_replaced_in_charts(trace: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "weightsync", "trace", "show", trace],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (shown.returncode, shown.stderr) == (0, "")
    assert "? JOIN" in shown.stdout
