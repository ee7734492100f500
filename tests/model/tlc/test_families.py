"""The model's modules of the transport families, and of the exchange of challenges.

Each has the delivery that its adapters declare, names only what is in the code, and has a revert for each rule. Some
proof takes each action, and TLC finds each planted fault.
"""

from __future__ import annotations

import ast
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from modelcheck.checked import Checked, proofs
from modelcheck.second.bounds import Bounds
from tlc_support import Recorder

from weightsync.model import Coverage, Expected, Manifest, Purpose, Suite, Tier, Toolchain, find_model, vacuity
from weightsync.model.manifest import Configuration
from weightsync.model.text import Library, Module
from weightsync.protocol._tables import GUARANTEES, Delivery
from weightsync.transports.base import Link
from weightsync.transports.calls.client import CallLink
from weightsync.transports.calls.server import CallServerLink
from weightsync.transports.pipe.link import PipeLink
from weightsync.transports.store import StoreLink

PACKAGE = Path(__file__).parents[3] / "weightsync"
FOLDERS = (PACKAGE, PACKAGE / "transports")

#: The module of each family, and the links that it models.
FAMILIES: dict[str, tuple[type[Link], ...]] = {
    "Pipe": (PipeLink,),
    "Slots": (PipeLink,),
    "Store": (StoreLink,),
    "Calls": (CallLink, CallServerLink),
}
#: Variables that the families share, which are described once and not in each table.
SHARED = {"outbox", "inbox", "said", "heard"}

families = pytest.mark.parametrize("family", FAMILIES)
#: The families, and the exchange of challenges, which is below the protocol and does not refine it.
modules = pytest.mark.parametrize("family", [*FAMILIES, "Challenge"])


@pytest.fixture(scope="module")
def model() -> Manifest:
    return Manifest.read(find_model())


@pytest.fixture(scope="module")
def library(model: Manifest) -> Library:
    return Library(model.folder)


def configurations(model: Manifest, family: str) -> list[Configuration]:
    return [found for found in model.configurations if found.module == family]


def module_of(library: Library, name: str) -> Module:
    found = library.module(name)
    assert found is not None
    return found


# ------------------------------------------------------------------------------------------ without TLC


@families
def test_a_family_is_checked_under_the_delivery_that_its_adapters_declare(model: Manifest, family: str) -> None:
    declared = {adapter.delivery for adapter in FAMILIES[family]}
    checked = {Delivery[str(found.config.constants["Delivery"])] for found in configurations(model, family)}

    assert checked == declared


@families
def test_a_family_refines_the_protocol_in_each_of_its_proofs(model: Manifest, library: Library, family: str) -> None:
    proofs = [found for found in configurations(model, family) if found.purpose is Purpose.PROOF]

    assert {found.tier for found in proofs} == {Tier.QUICK, Tier.ALL}
    for found in proofs:
        assert "RefinesAckProtocol" in found.config.properties, found.name
        assert found.config.constants["Careless"] == [], found.name
    safe = {(each.module, each.name) for each in library.reached(family, "RefinesAckProtocol")}
    assert {("AckProtocol", "Init"), ("AckProtocol", "Next")} <= safe


@families
def test_the_protocol_that_a_family_refines_is_proved_within_the_familys_bounds(model: Manifest, family: str) -> None:
    # Each step in the family's proof is a step of AckProtocol with these bounds, and only a proof of that shows safety.
    of_the_protocol = proofs(model, ("MC", "MCHunt"))
    lacking = [
        f"{found.name}: AckProtocol with at least {abstract.words}"
        for found in proofs(model, (family,))
        for abstract in [_refined(found)]
        if not any(each.bounds.reaches(abstract) and _SAFETY <= set(each.properties) for each in of_the_protocol)
    ]

    assert lacking == []


#: The properties that a family inherits from AckProtocol, besides TypeOK and the like.
_SAFETY = {found.name for found in GUARANTEES.values()} - {"EverySendEnds"} | {"RefinesWeightSync", "Consistent"}


def _refined(found: Checked) -> Bounds:
    """The bounds with which a family's module instantiates AckProtocol, which the proof refines."""
    declared = Delivery[str(found.configuration.config.constants["Delivery"])]
    assert declared is Delivery.ORDERED
    cut = set() if found.configuration.module == "Slots" else {"cut"}
    return replace(found.bounds, features=found.bounds.features | cut, links=frozenset({"Lingers"}))


