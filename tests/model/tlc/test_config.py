"""Configurations are composed from the manifest's groups, and rendered in TLC's format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from modelcheck.mutants.confirm import checking

from weightsync.model import Manifest, find_model
from weightsync.model.config import Config, config_traps, literal
from weightsync.model.text import Library

SPECS = Path(__file__).parent / "specs"

MANIFEST = """\
[constants.machines]
Workers = [1]
Loses = false

[constants.lossy]
Loses = true
Way = "row"

[checks.safety]
invariants = ["TypeOK"]
properties = ["Rises"]

[checks.ends]
properties = ["Ends"]

[module.M]
specification = "Spec"
constants = ["machines", "lossy"]
action_constraints = ["LookOut"]

[[configuration]]
name = "Whole"
module = "M"
kind = "proof"
set = "quick"
expected = "pass"
covers = "all that an entry may say"
specification = "Fair"
deadlock = true
constants = { Workers = [1, 2], Way = "calls" }
constraints = ["Few"]
action_constraints = ["Slow"]
view = "Seen"
symmetry = "Swapped"
checks = ["safety", "ends"]
invariants = ["Small"]
properties = ["Settles"]

[[configuration]]
name = "Broken"
module = "M"
kind = "canary"
set = "quick"
expected = "EXPECTED"
violates = "P"
covers = "what a canary checks"
"""


def configs(folder: Path, expected: str = "safety") -> Sequence[Config]:
    (folder / "manifest.toml").write_text(MANIFEST.replace("EXPECTED", expected))
    return [found.config for found in Manifest.read(folder).configurations]


def test_a_configuration_combines_its_modules_groups_and_its_own_entries_in_tlcs_order(
    tmp_path: Path,
) -> None:
    whole, _ = configs(tmp_path)

    assert whole.text == (
        "SPECIFICATION Fair\nCHECK_DEADLOCK TRUE\n"
        'CONSTANTS\n  Workers = {1, 2}\n  Loses = TRUE\n  Way = "calls"\n'
        "CONSTRAINT\n  Few\nACTION_CONSTRAINT\n  LookOut\n  Slow\nVIEW\n  Seen\nSYMMETRY\n  Swapped\n"
        "INVARIANTS\n  TypeOK\n  Small\nPROPERTIES\n  Rises\n  Ends\n  Settles\n"
    )


@pytest.mark.parametrize(("expected", "keyword"), [("safety", "INVARIANTS"), ("liveness", "PROPERTIES")])
def test_a_configuration_without_checks_checks_the_property_that_it_violates(
    tmp_path: Path, expected: str, keyword: str
) -> None:
    _, broken = configs(tmp_path, expected)

    assert broken.text.endswith(f"ACTION_CONSTRAINT\n  LookOut\n{keyword}\n  P\n")
    assert broken.checked == ("P",)


def test_values_of_constants_are_written_in_tla_syntax() -> None:
    values = [True, False, 12, "row", [], [1, 2], ["a", "b"], [[1], [2, 3]]]

    assert [literal(value) for value in values] == [
        "TRUE", "FALSE", "12", '"row"', "{}", "{1, 2}", '{"a", "b"}', "{{1}, {2, 3}}",
    ]  # fmt: skip


def test_checking_keeps_only_the_named_checks_and_changes_nothing_else() -> None:
    hunts = [found.config for found in Manifest.read(find_model()).configurations if found.module == "MCHunt"]

    assert hunts
    for whole in hunts:
        some = checking(whole, ["TypeOK", "OnlyRows", "LookOut"])
        assert (some.invariants, some.properties) == (("TypeOK",), ("OnlyRows",))
        assert (some.specification, some.constants) == (whole.specification, whole.constants)
        assert some.action_constraints == ("LookOut",)
        assert checking(whole, ["TypeOK"]).action_constraints == ()


@pytest.mark.parametrize(
    ("given", "workers", "count"),
    [
        ({}, 1, 0),
        ({}, 2, 1),
        ({"symmetry": "Perms"}, 1, 1),
        ({"view": "v"}, 1, 1),
        ({"symmetry": "Perms", "view": "v"}, 2, 3),
    ],
)
def test_temporal_properties_are_refused_with_two_workers_symmetry_or_a_view(
    given: dict[str, str], workers: int, count: int
) -> None:
    config = Config(
        "Spec", properties=("Rises", "Ends"), view=given.get("view", ""), symmetry=given.get("symmetry", "")
    )

    found = list(config_traps(Library(SPECS), "Counter", config, workers))

    assert count == len(found)
    assert all(trap.startswith("Ends: ") for trap in found)


def test_safety_properties_may_be_checked_with_several_workers() -> None:
    config = Config("Spec", invariants=("TypeOK",), properties=("Rises",), view="v")

    assert list(config_traps(Library(SPECS), "Counter", config, 2)) == []
