"""The manifest of our model covers every module, rule and guarantee in `tla/`. TLC does not run here."""

from __future__ import annotations

import re

import pytest

from weightsync.model import Manifest, Purpose, find_model
from weightsync.model.config import Config, Value, config_traps
from weightsync.model.text import Library, traps
from weightsync.protocol._tables import GUARANTEES

_FEWEST_CANARIES = 12
#: Properties that check TLC's own search, not the protocol.
_PROPERTIES_OF_THE_SEARCH = {"NothingWasLeftOut"}


@pytest.fixture(scope="module")
def model() -> Manifest:
    return Manifest.read(find_model())


@pytest.fixture(scope="module")
def library(model: Manifest) -> Library:
    return Library(model.folder)


def test_there_are_no_cfg_files_beside_the_manifest(model: Manifest) -> None:
    assert list(model.folder.glob("*.cfg")) == [], "what TLC is given is said in tla/manifest.toml, and rendered for it"


def test_each_module_is_used(model: Manifest, library: Library) -> None:
    used = {module.name for found in model.configurations for module in library.closure(found.module)}
    used |= {module.name for module in library.closure("Trace")}  # with which `weightsync verify` checks traces

    assert used == {path.stem for path in model.folder.glob("*.tla")}


def test_the_model_avoids_everything_that_tlc_gets_wrong(model: Manifest, library: Library) -> None:
    for path in model.folder.glob("*.tla"):
        module = library.module(path.stem)
        assert module is not None
        assert list(traps(module)) == []
    for found in model.configurations:
        assert list(config_traps(library, found.module, found.config, found.workers)) == []


def test_each_property_that_must_be_violated_is_checked(model: Manifest) -> None:
    for found in model.configurations:
        if found.violates:
            assert found.violates in found.config.checked, found.name


def test_each_proof_checks_something_and_is_pinned(model: Manifest) -> None:
    for found in model.configurations:
        if found.purpose is Purpose.PROOF:
            assert found.config.checked, found.name
            assert found.pinned is not None, found.name


def test_each_guarantee_is_proved_by_the_property_of_its_name(model: Manifest) -> None:
    proved = set()
    for found in model.configurations:
        if found.purpose is Purpose.PROOF:
            proved |= {each for each in found.guarantees if GUARANTEES[each].name in found.config.checked}

    assert proved == set(GUARANTEES)


def test_each_property_of_a_proof_must_be_found_violated_by_some_configuration(
    model: Manifest, library: Library
) -> None:
    checked, objects = set[tuple[str, str]](), set[tuple[str, str]]()
    for found in model.configurations:
        if found.purpose is Purpose.PROOF:
            checked.update(_defined(library, found.module, name) for name in found.config.checked)
        elif found.violates:
            objects.add(_defined(library, found.module, found.violates))

    assert {each for each in checked - objects if each[1] not in _PROPERTIES_OF_THE_SEARCH} == set(), (
        "a property that nothing violates may say nothing: remove a rule of its module, or plant a wrong step "
        "(tla/MCPlant.tla), and give that a configuration"
    )


def _defined(library: Library, root: str, name: str) -> tuple[str, str]:
    """A property and its defining module, since several modules define the same name, such as EverySendEnds."""
    found = library.resolve(root, name)
    assert found is not None
    return found.module, found.name


def test_a_configuration_with_a_planted_step_checks_only_the_property_it_violates(model: Manifest) -> None:
    for found in model.configurations:
        if found.purpose is Purpose.PLANTED:
            assert found.config.checked == (found.violates,), found.name


def test_each_planted_step_is_taken_by_some_configuration(model: Manifest, library: Library) -> None:
    planted = library.resolve("MCPlant", "Planted")
    assert planted is not None
    chosen = {found.config.constants["Plant"] for found in model.configurations if found.module == "MCPlant"}

    assert chosen == set(re.findall(r'Plant = "(\w+)"', planted.body))


def test_there_are_at_least_twelve_canaries(model: Manifest) -> None:
    canaries = [found for found in model.configurations if found.purpose is Purpose.CANARY]

    assert len(canaries) >= _FEWEST_CANARIES


