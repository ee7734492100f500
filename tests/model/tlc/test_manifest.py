"""The reader of the manifest."""

from __future__ import annotations

from pathlib import Path

import pytest
from modelcheck.checked import pin

from weightsync.errors import ConfigurationError
from weightsync.model import Counts, Manifest, Purpose, Tier, find_model

ENTRY = """\
[[configuration]]
name = "A"
module = "M"
specification = "Spec"
kind = "proof"
set = "quick"
expected = "pass"
covers = "this"
"""


def write(folder: Path, text: str) -> Path:
    (folder / "manifest.toml").write_text(text)
    return folder


def test_all_fields_of_an_entry_are_read(manifest: Manifest) -> None:
    [larger] = manifest.select(["HoldsLarger"])

    assert (larger.module, larger.purpose) == ("Counter", Purpose.PROOF)
    assert (larger.tier, larger.violates, larger.guarantees, larger.workers) == (Tier.ALL, None, ("G1",), 2)
    assert Counts(2003, 2002, 2002) == larger.pinned
    assert manifest.bounds.startswith("Counter counts to 3")


def test_each_tier_selects_its_configurations(manifest: Manifest) -> None:
    assert [found.name for found in manifest.tier(Tier.QUICK)] == ["Holds", "TooSmall"]
    assert manifest.configurations == manifest.tier(Tier.ALL)


def test_an_unknown_name_is_refused(manifest: Manifest) -> None:
    with pytest.raises(ConfigurationError, match="There is no configuration Bad, Worse: weightsync check --list"):
        manifest.select(["Holds", "Worse", "Bad"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no"),
        ("[[configuration]", "cannot be read"),
        (ENTRY + ENTRY, "has A twice"),
        (ENTRY.replace("covers", "reason"), "Configuration A has unknown keys"),
        (ENTRY.replace('module = "M"\n', ""), "Configuration A has no 'module'"),
        (ENTRY.replace('specification = "Spec"\n', ""), "Configuration A has no 'specification'"),
        (ENTRY + "constants = { Max = 1 }\n", "Configuration A is wrong .* its module has no constants Max"),
        (ENTRY + 'checks = ["all"]\n', "Configuration A is wrong .* there is no group all"),
        ("[module.M]\nconstants = ['of']\n" + ENTRY, "Configuration A is wrong .* there is no group of"),
        ("[module.M]\nconstant = ['of']\n" + ENTRY, "Configuration A is wrong .* unknown keys: .'constant'"),
        (
            f"[constants.of]\nMax = 1.5\n[module.M]\nconstants = ['of']\n{ENTRY}",
            "A is wrong .* 1.5 is neither a number",
        ),
        (ENTRY.replace("quick", "sometimes"), "Configuration A is wrong .*'sometimes'"),
        (ENTRY + "distinct = 3\n", "Configuration A has no 'generated'"),
        (
            ENTRY.replace("pass", "deadlock"),
            "Configuration A is wrong .* expected is pass for a proof, and only for a proof",
        ),
        (
            ENTRY.replace("proof", "canary"),
            "Configuration A is wrong .* expected is pass for a proof, and only for a proof",
        ),
        (ENTRY + 'violates = "P"\n', "Configuration A is wrong .* violates is required if"),
        (
            ENTRY.replace("proof", "canary").replace("pass", "safety"),
            "Configuration A is wrong .* violates is required",
        ),
    ],
)
def test_a_wrong_manifest_is_refused_with_the_faulty_configuration_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Manifest.read(write(tmp_path, text))


def test_a_folder_without_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Manifest.read(tmp_path)


def test_pinning_keeps_comments_and_order(tmp_path: Path) -> None:
    other = ENTRY.replace('"A"', '"B"') + "generated = 1\ndistinct = 1\n"
    text = f"# head\n[bounds]\ntext = 'b'\n\n{ENTRY}generated = 1 # old\ndistinct = 1\ndepth = 1\n\n# about B\n{other}"
    manifest = Manifest.read(write(tmp_path, text))

    pin(manifest, {"A": Counts(12, 11, None)})

    counted = f"# head\n[bounds]\ntext = 'b'\n\n{ENTRY}generated = 12\ndistinct = 11\n\n# about B\n{other}"
    assert counted == (tmp_path / "manifest.toml").read_text()


@pytest.mark.parametrize("place", ["tla", "weightsync/tla"])
def test_the_model_is_found_beside_the_package_or_inside_it(tmp_path: Path, place: str) -> None:
    folder = tmp_path / place
    folder.mkdir(parents=True)
    write(folder, ENTRY)

    assert find_model(tmp_path / "weightsync") == folder


def test_a_package_without_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="There is no model in"):
        find_model(tmp_path / "weightsync")
