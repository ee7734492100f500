"""A mutant's fate in the ledger is confirmed, in reused JVMs, by the check that decided it; a wrong fate is not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from modelcheck.kept import KeptTlc
from modelcheck.mutants import Entry, Fate, Finding, Hunter, Ledger, Mutant, Session, draw
from modelcheck.mutants.confirm import Confirmer
from modelcheck.mutants.session import source_of

from weightsync.errors import ConfigurationError
from weightsync.model import Manifest, Toolchain
from weightsync.model.process import Job, Outcome

pytestmark = [pytest.mark.tlc, pytest.mark.timeout(180)]

COUNTED = "Switch: side count + 1 -> count"
UNLIT = "Switch: negate count < Most -> ~(count < Most)"
SAME = "Switch: alternative IF TRUE THEN (count + 1) ELSE count -> count + 1"


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    lamp = tmp_path_factory.mktemp("model") / "lamp"
    return Manifest.read(Path(shutil.copytree(Path(__file__).parent / "lamp", lamp)))


@pytest.fixture(scope="module")
def ledger(manifest: Manifest) -> Ledger:
    return Ledger.read(manifest.folder / "mutants.toml")


@pytest.fixture(scope="module")
def confirmer(manifest: Manifest, ledger: Ledger, toolchain: Toolchain) -> Iterator[Confirmer]:
    baselines = Session(toolchain, manifest, ledger).measure()
    source = source_of(manifest, ledger)
    one = Confirmer(toolchain, source, ledger, baselines, Hunter(toolchain, source, manifest.folder, baselines))
    yield one
    one.close()


@pytest.fixture
def mutants(manifest: Manifest, ledger: Ledger) -> dict[str, Mutant]:
    return {mutant.name: mutant for mutant in draw(manifest, ledger)}


def test_every_fate_in_the_ledger_is_confirmed(
    ledger: Ledger, confirmer: Confirmer, mutants: Mapping[str, Mutant]
) -> None:
    found = {name: confirmer.confirm(mutant, ledger.entries[name]) for name, mutant in mutants.items()}
    confirmer.vouch()

    assert found == {name: Finding(entry.fate, entry.by, entry.where) for name, entry in ledger.entries.items()}


@pytest.mark.parametrize(
    "lie",
    [
        Entry(COUNTED, Fate.PROPERTY, "Switches", "Lamp"),
        Entry(COUNTED, Fate.CANARY, "lit", "Lamp"),
        Entry(COUNTED, Fate.INVALID, "", "Lamp"),
        Entry(COUNTED, Fate.EQUIVALENT),
        Entry(COUNTED, Fate.SURVIVED, "", "Lamp"),
        Entry(COUNTED, Fate.PROPERTY, "Counts", "Nowhere"),
        Entry(UNLIT, Fate.SURVIVED, "", "Lamp"),
        Entry(UNLIT, Fate.PROPERTY, "Counts", "Lamp"),
        Entry(SAME, Fate.PROPERTY, "Counts", "Lamp"),
        Entry(SAME, Fate.CANARY, "lit", "Lamp"),
        Entry(SAME, Fate.SURVIVED, "", "Lamp"),
    ],
    ids=lambda lie: f"{lie.name.partition(':')[2][:9].strip()} {lie.fate.value} {lie.by} {lie.where}",
)
def test_a_wrong_fate_is_not_confirmed(confirmer: Confirmer, mutants: Mapping[str, Mutant], lie: Entry) -> None:
    assert confirmer.confirm(mutants[lie.name], lie) is None


def test_a_mutant_with_another_graph_is_confirmed_to_survive_if_no_property_is_violated(
    manifest: Manifest, ledger: Ledger, toolchain: Toolchain, mutants: Mapping[str, Mutant]
) -> None:
    [baseline] = Session(toolchain, manifest, ledger).measure()
    unasked = replace(baseline.configuration.config, properties=())
    baseline = replace(baseline, configuration=replace(baseline.configuration, config=unasked))
    source = source_of(manifest, ledger)
    hunter = Hunter(toolchain, source, manifest.folder, [baseline])
    confirmer = Confirmer(toolchain, source, ledger, [baseline], hunter)
    alive = Entry(COUNTED, Fate.SURVIVED, "", "Lamp")
    try:
        assert confirmer.confirm(mutants[COUNTED], alive) == Finding(Fate.SURVIVED, "", "Lamp")
    finally:
        confirmer.close()


def test_findings_of_a_jvm_that_misjudges_the_unchanged_model_are_rejected(
    confirmer: Confirmer, mutants: Mapping[str, Mutant], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert confirmer.confirm(mutants[SAME], Entry(SAME, Fate.EQUIVALENT)) is not None
    run = KeptTlc.run

    def forgetful(self: KeptTlc, job: Job) -> Outcome:
        return replace(run(self, job), met=())

    monkeypatch.setattr(KeptTlc, "run", forgetful)
    with pytest.raises(ConfigurationError, match="no longer finds the unchanged model correct in Lamp"):
        confirmer.vouch()