@modules
def test_each_rule_of_a_family_has_its_revert(model: Manifest, library: Library, family: str) -> None:
    rules = library.resolve(family, "SlotRules" if family == "Slots" else "AllRules")
    assert rules is not None
    reverts = [found for found in configurations(model, family) if found.purpose is Purpose.REVERT]
    taken_out = [found.config.constants["Careless"] for found in reverts]

    assert sorted(taken_out, key=str) == sorted([rule] for rule in re.findall(r'"(\w+)"', rules.body))


@modules
def test_each_rule_of_a_family_is_used_once_in_its_module(library: Library, family: str) -> None:
    text = module_of(library, family).text
    rules = library.resolve(family, "SlotRules" if family == "Slots" else "AllRules")
    assert rules is not None

    for rule in re.findall(r'"(\w+)"', rules.body):
        assert text.count(f'Follows("{rule}")') == 1, rule


@modules
def test_the_readmes_table_of_a_family_has_each_variable_of_its_module(
    model: Manifest, library: Library, family: str
) -> None:
    table = table_of(model, family)
    declared = re.search(r"^VARIABLES\n(.*?)\n\n", module_of(library, family).text, re.MULTILINE | re.DOTALL)
    assert declared is not None

    assert {name for names, _ in table for name in names} | SHARED == set(
        re.findall(r"\w+", declared.group(1))
    ) | SHARED


@modules
def test_files_and_names_in_the_readmes_table_exist_in_the_code(model: Manifest, family: str) -> None:
    named = 0
    for _, where in table_of(model, family):
        for file, names in re.findall(r"`([\w/]+\.py)`((?: `[\w.]+`,?)*)", where):
            known = names_in(file)
            for name in re.findall(r"`([\w.]+)`", names):
                named += 1
                assert name in known, f"{file} has no {name}"

    assert named


@modules
def test_files_named_in_the_header_of_a_familys_module_exist(model: Manifest, family: str) -> None:
    text = (model.folder / f"{family}.tla").read_text(encoding="utf-8")
    files = re.findall(r"([\w/]+\.py)", text[: text.index("EXTENDS")])

    assert files or "transports/store" in text
    for file in files:
        assert any((folder / file).is_file() for folder in FOLDERS), file


def table_of(model: Manifest, family: str) -> list[tuple[list[str], str]]:
    """The rows of a family's table: the variables, and their description."""
    text = (model.folder / "README.md").read_text(encoding="utf-8")
    section = text[text.index(f"`{family}.tla`\n\n| variable |") :]
    lines = section.split("\n\n")[1].splitlines()[2:]
    cells = [line.strip("| ").split(" | ") for line in lines]
    return [(re.findall(r"`(\w+)`", variables), where) for variables, where in cells]


def names_in(file: str) -> set[str]:
    """The functions and classes of a file, and the methods and attributes of classes as ``Class.name``."""
    [path] = [folder / file for folder in FOLDERS if (folder / file).is_file()]
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inside = [each for each in ast.walk(node) if isinstance(each, ast.FunctionDef | ast.Attribute)]
            found |= {f"{node.name}.{each.name if isinstance(each, ast.FunctionDef) else each.attr}" for each in inside}
    return found


# --------------------------------------------------------------------------------------------- with TLC


@pytest.mark.tlc
@pytest.mark.timeout(600)
def test_each_action_of_a_family_is_taken_in_some_proof(
    toolchain: Toolchain, model: Manifest, recorder: Recorder
) -> None:
    proofs = [
        found
        for family in [*FAMILIES, "Challenge"]
        for found in configurations(model, family)
        if found.purpose is Purpose.PROOF and found.tier is Tier.QUICK
    ]

    verdicts = Suite(toolchain, model, recorder, Coverage.COUNTED).run(proofs)

    assert [complaint for verdict in verdicts for complaint in verdict.complaints] == []
    # The actions of the protocol itself must be taken in its own proofs.
    assert [each for each in vacuity(verdicts, model.planted) if not each.startswith("AckProtocol.")] == []


