"""`make protocol`: a step writes every pinned file, and files that may lack a new name are listed."""

from __future__ import annotations

from pathlib import Path

import follow
import pytest

TEXT = """
[[refusal_kind]]
name = "REFUSED"
[[refusal_kind]]
name = "STALE"
[[refusal_kind]]
name = "FENCED"
[sender]
[[sender.row]]
input = "SEND"
[receiver]
[[receiver.row]]
input = "UPDATE"
"""


def test_every_step_of_make_protocol_runs_an_existing_script(root: Path) -> None:
    for _, command in follow.commands(quick=False):
        script = next((word for word in command if word.endswith(".py")), "weightsync/__main__.py")
        assert (root / script).is_file(), script


@pytest.mark.parametrize("pinned", ["golden.json", "digests.json", "replay.json", "manifest.toml"])
def test_every_file_of_pinned_values_is_written_by_a_step(root: Path, pinned: str) -> None:
    writers = {
        "golden.json": "tests/transports/pipe/golden.py",
        "digests.json": "tests/protocol/graph/configurations.py",
        "replay.json": "spec/replay.py",
        "manifest.toml": "--pin",
    }
    words = [word for _, command in follow.commands(quick=False) for word in command]

    assert writers[pinned] in words
    assert list(root.glob(f"*/**/{pinned}"))


def test_quick_runs_only_the_small_configurations() -> None:
    words = [word for _, command in follow.commands(quick=True) for word in command]

    assert "--all" not in words
    assert "--small" in words


def test_new_names_are_not_looked_for_in_design_records_or_the_changelog() -> None:
    found = follow.written()

    assert "docs/architecture.md" in found
    assert [path for path in found if path.startswith("docs/design/") or path == "CHANGELOG.md"] == []


def test_names_added_to_the_protocol_are_found_by_kind() -> None:
    later = TEXT + '[[refusal_kind]]\nname = "FAILED"\n[[sender.row]]\ninput = "HURRY"\n'

    assert follow.fresh(follow.names(TEXT), follow.names(later)) == {
        "refusal_kind": {"FAILED"},
        "sender input": {"HURRY"},
    }


def test_files_that_name_others_of_the_kind_but_not_the_new_name_are_listed() -> None:
    texts = {
        "both.py": "STALE, FENCED, FAILED",
        "lacking.py": "RefusalKind.STALE and RefusalKind.FENCED",
        "one.py": "only STALE",
        "tests/longer.py": "STALE, FENCED, FAILED_OVER",
        "tla/last.tla": "STALE\nSTALE, FENCED",
        "another_enum.py": "Ending.STALE, Ending.FENCED",
        "other_enum_has_it.py": "RefusalKind.STALE, RefusalKind.FENCED, Ending.FAILED",
    }
    found = follow.lacking("refusal_kind", "FAILED", {"STALE", "FENCED", "REFUSED"}, texts)

    assert list(found.items()) == [
        ("tla/last.tla", 2),
        ("tests/longer.py", 1),
        ("lacking.py", 1),
        ("other_enum_has_it.py", 1),
    ]


def test_the_names_in_protocol_toml_are_found(root: Path) -> None:
    found = follow.names((root / follow.SOURCE).read_text(encoding="utf-8"))

    assert all(found.values())
    assert "STALE" in found["refusal_kind"]
