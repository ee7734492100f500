"""The command `weightsync verify`: its exit codes, its output, its JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from recorded import lines_of, model, recorded, recorded_in_two_files, write
from typer.testing import CliRunner, Result

import weightsync
from weightsync.cli._app import build

CONFORMS, DOES_NOT_CONFORM, NO_VERDICT = 0, 1, 2


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("good"))


@pytest.fixture
def forged(good: Path, tmp_path: Path) -> tuple[Path, int]:
    """A trace in which an ack names another version, and that line's number."""
    lines = lines_of(good)
    number = next(i for i, line in enumerate(lines) if line.get("message", {}).get("is") == "Ack")
    lines[number]["message"]["version"] = 7
    return write(tmp_path / good.name, lines), number + 1


def run(*arguments: object) -> Result:
    return CliRunner(env={"TERM": "dumb", "COLUMNS": "200"}).invoke(build(), ["verify", *map(str, arguments)])


def test_a_conforming_trace_exits_with_0_and_prints_the_number_of_files(good: Path) -> None:
    result = run(good)

    assert result.exit_code == CONFORMS
    assert "1 files: all conform." in result.output


def test_a_folder_argument_verifies_the_traces_in_it(good: Path) -> None:
    assert run(good.parent).output.replace(str(good.parent), "") == run(good).output.replace(str(good), "")


def test_a_file_that_is_given_twice_is_read_once(good: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(good.parent)

    result = run(good.parent, good.parent / ".." / good.parent.name, tmp_path / "link", good)

    assert result.exit_code == CONFORMS
    assert "1 files: all conform." in result.output


def test_the_first_wrong_line_is_shown_in_words_with_what_the_model_allows(forged: tuple[Path, int]) -> None:
    file, number = forged
    result = run(file)

    assert result.exit_code == DOES_NOT_CONFORM
    assert f"does not conform: {file.name}:{number}" in result.output
    shown = result.output[result.output.index(f"{file}:{number}: ") :]
    assert "no effect of a step asks for this" in shown
    assert "the trace:  receiver of model 'policy' sends Ack(incarnation=.." in shown
    assert "the model:  now Ack of version 1 is sent over link 1" in shown


@pytest.mark.parametrize(
    ("old", "new"), [('"what":"sent"', '"what":"sens"'), ('"before":"UNINITIALIZED"', '"before":["UNINITIALIZED"]')]
)
def test_a_damaged_line_is_shown_even_with_invalid_values(good: Path, tmp_path: Path, old: str, new: str) -> None:
    file = tmp_path / good.name
    text = good.read_text(encoding="utf-8")
    file.write_text(text.replace(old, new, 1), encoding="utf-8")
    number = text[: text.index(old)].count("\n") + 1

    result = run(file)

    assert (result.exit_code, type(result.exception)) == (DOES_NOT_CONFORM, SystemExit)
    assert f"{file}:{number}: it " in result.output


@pytest.mark.parametrize("depth", [500, 100_000])
def test_a_line_with_too_deeply_nested_values_does_not_conform(good: Path, tmp_path: Path, depth: int) -> None:
    file = tmp_path / good.name
    deep = f'"message":{{"deep":{"[" * depth}{"]" * depth},'
    file.write_text(good.read_text(encoding="utf-8").replace('"message":{', deep, 1), encoding="utf-8")

    result = run(file)

    assert (result.exit_code, type(result.exception)) == (DOES_NOT_CONFORM, SystemExit)


def test_the_json_verdict_names_the_same_file_and_line(forged: tuple[Path, int], tmp_path: Path) -> None:
    file, number = forged
    result = run(file, "--json", tmp_path / "verdict.json")
    verdict = json.loads((tmp_path / "verdict.json").read_text(encoding="utf-8"))

    assert result.exit_code == DOES_NOT_CONFORM
    assert verdict["conforms"] is False
    [found] = {(each["file"], each["line"]) for each in verdict["runs"][0]["findings"][:1]}
    assert found == (str(file), number)


def test_json_to_standard_output_is_printed_alone(good: Path) -> None:
    result = run(good, "--json", "-")

    assert json.loads(result.stdout)["conforms"] is True


@pytest.mark.parametrize("what", ["nothing", "an empty folder", "no trace", "a link to nowhere", "deep" * 100])
def test_a_path_without_a_readable_trace_exits_with_2_and_is_named(tmp_path: Path, what: str) -> None:
    place = tmp_path / what
    if what == "an empty folder":
        place.mkdir()
    if what == "no trace":
        place.write_text("hello\n", encoding="utf-8")
    if what == "a link to nowhere":
        place.mkdir()
        (place / "trace-1-a.jsonl").symlink_to("nowhere")
    result = run(place)

    assert result.exit_code == NO_VERDICT
    assert what in result.stderr


@pytest.fixture
def role_files(tmp_path: Path) -> dict[str, Path]:
    """A trainer's file and a worker's, by role."""
    trainer, worker = recorded_in_two_files(tmp_path)
    return {"sender": trainer, "receiver": worker}


@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_a_missing_file_fails_the_verification_only_with_complete(role_files: dict[str, Path], role: str) -> None:
    alone = run(role_files[role])
    whole = run(role_files[role], "--complete")

    assert (alone.exit_code, whole.exit_code) == (CONFORMS, DOES_NOT_CONFORM)
    assert "none of the given files has the machine that sent it" in whole.output
    assert run(*role_files.values(), "--complete").exit_code == CONFORMS


def test_complete_requires_no_file_of_a_worker_reached_by_plain_calls(tmp_path: Path) -> None:
    file = recorded(tmp_path, send_by_plain_calls)

    assert run(file, "--complete").exit_code == CONFORMS


def send_by_plain_calls() -> None:
    class Postbox:
        def send_weights(self, model_id: str, weights: Any) -> None:
            """Accept weights. That the call returns is all that is known of the worker."""

        def receive_weights(self, timeout: float = 1.0) -> None:
            """Receive nothing."""

        def check_connection(self) -> bool:
            return True

    class Scheme(weightsync.WeightSyncScheme):
        def create_transport(self, pipe_or_context: Any) -> Any:
            return pipe_or_context

    with Scheme().create_sender() as sender:
        sender.register_worker(0, Postbox())
        assert sender.send(model(1.0)).ok
