"""The manifest's reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightsync.checker import Counts, Manifest, Tier, find_model, pin
from weightsync.errors import ConfigurationError

ENTRY = '[[configuration]]\nname = "A"\nmodule = "A.tla"\nconfig = "A.cfg"\ntier = "quick"\nwhy = "why"\n'


def write(folder: Path, text: str) -> Path:
    (folder / "manifest.toml").write_text(text)
    return folder


def test_an_entry_is_read_whole(manifest: Manifest) -> None:
    [larger] = manifest.select(["HoldsLarger"])

    assert (larger.module, larger.module_name, larger.config) == ("Counter.tla", "Counter", "HoldsLarger.cfg")
    assert (larger.tier, larger.violates, larger.guarantees, larger.workers) == (Tier.FULL, None, ("G1",), 2)
    assert Counts(2003, 2002, 2002) == larger.pinned
    assert manifest.bounds.startswith("Counter counts to 3")


def test_tiers_choose(manifest: Manifest) -> None:
    assert [found.name for found in manifest.tier(Tier.QUICK)] == ["Holds", "TooSmall"]
    assert manifest.configurations == manifest.tier(Tier.FULL)


def test_an_unknown_name_is_refused(manifest: Manifest) -> None:
    with pytest.raises(ConfigurationError, match="No configuration is named Bad, Worse: weightsync check --list"):
        manifest.select(["Holds", "Worse", "Bad"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no"),
        ("[[configuration]", "cannot be read"),
        (ENTRY + ENTRY, "names A twice"),
        (ENTRY.replace("why", "reason"), "Configuration A has unknown keys"),
        (ENTRY.replace('module = "A.tla"\n', ""), "Configuration A lacks 'module'"),
        (ENTRY.replace("quick", "sometimes"), "Configuration A is wrong .*'sometimes'"),
        (ENTRY + "distinct = 3\n", "Configuration A lacks 'generated'"),
    ],
)
def test_a_wrong_manifest_is_refused_and_the_culprit_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Manifest.read(write(tmp_path, text))


def test_a_folder_without_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Manifest.read(tmp_path)


def test_pinning_keeps_comments_and_order(tmp_path: Path) -> None:
    other = ENTRY.replace('"A"', '"B"') + "generated = 1\ndistinct = 1\n"
    text = f"# head\nbounds = 'b'\n\n{ENTRY}generated = 1 # old\ndistinct = 1\ndepth = 1\n\n# about B\n{other}"
    manifest = Manifest.read(write(tmp_path, text))

    pin(manifest, {"A": Counts(12, 11, None)})

    counted = f"# head\nbounds = 'b'\n\n{ENTRY}generated = 12\ndistinct = 11\n\n# about B\n{other}"
    assert counted == (tmp_path / "manifest.toml").read_text()


def test_our_own_model_is_found() -> None:
    assert find_model().name == "tla"