def test_each_rule_has_its_revert(model: Manifest, library: Library) -> None:
    rules = library.resolve("AckProtocol", "AllRules")
    assert rules is not None
    reverts = [found for found in model.configurations if found.purpose is Purpose.REVERT]
    taken_out = {name for found in reverts for name in _names(found.config, "Without")}

    assert taken_out == set(re.findall(r'"(\w+)"', rules.body))


@pytest.mark.parametrize(
    ("module", "named"),
    [
        ("Shared", "SharedRules"),
        ("Backlog", "AllRules"),
        ("Kernels", "AllRules"),
        ("Group", "AllRules"),
        ("Loader", "AllRules"),
        ("Delta", "AllRules"),
        ("Parts", "PartRules"),
        ("Fanout", "AllRules"),
    ],
)
def test_each_rule_of_a_module_beside_the_protocol_has_its_revert(
    model: Manifest, library: Library, module: str, named: str
) -> None:
    rules, text = library.resolve(module, named), library.module(module)
    assert rules is not None
    assert text is not None
    of = [(found, found.config) for found in model.configurations if found.module == module]
    taken_out = [_names(config, "Careless") for found, config in of if found.purpose is Purpose.REVERT]

    wanted = re.findall(r'"(\w+)"', rules.body)
    assert sorted(taken_out) == sorted([rule] for rule in wanted)
    assert [rule for rule in wanted if f'Follows("{rule}")' not in text.text] == []
    assert [found.name for found, config in of if found.purpose is Purpose.PROOF and _names(config, "Careless")] == []


#: The least that each of these proofs covers: its versions, its features and its properties.
_BESIDE = {
    "SharedTakeover": (
        1,
        "copy async refuse abandon",
        "RefinesWeightSync AckedMeansServed ServingIsMonotone "
        "OldSendersHarmNobody OnlyItsSenderEndsIt FencedSendersAreNotified",
    ),
    "SharedEnds": (1, "copy close", "EverySendEnds ClosedIsFinal RefinesWeightSync"),
    "SharedAgain": (1, "misfit refuse", "Consistent RefusalKeepsServing RefinesWeightSync"),
    "SharedVersions": (2, "copy async abandon", "FencedSendersAreNotified ServingIsMonotone"),
    "BacklogOrdered": (
        5,
        "",
        "AtMostTwo OnlyTheNewestLeaves NobodyIsOwedTheOvertaken WhatWaitsLeaves EveryUpdateIsAnswered",
    ),
    "BacklogReordered": (5, "", "OnlyTheNewestLeaves NobodyIsOwedTheOvertaken WhatWaitsLeaves EveryUpdateIsAnswered"),
}


@pytest.mark.parametrize("name", _BESIDE)
def test_proofs_beside_the_protocol_have_the_required_versions_features_and_properties(
    model: Manifest, name: str
) -> None:
    versions, features, properties = _BESIDE[name]
    config = model.select([name])[0].config

    assert config.constants["MaxVersion"] == versions
    assert set(features.split()) <= set(_names(config, "Features"))
    assert set(properties.split()) <= set(config.checked)


def test_no_temporal_property_is_checked_where_a_constraint_cuts_behaviours(model: Manifest, library: Library) -> None:
    for found in model.configurations:
        if found.config.constraints:
            temporal = [name for name in found.config.checked if library.is_temporal(found.module, name)]
            assert temporal == [], found.name


def test_the_readme_lists_each_configuration(model: Manifest) -> None:
    text = (model.folder / "README.md").read_text(encoding="utf-8")

    assert [
        found.name
        for found in model.configurations
        if f"`{found.name}`" not in text and found.module not in ("MCPlant", "MCPromise")
    ] == []


def test_proofs_have_all_rules_and_all_fairness(model: Manifest) -> None:
    for found in model.configurations:
        if found.purpose is Purpose.PROOF:
            assert (_names(found.config, "Without"), _names(found.config, "Unfair")) == ([], []), found.name


def test_the_manifest_states_its_bounds(model: Manifest) -> None:
    assert model.bounds


def _names(config: Config, constant: str) -> list[Value]:
    """The value of a constant that is a set of strings, or nothing if the configuration lacks the constant."""
    found = config.constants.get(constant, [])
    assert isinstance(found, list)
    return found
