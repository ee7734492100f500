"""`weightsync trace`: each step and message of a recorded run is in the chart once, at its place."""

from __future__ import annotations

import itertools
import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from commands import separate_outputs
from typer.testing import CliRunner

import weightsync
from weightsync.cli._app import build
from weightsync.cli._trace_display import drawn, perfetto, svg
from weightsync.engine import recorder
from weightsync.verify import verify
from weightsync.verify.chart import Chart, RowKind, chart_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Traces of an update that a worker applies, and of one that arrives nowhere, since both ends are closed."""
    folder, scheme = tmp_path_factory.mktemp("traces"), weightsync.MultiProcessWeightSyncScheme()
    ours, theirs = multiprocessing.Pipe()
    with recorder.record(folder):
        sender, receiver = weightsync.WeightSender(scheme), weightsync.WeightReceiver(scheme)
        receiver.register_model(torch.nn.Linear(2, 2))
        receiver.register_worker_transport(theirs)
        sender.add_worker(0, ours)
        sender.send_async(torch.nn.Linear(2, 2))
        receiver.receive(1.0)
        sender.wait_async()
        with pytest.raises(weightsync.StateError):
            sender.wait_async()
        sender.send_async(torch.nn.Linear(2, 2))
        sender.close()
        receiver.close()
    yield folder
    theirs.close()


@pytest.fixture(scope="module")
def chart(folder: Path) -> Chart:
    [run] = verify([folder]).runs
    return chart_of(run)


def test_an_update_is_charted_as_a_send_a_message_a_step_and_an_ack(chart: Chart) -> None:
    assert chart.lanes == ("sender (policy)", "receiver (policy)")
    shown = [(row.kind, row.lane, row.to, row.text) for row in chart.rows]
    wanted = [
        (RowKind.STEP, 0, 0, "SEND_ASYNC -> pending_async"),
        (RowKind.MESSAGE, 0, 1, "Update v1"),
        (RowKind.STEP, 1, 1, "UPDATE -> pending_async"),
        (RowKind.MESSAGE, 1, 0, "Ack v1"),
        (RowKind.STEP, 0, 0, "REPLY"),
        (RowKind.REPORT, 0, 0, "report of version 1"),
        (RowKind.REFUSED, 0, 0, "Wait refused"),
    ]
    rest = iter(shown)
    assert all(row in rest for row in wanted), shown


def test_an_undelivered_message_is_shown_as_lost(chart: Chart) -> None:
    assert [row.text for row in chart.rows if row.kind is RowKind.LOST and "Update" in row.text] == [
        "Update v2, which arrived nowhere"
    ]


def test_rows_are_in_order_of_time_and_no_message_arrives_before_it_was_sent(chart: Chart) -> None:
    times = [row.at for row in chart.rows]
    assert times == sorted(times)
    assert all(0 <= row.sent_at <= row.at for row in chart.rows)


def test_states_of_a_machine_follow_each_other_without_a_gap(chart: Chart) -> None:
    for lane in range(len(chart.lanes)):
        mine = [state for state in chart.states if state.lane == lane]
        assert all(one.end == other.begin and one.name != other.name for one, other in itertools.pairwise(mine))
    assert [state.name for state in chart.states if state.lane == 0][-1] == "closed"


def test_the_terminal_chart_has_a_line_per_row_and_arrows_in_message_direction(chart: Chart) -> None:
    lines = [line.plain for line in drawn(chart, 100)]

    assert len(lines) == len(chart.rows) + 1
    assert all(name.split(" ")[0] in lines[0] for name in chart.lanes)
    [there] = [line for line in lines if "Update v1" in line]
    [back] = [line for line in lines if "Ack v1" in line]
    assert "▶" in there
    assert "◀" in back
    assert len({len(line) for line in lines if "▶" in line or "◀" in line}) == 1


def test_the_svg_is_xml_with_the_text_of_every_row(chart: Chart) -> None:
    root = ElementTree.fromstring(svg(chart))
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]

    assert all(row.text in texts for row in chart.rows)
    assert sum(element.tag.endswith("polygon") for element in root.iter()) == sum(
        row.kind is RowKind.MESSAGE for row in chart.rows
    )


def test_characters_that_xml_or_a_terminal_cannot_show_are_replaced_in_model_names(tmp_path: Path) -> None:
    name = "critic <&> \x00\x1b[31m\u202e"
    with recorder.record(tmp_path), weightsync.MultiProcessWeightSyncScheme() as scheme:
        scheme.init_on_sender(name, num_workers=0, pipes=[], model=torch.nn.Linear(2, 2))
    [run] = verify([tmp_path]).runs
    chart = chart_of(run)

    texts = [element.text for element in ElementTree.fromstring(svg(chart)).iter()]

    assert chart.lanes == ("sender (critic <&> \ufffd\ufffd[31m\ufffd)",)
    assert chart.lanes[0] in texts


def test_the_perfetto_export_has_a_thread_per_machine_and_a_flow_per_message(chart: Chart) -> None:
    events = json.loads(perfetto(chart))["traceEvents"]
    flows = {phase: sorted(event["id"] for event in events if event["ph"] == phase) for phase in "sf"}

    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == list(chart.lanes)
    assert flows["s"] == flows["f"]
    assert len(flows["s"]) == sum(row.kind is RowKind.MESSAGE for row in chart.rows)
    assert {event["tid"] for event in events} == {0, 1}


def test_show_and_export_from_the_command_line(folder: Path, tmp_path: Path) -> None:
    runner, app = CliRunner(), build()

    shown = runner.invoke(app, ["trace", "show", str(folder), "--limit", "3"])
    written = [
        runner.invoke(app, ["trace", "export", str(folder), "--to", str(tmp_path / name)])
        for name in ("a.svg", "a.json")
    ]

    assert shown.exit_code == 0, shown.output
    assert "more rows: --limit 0 shows all" in shown.output
    assert [each.exit_code for each in written] == [0, 0]
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]


def test_json_on_standard_output_has_every_row_and_the_chart_is_on_standard_error(folder: Path, chart: Chart) -> None:
    shown = separate_outputs().invoke(build(), ["trace", "show", str(folder), "--limit", "3", "--json", "-"])

    record = json.loads(shown.stdout)
    assert shown.exit_code == 0
    assert record["machines"] == list(chart.lanes)
    assert [(row["text"], row["from"], row["to"]) for row in record["rows"]] == [
        (row.text, row.lane, row.to) for row in chart.rows
    ]
    assert {state["lane"] for state in record["states"]} == {0, 1}
    assert "more rows" in shown.stderr


@pytest.mark.parametrize("words", [["--run", "7"], []], ids=["no such run", "no trace"])
def test_a_missing_run_or_trace_is_reported_with_exit_code_2(folder: Path, tmp_path: Path, words: list[str]) -> None:
    place = folder if words else tmp_path

    found = CliRunner().invoke(build(), ["trace", "show", str(place), *words])

    assert found.exit_code == 2
    assert ("there is no run 7" if words else "there is no trace") in found.output
