"""`weightsync check` without TLC: help, listing, and the messages if a tool is missing."""

from __future__ import annotations

import importlib
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import separate_outputs
from rich.console import Console
from typer.testing import CliRunner

from weightsync import cli
from weightsync.cli import _check_display as display
from weightsync.cli._app import COMMANDS, build
from weightsync.errors import ConfigurationError
from weightsync.model import Counts, Manifest, Progress, ToolMissingError, Verdict
from weightsync.model.output import Findings
from weightsync.model.process import Ending, Job, Outcome

ROOT = Path(__file__).parents[3]
SPECS = ROOT / "tests" / "model" / "tlc" / "specs"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "120")
    return separate_outputs()


@pytest.fixture
def manifest() -> Manifest:
    return Manifest.read(SPECS)


def verdict(manifest: Manifest, name: str, complaints: tuple[str, ...] = ()) -> Verdict:
    [configuration] = manifest.select([name])
    findings = Findings(counts=Counts(2003, 2002, 2002))
    job = Job(SPECS, configuration.module, configuration.config.text)
    return Verdict(configuration, job, Outcome(Ending.EXITED, 0, findings, 1.25), (), complaints)


def test_help_names_the_commands_and_the_exit_codes(runner: CliRunner) -> None:
    top = runner.invoke(build(), ["--help"])
    check = runner.invoke(build(), ["check", "-h"])

    assert (top.exit_code, check.exit_code) == (0, 0)
    assert "Check the protocol's model with TLC." in top.output
    assert "1 if one differs" in check.output
    for option in ("--all", "--list", "--coverage", "--json", "--write-cfg", "--model"):
        assert option in check.output
    for option in ("--mutants", "--share", "--pin", "--second"):
        assert option not in check.output, "that is for the model's maintainers: spec/check.py"


def test_write_cfg_writes_what_tlc_is_given_and_runs_nothing(
    runner: CliRunner, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("weightsync.cli.check"), "find_toolchain", None)
    one, everything = tmp_path / "one", tmp_path / "all"

    named = runner.invoke(build(), ["check", "--model", str(SPECS), "--write-cfg", str(one), "Stuck"])
    result = runner.invoke(build(), ["check", "--model", str(SPECS), "--write-cfg", str(everything)])

    assert (named.exit_code, result.exit_code) == (0, 0), result.output
    assert [path.name for path in one.iterdir()] == ["Stuck.cfg"]
    written = {path.stem: path.read_text() for path in everything.iterdir()}
    assert written == {found.name: found.config.text for found in manifest.configurations}


def test_a_folder_that_cannot_be_written_to_is_named(runner: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    result = runner.invoke(build(), ["check", "--model", str(SPECS), "--write-cfg", str(tmp_path / "file")])

    assert isinstance(result.exception, ConfigurationError)
    assert "The .cfg files cannot be written to" in str(result.exception)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_is_introduced_by_the_first_line_of_its_docstring(name: str) -> None:
    found = getattr(importlib.import_module(f"weightsync.cli.{name}"), name)
    text = found.info.help if isinstance(found, typer.Typer) else found.__doc__

    assert text.splitlines()[0] == COMMANDS[name]


def test_the_help_of_check_does_not_import_torch() -> None:
    code = "import sys; from weightsync.cli._app import build; build()(['check', '-h'], standalone_mode=False)"
    script = f"{code}; sys.exit('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_the_version_is_reported(runner: CliRunner) -> None:
    result = runner.invoke(build(), ["--version"])

    assert result.exit_code == 0
    assert result.output.startswith("weightsync ")


def test_list_shows_all_configurations_and_runs_none(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("weightsync.cli.check"), "find_toolchain", pytest.fail)

    result = runner.invoke(build(), ["check", "--list", "--model", str(SPECS)])

    assert result.exit_code == 0
    for found in Manifest.read(SPECS).configurations:
        assert found.name in result.output
    assert "Small violated" in result.output


def test_a_missing_tool_is_a_one_line_error_with_exit_code_2(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Any:
        raise ToolMissingError("Java is missing: install it.")

    monkeypatch.setattr(importlib.import_module("weightsync.cli.check"), "find_toolchain", missing)

    result = runner.invoke(build(), ["check", "--model", str(SPECS)])

    assert result.exit_code == 2
    assert result.stderr == "weightsync: Java is missing: install it.\n"
    assert result.stdout == ""


def test_an_unknown_configuration_is_an_error_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["weightsync", "check", "Nix", "--model", str(SPECS)])

    with pytest.raises(SystemExit) as ended:
        cli.main()

    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said == "weightsync: There is no configuration Nix: weightsync check --list shows all of them.\n"


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_extra_is_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package or name.startswith("weightsync.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(sys, "argv", ["weightsync", "check"])

    with pytest.raises(SystemExit) as ended:
        cli.main()

    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said == "weightsync: The command line needs the extra 'cli': pip install 'weightsync[cli]'.\n"


def test_without_a_terminal_there_is_a_line_for_each_configuration(manifest: Manifest) -> None:
    console = Console(file=io.StringIO(), width=120)
    with display.Display(console, 2) as shown:
        shown.started(manifest.select(["Holds"])[0])
        shown.ended(verdict(manifest, "Holds"))
        shown.ended(verdict(manifest, "TooSmall", ("not so",)))

    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "2 configurations to check",
        "[1/2] ok  Holds  2,002 distinct states  1.2 s",
        "[2/2] DIFFERS  TooSmall  2,002 distinct states  1.2 s",
        "    not so",
    ]


def test_on_a_terminal_a_row_shows_the_progress_of_a_run(manifest: Manifest) -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    [larger] = manifest.select(["HoldsLarger"])
    shown = display.Display(console, 1)
    shown.started(larger)
    with console.capture() as starting:
        console.print(shown._render())
    shown.progressed(larger, Progress(1500, 1000, 30))
    with console.capture() as running:
        console.print(shown._render())
    shown.progressed(larger, Progress(2003, 2002, 0))
    with console.capture() as ending:
        console.print(shown._render())

    assert "exploring" in starting.get()
    assert "1,000 states, 30 in the queue" in running.get()
    assert "2,002 states, checking temporal properties" in ending.get()


def test_the_live_display_can_be_entered_and_left(manifest: Manifest) -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with display.Display(console, 1) as shown:
        shown.started(manifest.select(["Holds"])[0])
        shown.ended(verdict(manifest, "Holds"))

    assert isinstance(console.file, io.StringIO)
    assert "2,002 distinct states" in console.file.getvalue()


def test_the_table_of_results_lists_guarantees_and_verdicts(manifest: Manifest) -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(display.results([verdict(manifest, "Holds"), verdict(manifest, "TooSmall", ("no",))]))

    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert "G1 G10" in said
    assert "holds" in said
    assert "DIFFERS" in said
