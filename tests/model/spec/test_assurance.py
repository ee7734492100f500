"""docs/assurance.md is rendered from its sources, and names only tests and properties that exist."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import assurance
import pytest
from assurancegen import sources
from modelcheck.checked import OF_THE_PROTOCOL, Checked, proofs

from weightsync.model.manifest import Manifest


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    """A copy of the sources of the page, for a test to change."""
    for folder in ("spec", "tla", "tests", "weightsync/testing"):
        shutil.copytree(root / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    return tmp_path


def test_assurance_md_equals_what_its_sources_render(root: Path) -> None:
    assert (root / "docs" / "assurance.md").read_text(encoding="utf-8") == assurance.render(root)


def test_every_guarantee_has_tests_properties_and_a_note_of_what_is_not_proved(root: Path) -> None:
    for guarantee in sources.read(root):
        assert guarantee.unproved
        assert guarantee.tests
        assert guarantee.properties


def _changed(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("spec/assurance.toml", "::test_fault_1_", "::test_fault_0_", "G1: there is no test .*test_fault_0_"),
        (
            "spec/assurance.toml",
            '["ServingIsMonotone"]',
            '["ServingIsTonic"]',
            "G4: AckProtocol.tla has no ServingIsTonic",
        ),
        ("spec/assurance.toml", 'id = "G9"', 'id = "G99"', "G99"),
        ("tests/protocol/planted/test_planted.py", '"""G7: ', '"""H7: ', "G7: no fault is planted"),
        (
            "tests/unit/schemes/test_sending.py",
            "def test_a_late_joiner_",
            "def test_the_late_joiner_",
            "G12: there is no test",
        ),
    ],
)
def test_an_unknown_test_property_or_guarantee_is_refused(
    copy: Path, file: str, old: str, new: str, message: str
) -> None:
    _changed(copy / file, old, new)
    with pytest.raises(sources.SourceError, match=message):
        assurance.render(copy)


def test_a_changed_state_count_in_the_manifest_changes_the_page(copy: Path) -> None:
    before = assurance.render(copy)
    _changed(copy / "tla" / "manifest.toml", "distinct = 1409", "distinct = 1410")
    assert assurance.render(copy) != before


# ------------------------------------------------------------------- what TLC checks, according to the manifest


@pytest.fixture
def protocol_proofs(root: Path) -> tuple[Checked, ...]:
    return proofs(Manifest.read(root / "tla"), OF_THE_PROTOCOL)


def test_the_manifest_names_the_guarantees_that_each_proof_checks(
    root: Path, protocol_proofs: tuple[Checked, ...]
) -> None:
    guarantees = sources.read(root)
    checked = {
        each.name: tuple(
            found.id
            for found in guarantees
            if each.allows(found.needs) and set(found.properties) & set(each.properties)
        )
        for each in protocol_proofs
    }

    said = {each.name: each.configuration.guarantees for each in protocol_proofs}
    assert said == checked, "set guarantees in tla/manifest.toml to what TLC checks in each"


def test_each_property_is_checked_with_at_least_its_least_bounds(
    root: Path, protocol_proofs: tuple[Checked, ...]
) -> None:
    lacking = [
        f"{name} with at least {least.bounds.words}"
        for least in sources.least(root)
        for name in least.properties
        if not any(name in each.properties and each.bounds.reaches(least.bounds) for each in protocol_proofs)
    ]

    assert lacking == [], "no configuration checks these any more ([[least]] in spec/assurance.toml)"


def test_every_property_of_a_guarantee_has_its_least_bounds(root: Path) -> None:
    held = {name for least in sources.least(root) for name in least.properties}

    assert {name for found in sources.read(root) for name in found.properties} <= held


_COUNTED = {"sender": "senders", "worker": "workers", "version": "max_version", "link": "max_link"}


def test_the_numbers_in_a_proofs_description_equal_its_constants(root: Path) -> None:
    for each in proofs(Manifest.read(root / "tla")):
        said = re.findall(r"\b(\d+) (?:distinct )?(sender|worker|version|link)s?\b", each.configuration.why)
        for number, what in said:
            assert int(number) == getattr(each.bounds, _COUNTED[what]), f"{each.name}: {each.configuration.why}"


def test_the_stated_bounds_are_those_of_the_configurations(root: Path, protocol_proofs: tuple[Checked, ...]) -> None:
    most = {what: max(getattr(each.bounds, what) for each in protocol_proofs) for what in _COUNTED.values()}
    widest = [each.bounds for each in protocol_proofs if each.bounds.senders == most["senders"]]
    others = max(each.bounds.senders for each in protocol_proofs if each.bounds.senders < most["senders"])
    stated = (
        f"at most {most['workers']} workers, {most['max_version']} versions per sender, {most['max_link']} links per "
        f"pair, and {others} senders, or {most['senders']} senders with {max(each.workers for each in widest)} worker "
        f"and {max(each.max_version for each in widest)} version."
    )

    assert stated in " ".join(Manifest.read(root / "tla").bounds.split())


@pytest.mark.parametrize(
    ("table", "old", "new"),
    [
        ('name = "MCCrash"', "Workers = [1, 2]", "Workers = [1]"),
        ('name = "MCSubset"', '"guarantees", ', ""),
        ('name = "MCWorldTwo"', ', "endings"', ""),
        ('name = "MCSuccessor"', ', "refinement"', ""),
        ("[checks.guarantees]", '"AckedMeansServed", ', ""),
        ("[constants.network]", "Lingers = false", "Lingers = true"),
    ],
)
def test_checking_less_with_tlc_changes_the_page_and_violates_the_least_bounds(
    copy: Path, table: str, old: str, new: str
) -> None:
    before = assurance.render(copy)
    path = copy / "tla" / "manifest.toml"
    head, mark, rest = path.read_text(encoding="utf-8").partition(table)
    assert old in rest
    path.write_text(head + mark + rest.replace(old, new, 1), encoding="utf-8")

    assert assurance.render(copy) != before
    with pytest.raises(AssertionError):
        test_each_property_is_checked_with_at_least_its_least_bounds(
            copy, proofs(Manifest.read(copy / "tla"), OF_THE_PROTOCOL)
        )
