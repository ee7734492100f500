"""docs/choosing.md names every scheme, updater and guarantee, and only public classes."""

from __future__ import annotations

import re
from pathlib import Path

import weightsync
from weightsync.demo import SchemeName

PAGE = (Path(__file__).parents[3] / "docs" / "choosing.md").read_text(encoding="utf-8")
WORDS = set(re.findall(r"`(\w+)`", PAGE))


def test_every_scheme_and_every_updater_is_on_the_page() -> None:
    ends = ("Scheme", "Updater", "UpdaterBase")
    named = {name for name in weightsync.__all__ if name.endswith(ends)} - {"WeightSyncScheme"}

    assert named <= WORDS


def test_every_class_on_the_page_is_public() -> None:
    classes = {word for word in WORDS if re.fullmatch(r"([A-Z]\w*[a-z]\w*)", word)} - {"RayModuleTransform"}

    assert classes <= set(weightsync.__all__)


def test_all_twelve_guarantees_are_reported_with_both_kinds_of_evidence() -> None:
    rows = re.findall(r"^\| (G\d+) \w+ \| yes \| (.+) \|$", PAGE, re.MULTILINE)

    assert [name for name, _ in rows] == [f"G{number}" for number in range(1, 13)]
    assert [name for name, with_call in rows if with_call.startswith("**no**")] == ["G2", "G3", "G4", "G6", "G12"]


def test_the_page_lists_the_schemes_of_the_demo() -> None:
    assert f"--scheme {'|'.join(scheme.value for scheme in SchemeName)}" in PAGE