#: Each fault: a configuration, a text of its module, the text that replaces it, and the property then violated.
FAULTS = {
    "a pipe: a head is written twice": (
        "PipeCrash",
        "begun' = IF m \\in begun THEN begun \\ {m} ELSE begun \\cup {m}\n    /\\ outbox'",
        "begun' = begun \\ {m}\n    /\\ outbox'",
        None,
    ),
    "a pipe: bytes are read from the other link": (
        "PipeCrash",
        "MessageOf(l, head, body) == Message(l, head.v, body.p)",
        "MessageOf(l, head, body) == Message(<<l[1], l[2], 2>>, head.v, body.p)",
        "RefinesAckProtocol",
    ),
    "a pipe: the end of the stream comes before what is unread": (
        "PipeEnds",
        "/\\ (up[l] = <<>> /\\ upHeld[l] = <<>> /\\ On(said, l) = {}) \\/",
        "/\\ (upHeld[l] = <<>> /\\ On(said, l) = {}) \\/",
        "RefinesAckProtocol",
    ),
    "slots: an update names the slot of another update": (
        "SlotsLost",
        "place' = [place EXCEPT ![s][sdata[s].serial + 1] = packing[s][1]]",
        "place' = [place EXCEPT ![s][sdata[s].serial + 1] = 1]",
        "RefinesAckProtocol",
    ),
    "slots: an update is sent before it is packed": (
        "SlotsEnds",
        "/\\ packing[s][2] = 2\n",
        "/\\ packing[s][2] = 1\n",
        "RefinesAckProtocol",
    ),
    "slots: a slot that a worker reads is not pinned": (
        "SlotsMany",
        "/\\ pins' = pins \\cup {Shown(s, w, LinkTo(s, w), sdata[s].version + 1, packing[s][1]) : w \\in Owing(s)'}",
        "/\\ pins' = pins",
        "NeverRewritten",
    ),
    "a store: a value is read again": (
        "StoreEnds",
        "/\\ down' = [down EXCEPT ![l] = Tail(@)]",
        "/\\ down' = down",
        "RefinesAckProtocol",
    ),
    "a store: the end overtakes what was written": (
        "StoreCrash",
        "Current(s, w) \\in over /\\ UNCHANGED net",
        "UNCHANGED net",
        "RefinesAckProtocol",
    ),
    "calls: a worker's answers are returned twice": (
        "CallsEnds",
        'Moved(@, "answered", On(said, l))]\n  /\\ said\' = Off(said, {l})\n',
        'Moved(@, "answered", On(said, l))]\n  /\\ said\' = said\n',
        "RefinesAckProtocol",
    ),
    "challenges: what is proven for one end is read by another": (
        "ChallengeRow",
        '/\\ Envelope("PROVEN", link[w], w, n, content) \\in wire',
        '/\\ \\E x \\in Workers : Envelope("PROVEN", link[w], x, n, content) \\in wire',
        "OnlyTheSender",
    ),
    "challenges: an answer counts as often as it comes": (
        "ChallengeCalls",
        "(InTurn(n, n) /\\ \\A i \\in 1..Len(heard[s]) : heard[s][i] # content)",
        "InTurn(n, n)",
        "OnlyTheWorker",
    ),
    "calls: a failure is reported before the answers that arrived": (
        "CallsEnds",
        "l \\in failed /\\ On(said, l) = {} /\\ \\A i \\in (collected[l] + 1)..Len(calls[l]) : calls[l][i].words = {}",
        "l \\in failed",
        "RefinesAckProtocol",
    ),
}


@pytest.mark.tlc
@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", FAULTS)
def test_tlc_finds_each_fault_planted_in_a_family(
    toolchain: Toolchain, model: Manifest, recorder: Recorder, tmp_path: Path, fault: str
) -> None:
    name, before, after, violated = FAULTS[fault]
    folder = Path(shutil.copytree(model.folder, tmp_path / "tla"))
    [configuration] = model.select([name])
    module = folder / f"{configuration.module}.tla"
    text = module.read_text(encoding="utf-8")
    assert text.count(before) == 1
    module.write_text(text.replace(before, after), encoding="utf-8")

    [verdict] = Suite(toolchain, Manifest.read(folder), recorder).run([configuration])

    assert configuration.expected is Expected.PASS
    assert not verdict.as_expected
    if violated:
        assert verdict.found == (f"{violated} violated",)
