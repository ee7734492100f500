"""Corrupted traces are refused, and the wrong line is named.

An edited line is found by its seal. A line that a forger has sealed anew is found by what it says.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recorded import Lines, judged, lines_of, recorded, write

from weightsync.engine import recorder
from weightsync.verify import UnreadableTraceError, Verdict
from weightsync.verify.lines import read_file


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("good"))


@pytest.fixture
def file(good: Path, tmp_path: Path) -> Path:
    copied = tmp_path / good.name
    copied.write_bytes(good.read_bytes())
    return copied


def first(verdict: Verdict) -> int:
    """The number of the first line that is refused; 0: none is."""
    return min((found.line.number for found in verdict.findings), default=0)


def damaged(file: Path) -> int:
    """The number of the first line that is not as it was written; 0: all lines are."""
    damage = read_file(file).damage
    return 0 if damage is None else damage.line.number


def test_the_recorded_run_conforms_and_so_does_a_resealed_copy(file: Path) -> None:
    assert judged(file).findings == ()
    write(file, lines_of(file))
    assert judged(file).findings == ()


# ------------------------------------------------------------------------------------ by hand, with an editor


def edited(file: Path, number: int, old: str, new: str) -> None:
    raw = file.read_text(encoding="utf-8").splitlines(keepends=True)
    assert old in raw[number - 1]
    raw[number - 1] = raw[number - 1].replace(old, new, 1)
    file.write_text("".join(raw), encoding="utf-8")


def find(lines: Lines, **wanted: Any) -> int:
    """The number of the first line with these values."""
    return next(i for i, line in enumerate(lines, 1) if all(line.get(name) == each for name, each in wanted.items()))


def test_each_edited_line_is_reported_by_its_number(file: Path) -> None:
    raw = file.read_text(encoding="utf-8").splitlines(keepends=True)
    for number in range(2, len(raw) + 1):
        changed = list(raw)
        changed[number - 1] = changed[number - 1].replace('"t":', '"t": ', 1)
        file.write_text("".join(changed), encoding="utf-8")
        assert damaged(file) == number


def test_each_deleted_line_is_reported_at_the_next_line(file: Path) -> None:
    raw = file.read_text(encoding="utf-8").splitlines(keepends=True)
    for number in range(2, len(raw)):
        file.write_text("".join(raw[: number - 1] + raw[number:]), encoding="utf-8")
        assert damaged(file) == number


def test_each_duplicated_line_is_reported_at_its_copy(file: Path) -> None:
    raw = file.read_text(encoding="utf-8").splitlines(keepends=True)
    for number in range(2, len(raw) + 1):
        file.write_text("".join(raw[:number] + raw[number - 1 :]), encoding="utf-8")
        assert damaged(file) == number + 1


def test_two_swapped_lines_are_reported_at_the_first(file: Path) -> None:
    raw = file.read_text(encoding="utf-8").splitlines(keepends=True)
    for number in range(2, len(raw)):
        swapped = [*raw[: number - 1], raw[number], raw[number - 1], *raw[number + 1 :]]
        file.write_text("".join(swapped), encoding="utf-8")
        assert damaged(file) == number


@pytest.mark.parametrize("cut", [2, 40])
def test_a_truncated_last_line_is_accepted_because_its_process_may_have_been_killed(file: Path, cut: int) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:-cut])

    assert judged(file).findings == ()
    assert len(read_file(file).lines) == whole.count(b"\n") - 1


def test_a_last_line_without_its_newline_is_verified(file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert judged(file).findings == ()
    assert len(read_file(file).lines) == whole.count(b"\n")

    before, last = whole[:-1].rsplit(b"\n", 1)
    file.write_bytes(before + b"\n" + last.replace(b'"t":', b'"T":'))
    assert [found.line.number for found in judged(file).damages] == [whole.count(b"\n")]


def test_a_trace_that_ends_amid_any_line_conforms(file: Path) -> None:
    raw = file.read_bytes().splitlines(keepends=True)
    for number in range(1, len(raw)):
        file.write_bytes(b"".join(raw[:number]) + raw[number][:-9])
        assert judged(file).findings == ()


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_truncated_line_before_other_lines_is_reported_by_its_number(file: Path, cut: int) -> None:
    raw = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*raw[:9], raw[9][:-cut], *raw[10:]]))

    assert [found.line.number for found in judged(file).damages] == [10]


def test_an_edited_state_is_reported_with_the_rows_that_the_model_allows(file: Path) -> None:
    lines = lines_of(file)
    number = find(lines, what="step", input="WAIT_SETTLED")
    edited(file, number, '"after":"READY"', '"after":"CLOSED"')

    [finding] = [found for found in judged(file).findings if found.line.number == number]

    assert "changed after it was written" in finding.what
    assert "after is 'CLOSED', but must be 'READY'" in finding.what
    assert any("leads to READY" in allowed for allowed in finding.allowed)
    assert any(allowed.startswith("rows of a sender in pending_async: ") for allowed in finding.allowed)


@pytest.mark.parametrize("text", ["", "{}\n", "not a trace\n", '{"what":"header","format":99,"protocol":2}\n'])
def test_a_file_that_is_not_a_trace_raises_unreadable_trace_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "trace-1-a.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UnreadableTraceError, match=r"trace-1-a\.jsonl"):
        judged(file)


# ------------------------------------------------------------------------- by a forger who knows the seals


@pytest.mark.parametrize(("name", "value"), [("what", []), ("t", 10**400), ("t", -1), ("role", []), ("model", {})])
def test_impossible_values_in_a_resealed_trace_are_refused_at_their_line(file: Path, name: str, value: object) -> None:
    lines = lines_of(file)
    number = find(lines, what="sent")
    lines[number - 1] = {**lines[number - 1], name: value}

    assert first(judged(write(file, lines))) == number


#: Kinds of lines that a trace does not need: if one is dropped, no other line shows that it was there.
OPTIONAL_KINDS = {
    "refused",  # a refusal changes nothing
    "note",
    "end",
    "failed",  # the loss that follows is a separate event
    "reported",  # a report changes nothing; only after a deadline or an abandon is it required (see below)
}


def test_each_required_line_deleted_from_a_resealed_trace_is_noticed_and_a_step_at_a_later_line(file: Path) -> None:
    lines = lines_of(file)
    refused = {number: _dropped(file, lines, number) for number in range(1, len(lines))}
    needed = [number for number in refused if not _is_optional(lines, number)]

    assert [lines[number]["what"] for number in needed if not refused[number]] == []
    steps = [number for number in needed if lines[number]["what"] == "step"]
    assert steps
    assert [number for number in steps if refused[number] <= number] == []


def _dropped(file: Path, lines: Lines, number: int) -> int:
    return first(judged(write(file, lines[:number] + lines[number + 1 :])))


def _is_optional(lines: Lines, number: int) -> bool:
    """Whether a trace may conform without one of its lines.

    A machine may have been killed at any time, and its goodbye need not arrive.
    """
    line = lines[number]
    after = [each for each in lines[number + 1 :] if each.get("m") == line.get("m")]
    return line["what"] in OPTIONAL_KINDS or not after or all(each["what"] == "closed" for each in after)


def test_swapped_lines_of_one_machine_in_a_resealed_trace_are_refused_unless_they_commute(file: Path) -> None:
    lines = lines_of(file)
    passed = []
    for number in range(1, len(lines) - 1):
        after = next((i for i in range(number + 1, len(lines)) if lines[i].get("m") == lines[number].get("m")), 0)
        if after:
            swapped = list(lines)
            one, other = lines[number], lines[after]
            swapped[number], swapped[after] = {**other, "t": one["t"]}, {**one, "t": other["t"]}
            if not first(judged(write(file, swapped))):
                passed.append((lines[number]["what"], lines[after]["what"], lines[after].get("input")))
    assert set(passed) <= HARMLESS


#: Lines that commute: the creation of a link, and a step over another link; a step that sends nothing, and the next
#: line; the failure of a link, and the loss that follows; the report of a finished version, and lines that do not
#: change it.
HARMLESS = {
    ("reported", "refused", None),
    ("reported", "step", "CLOSE"),
    ("reported", "step", "SEND_ASYNC"),
    ("sent", "reported", None),
    ("step", "reported", None),
    ("step", "link", None),
    ("link", "received", None),
    ("step", "received", None),
    ("received", "link", None),
    ("failed", "step", "LINK_DOWN"),
}

#: Names of values that say nothing about the protocol.
IRRELEVANT_FIELDS = {"t", "peer", "reason", "text", "m", "i", "n", "c", "role", "model", "what"}


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from leaves(each, (*path, name))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from leaves(each, (*path, index))
    else:
        yield path, value


def kind_of(line: dict[str, Any]) -> tuple[Any, ...]:
    """The kind of a line. Lines of one kind have the same values, so forging one of them is enough."""
    message = line.get("message", line.get("event", {}))
    return line["what"], line.get("role"), line.get("input"), message.get("is")


def forged(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value + 1.0
        case None:
            return "CLOSE"
        case "CLOSED":
            return "READY"
        case "APPLIED":
            return "REFUSED"
        case str() if len(value) == 32:
            return ("0" if value[0] != "0" else "1") + value[1:]
        case _:
            return "CLOSED"


@pytest.mark.timeout(300)
def test_each_forged_protocol_value_in_a_resealed_trace_is_refused(file: Path) -> None:
    lines = lines_of(file)
    passed, seen = [], set()
    for number, line in enumerate(lines):
        for path, value in leaves(line):
            kind = (*kind_of(line), *(name for name in path if not str(name).isdigit()), value is None)
            if number and kind not in seen and not IRRELEVANT_FIELDS & {str(name) for name in path}:
                seen.add(kind)
                changed = copy.copy(lines)
                changed[number] = _with(line, path, forged(value))
                if not first(judged(write(file, changed))):
                    passed.append((number, line["what"], path, value))
    assert passed == []


def test_a_received_handshake_without_the_number_of_its_link_is_refused(file: Path) -> None:
    lines = lines_of(file)
    received_hellos = [
        number
        for number, line in enumerate(lines)
        if (line["what"], line.get("role"), line.get("message", {}).get("is")) == ("received", "receiver", "Hello")
    ]
    for number in received_hellos:
        changed = copy.copy(lines)
        changed[number] = _with(lines[number], ("message", "link"), 0)

        found = first(judged(write(file, changed)))

        assert found
    assert received_hellos


def _with(line: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = json.loads(json.dumps(line))
    place = changed
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return changed


def reports_in(lines: Lines) -> list[int]:
    """The indices of the lines that are reports."""
    return [number for number, line in enumerate(lines) if line["what"] == "reported"]


def test_a_report_with_a_wrong_outcome_is_refused_at_its_line(file: Path) -> None:
    lines = lines_of(file)
    kinds = {"APPLIED", "REFUSED", "TIMED_OUT", "LOST", "ABANDONED", "PENDING"}
    forged_kinds = set()
    for number in reports_in(lines):
        for worker, outcome in lines[number]["outcomes"].items():
            forged_kinds.add(outcome["kind"])
            for kind in kinds - {outcome["kind"]}:
                changed = copy.copy(lines)
                changed[number] = _with(lines[number], ("outcomes", worker, "kind"), kind)
                assert first(judged(write(file, changed))) == number + 1, (outcome, kind)
    assert forged_kinds >= {"APPLIED", "REFUSED", "TIMED_OUT", "ABANDONED", "PENDING"}


def test_a_report_without_one_of_its_workers_is_refused_at_its_line(file: Path) -> None:
    lines = lines_of(file)
    for number in reports_in(lines):
        changed = copy.copy(lines)
        changed[number] = _with(lines[number], ("outcomes",), dict(list(lines[number]["outcomes"].items())[1:]))
        assert first(judged(write(file, changed))) == number + 1


def test_a_deadline_or_an_abandon_that_is_not_reported_to_the_caller_is_refused(file: Path) -> None:
    lines = lines_of(file)
    ends = [n for n, line in enumerate(lines) if line.get("event", {}).get("is") in ("Deadline", "Abandon")]
    assert {lines[number]["event"]["is"] for number in ends} == {"Deadline", "Abandon"}
    for number in ends:
        report = next(n for n in reports_in(lines) if n > number)
        assert _dropped(file, lines, report)


def test_a_second_report_of_a_finished_version_is_refused(file: Path) -> None:
    lines = lines_of(file)
    kinds = {n: {each["kind"] for each in lines[n]["outcomes"].values()} for n in reports_in(lines)}
    [number] = [n for n, named in kinds.items() if named == {"ABANDONED"}]

    assert first(judged(write(file, [*lines[: number + 1], *lines[number:]]))) == number + 2


def test_trace_files_match_the_pattern_that_finds_them(good: Path) -> None:
    assert list(good.parent.glob(recorder.PATTERN)) == [good]
