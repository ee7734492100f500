"""Mutants of the model: parsing, mutation operators, judging runs, and the ledger. TLC does not run here."""

from __future__ import annotations

import io
import re
import shutil
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from modelcheck import mutants_display
from modelcheck.mutants import LEDGER as OURS
from modelcheck.mutants import (
    Baseline,
    Entry,
    Fate,
    Finding,
    Hunted,
    Ledger,
    Mutant,
    Score,
    Share,
    Source,
    changed_baselines,
    complaints,
    draw,
    fallen,
    mutants,
    stale,
)
from modelcheck.mutants.hunt import judge
from modelcheck.mutants.parser import parse
from modelcheck.mutants.session import source_of
from modelcheck.mutants.syntax import Kind
from rich.console import Console

from weightsync.errors import ConfigurationError
from weightsync.model import Configuration, Counts, Expected, Manifest, Purpose, Tier, Toolchain, find_model
from weightsync.model.config import Config
from weightsync.model.output import Findings, Violation
from weightsync.model.output import StatementKind as Violated
from weightsync.model.process import Ending, Outcome
from weightsync.model.text import Library, Module, without_comments

LOWEST_SCORE = 85.0


@pytest.fixture(scope="module")
def model() -> Manifest:
    return Manifest.read(find_model())


@pytest.fixture(scope="module")
def ledger(model: Manifest) -> Ledger:
    return Ledger.read(OURS)


@pytest.fixture(scope="module")
def whole(model: Manifest, ledger: Ledger) -> tuple[Mutant, ...]:
    return draw(model, ledger)


def source(text: str, *roots: str, planted: Sequence[str] = ()) -> Source:
    return Source(Module("M", without_comments(textwrap.dedent(text))), roots, planted)


def edits(body: str, operator: str) -> list[tuple[str, str]]:
    """The changes that an operator makes to a definition, each as the part before and after."""
    found = mutants(source(f"A ==\n{textwrap.indent(textwrap.dedent(body), '  ')}\n====\n", "A"), ())
    return [(each.before, each.after) for each in found if each.operator == operator]


# The parser.


def test_bulleted_lists_are_read_by_their_columns() -> None:
    node = parse(
        """
  /\\ a
  /\\ \\/ b
     \\/ c = d
  /\\ e =>
       f
  """
    )

    assert node.kind is Kind.AND
    assert [str(part) for part in node.parts] == ["a", "b \\/ (c = d)", "e => f"]


def test_a_bullet_ends_the_open_expressions_before_it() -> None:
    node = parse("\n  /\\ IF a THEN b\n     ELSE c\n  /\\ \\E x \\in S : p\n  /\\ d")

    assert [part.kind for part in node.parts] == [Kind.IF, Kind.QUANTIFIED, Kind.NAME]


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("a \\/ b /\\ c", "(a \\/ b) /\\ c"),
        ("~a = b /\\ c", "(~(a = b)) /\\ c"),
        ("[f EXCEPT ![s].g[w] = @ + 1, ![t] = 0]", "[f EXCEPT ![s].g[w] = (@ + 1), ![t] = 0]"),
        ("{x \\in S : x # 0} \\cup {y : y \\in T}", "{x \\in S : x # 0} \\cup {y : y \\in T}"),
        ("CASE a -> b [] OTHER -> c", "CASE a -> b [] OTHER -> c"),
        ("LET x == 1 IN [w \\in W |-> f[w]']", "LET x == 1 IN [w \\in W |-> f[w]']"),
        ("UNCHANGED <<a, b>>", "UNCHANGED <<a, b>>"),
        ("[s : S, k : 1..n]", "[s : S, k : 1 .. n]"),
    ],
)
def test_parsed_expressions_are_written_with_their_operands_in_brackets(text: str, written: str) -> None:
    assert str(parse(text)) == written
    assert parse(written) == parse(text)


@pytest.mark.parametrize("text", ["a /\\", "[a EXCEPT ![s] = ", "IF a THEN b", "a )", "a^+", "[][a]_v", "a!b"])
def test_text_that_cannot_be_parsed_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="The model's text cannot be read"):
        parse(text)


def test_our_model_is_parsed_whole_and_rewritten_without_moving_lines(model: Manifest, ledger: Ledger) -> None:
    ours = source_of(model, ledger)

    assert {"Next", "Dispatch", "UpdateArrived", "FairWorld"} <= set(ours.trees)
    assert not set(model.planted) & set(ours.trees)
    for name, tree in ours.trees.items():
        assert parse(str(tree)) == tree, name
        text = ours.text(name, tree)
        assert text.count("\n") == ours.module.text.count("\n")
        again = Module(ours.module.name, text).definitions
        assert {each: again[each].first_line for each in again} == {
            each: found.first_line for each, found in ours.module.definitions.items()
        }


# The operators.


@pytest.mark.parametrize(
    ("operator", "body", "expected"),
    [
        ("drop", "/\\ a > 1\n/\\ x' = 1", [("a > 1", "TRUE")]),
        ("drop", "/\\ m.k = k\n/\\ x' = 1", []),
        ("negate", "/\\ B(a)\n/\\ x' = 1", [("B(a)", "~B(a)")]),
        ("keep", "/\\ a\n/\\ x' = 1\n/\\ UNCHANGED y", [("x' = 1", "UNCHANGED <<x>>")]),
        (
            "keep",
            "/\\ a\n/\\ IF b THEN x' = 1 ELSE x' = 2",
            [("x' = 1", "UNCHANGED <<x>>"), ("x' = 2", "UNCHANGED <<x>>")],
        ),
        ("stay", "x' = [x EXCEPT ![s] = 1, ![t] = 2]", [("1", "@"), ("2", "@")]),
        ("stay", "x' = [x EXCEPT ![s] = 1]", []),
        ("alternative", "IF a THEN b ELSE c", [("IF a THEN b ELSE c", "b"), ("IF a THEN b ELSE c", "c")]),
        ("alternative", "CASE a -> 1 [] b -> 2 [] OTHER -> 3", [("a -> 1", "nothing"), ("b -> 2", "nothing")]),
        ("either", "a \\/ b", [("a", "nothing"), ("b", "nothing")]),
        ("side", "a \\cup b", [("a \\cup b", "a"), ("a \\cup b", "b")]),
        ("side", "a \\ b", [("a \\ b", "a")]),
        ("side", "a + 1", [("a + 1", "a")]),
        ("sieve", "{m \\in box : m.w = w}", [("{m \\in box : (m.w = w)}", "box")]),
        ("larger", "Max(a, b)", [("Max(a, b)", "a"), ("Max(a, b)", "b")]),
        ("number", "f[1] + 0", [("0", "1")]),
        ("word", 'Foo(w, "ACK")', [('"ACK"', '"BYE"')]),
        ("word", 'SenderMay(x, "SEND")', []),
        ("compare", "IF a < b THEN 1 ELSE 2", [("a < b", "a <= b")]),
        ("compare", "/\\ a < b\n/\\ x' = 1", []),
        ("unfair", "/\\ \\A s \\in S : WF_vars(B(s))\n/\\ c", [("WF_vars(B(s))", "TRUE")]),
    ],
)
def test_each_mutation_operator_makes_its_changes(operator: str, body: str, expected: list[tuple[str, str]]) -> None:
    found = [(before.replace(": m.w = w", ": (m.w = w)"), after) for before, after in edits(body, operator)]

    assert found == expected


def test_branches_that_exist_only_for_reverts_are_not_mutated() -> None:
    assert edits('IF Rule("R") THEN a ELSE b \\cup c', "side") == []
    assert edits('IF ~Rule("R") THEN b \\cup c ELSE a', "side") == []
    assert edits('Rule("R") \\/ a', "either") == []
    assert edits('IF Rule("R") THEN a \\cup d ELSE b', "side") == [("a \\cup d", "a"), ("a \\cup d", "d")]


def test_names_of_mutants_do_not_depend_on_line_numbers() -> None:
    body = "A ==\n  /\\ a > 1\n  /\\ a > 1\n  /\\ x' = 1\n"
    before = mutants(source(f"{body}====\n", "A"), ())
    after = mutants(source(f"\n\nB == y \\cup z\n\n{body}====\n", "A", "B"), ())

    names = [each.name for each in before]
    assert len(set(names)) == len(names)
    assert any(name.endswith("#2") for name in names)
    assert [each.name for each in after if each.definition == "A"] == names


def test_the_shares_contain_every_mutant_once_and_are_of_equal_size(whole: Sequence[Mutant], ledger: Ledger) -> None:
    shares = [Share(which, 14).taken(whole, ledger) for which in range(1, 15)]

    assert sorted(each.name for share in shares for each in share) == sorted(each.name for each in whole)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert Share(1, 1).taken(whole, ledger) == tuple(whole)
    assert Share().taken(whole, ledger) == ()


def test_a_mutant_that_is_not_in_the_ledger_is_in_every_share(small: Ledger) -> None:
    known, new = mutant("dies"), mutant("new")

    assert [Share(which, 2).taken([known, new], small) for which in (1, 2)] == [(known, new), (new,)]


@pytest.mark.parametrize("text", ["", "1", "x/2", "0/2", "3/2", "1/0", "-1/2"])
def test_an_invalid_share_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a share|invalid literal"):
        Share.read(text)
    assert Share.read("2/14") == Share(2, 14)


# One run of a mutant.

HUNT = Configuration(
    "H", "M", Config("Spec", invariants=("P",)), Purpose.PROOF, Tier.ALL, Expected.PASS, None, "", (), 1, 1.0, None
)
BASELINE = Baseline(HUNT, Counts(10, 5, 3), frozenset({"this", "that"}))


def outcome(counts: Counts = BASELINE.counts, met: Sequence[str] = ("this", "that"), **more: object) -> Outcome:
    findings = Findings(counts=counts, completed=True)
    findings.violations += more.get("violations", [])  # type: ignore[arg-type]
    findings.errors += more.get("errors", [])  # type: ignore[arg-type]
    return Outcome(more.get("ending", Ending.EXITED), more.get("exit_code", 0), findings, 1.0, (), tuple(met))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (outcome(), Finding(Fate.EQUIVALENT, "", "H")),
        (outcome(Counts(11, 5, 3)), Finding(Fate.SURVIVED, "", "H")),
        (outcome(met=["this", "that", "more"]), Finding(Fate.SURVIVED, "", "H")),
        (outcome(met=["that"]), Finding(Fate.CANARY, "this", "H")),
        (outcome(violations=[Violation(Violated.INVARIANT, "P")], exit_code=12), Finding(Fate.PROPERTY, "P", "H")),
        (
            outcome(violations=[Violation(Violated.DEADLOCK, "")], exit_code=11),
            Finding(Fate.PROPERTY, "a deadlock", "H"),
        ),
        (outcome(errors=["In evaluation ..."], exit_code=75), Finding(Fate.INVALID, "In evaluation ...", "H")),
        (outcome(ending=Ending.TIMED_OUT, exit_code=None), Finding(Fate.UNDECIDED, "timed out", "H")),
    ],
)
def test_a_mutant_is_killed_by_properties_and_situations_and_never_by_counts(
    seen: Outcome, expected: Finding, tmp_path: Path
) -> None:
    assert judge(BASELINE, seen, Library(tmp_path)) == expected


# The ledger and the score.

LEDGER = """\
# head
[model]
module = "M"
roots = ["A"]
untouched = []
lookout = "L"

# `python spec/check.py mutants --pin` writes all that follows, except the reasons.
[ratchet]
score = 50.0

[[hunt]]
configuration = "H"
met = ["this"]

[[mutant]]
name = "dies"
fate = "property"
by = "P"
where = "H"

[[mutant]]
name = "lives"
fate = "equivalent"
reason = "nobody \\"cares\\""
"""


@pytest.fixture
def small(tmp_path: Path) -> Ledger:
    (tmp_path / "mutants.toml").write_text(LEDGER)
    return Ledger.read(tmp_path / "mutants.toml")


def mutant(name: str) -> Mutant:
    return Mutant(name, "A", "drop", "a", "TRUE", parse("TRUE"))


def seen(**fates: Fate) -> list[Entry]:
    return [Entry(name, fate, "Q", "H") for name, fate in fates.items()]


def all_complaints(ledger: Ledger, entries: Sequence[Entry]) -> list[str]:
    return [*complaints(ledger, entries), *fallen(ledger.after(entries, [entry.name for entry in entries]))]


def test_mutants_killed_or_alive_as_in_the_ledger_cause_no_complaint(small: Ledger) -> None:
    assert all_complaints(small, seen(dies=Fate.CANARY, lives=Fate.EQUIVALENT)) == []


@pytest.mark.parametrize(
    ("fates", "expected"),
    [
        ({"dies": Fate.SURVIVED, "lives": Fate.EQUIVALENT}, "killed no more .*formerly by P in H: dies"),
        ({"dies": Fate.INVALID, "lives": Fate.EQUIVALENT}, "can no longer evaluate it .*: dies"),
        ({"dies": Fate.PROPERTY, "lives": Fate.PROPERTY}, "its reason to live is stale: lives"),
        ({"dies": Fate.UNDECIDED, "lives": Fate.EQUIVALENT}, "killed no more"),
    ],
)
def test_a_mutant_whose_fate_contradicts_the_ledger_is_a_complaint(
    small: Ledger, fates: dict[str, Fate], expected: str
) -> None:
    assert re.search(expected, "\n".join(all_complaints(small, seen(**fates))))


def test_a_surviving_mutant_without_a_reason_is_a_complaint(small: Ledger, tmp_path: Path) -> None:
    (tmp_path / "mutants.toml").write_text(LEDGER.rpartition("reason")[0])

    [complaint] = all_complaints(Ledger.read(tmp_path / "mutants.toml"), seen(dies=Fate.PROPERTY, lives=Fate.SURVIVED))
    assert complaint == "lives (survived) without a reason in the ledger: lives"


def test_the_score_counts_survivors_with_a_reason_and_may_not_fall(small: Ledger) -> None:
    entries = seen(dies=Fate.PROPERTY, lives=Fate.EQUIVALENT, other=Fate.INVALID, more=Fate.SURVIVED)
    score = Score(entries)

    assert (score.killed, score.valid) == (1, 3)
    assert "the score is 33.3 %, and it was 50.0 %: it may not fall" in all_complaints(small, entries)
    assert list(fallen(small)) == []


def test_mutants_that_a_share_did_not_run_keep_their_fate_in_the_ledger(small: Ledger) -> None:
    after = small.after(seen(dies=Fate.SURVIVED), ["dies", "lives"])

    assert list(fallen(after)) == ["the score is 0.0 %, and it was 50.0 %: it may not fall"]
    assert after.entries["lives"] == small.entries["lives"]


def test_kills_are_counted_per_definition_and_configuration(small: Ledger) -> None:
    where = {"A: one": "K", "A: two": "K", "A: three": "H", "AB: four": "H"}
    lives = Entry("A: lives", Fate.SURVIVED, "", "H")
    seen = [lives, *(Entry(name, Fate.PROPERTY, "P", place) for name, place in where.items())]

    assert small.after(seen, [entry.name for entry in seen]).kills() == {"A": {"K": 2, "H": 1}, "AB": {"H": 1}}


def test_entries_without_mutant_and_mutants_without_entry_are_named(small: Ledger) -> None:
    found = list(stale(small, [mutant("dies"), mutant("new")]))

    assert found == [
        "stale entry, there is no such mutant any more: lives",
        "not in the ledger (python spec/check.py mutants --pin): new",
    ]


def test_new_and_lost_situations_of_the_model_are_reported(small: Ledger) -> None:
    assert list(changed_baselines(small, [BASELINE])) == [
        "H: met, but not in the ledger: that (python spec/check.py mutants --pin)"
    ]
    gone = Baseline(HUNT, Counts(1, 1, 1), frozenset())
    assert list(changed_baselines(small, [gone])) == ["H: the model itself never meets: this"]


def test_pinning_keeps_reasons_and_the_ratchet_only_rises(small: Ledger, tmp_path: Path) -> None:
    entries = [Entry("dies", Fate.CANARY, "Q", "H"), Entry("lives", Fate.SURVIVED)]

    small.after(entries, ["dies", "lives", "more"]).write({"H": frozenset({"that"})})
    lower = Ledger.read(tmp_path / "mutants.toml")
    lower.after([Entry("lives", Fate.PROPERTY, "P", "H")], ["dies", "lives"]).write(lower.hunts)
    higher = Ledger.read(tmp_path / "mutants.toml")

    assert (lower.ratchet, higher.ratchet) == (50.0, 100.0)
    assert lower.entries["lives"] == Entry("lives", Fate.SURVIVED, reason='nobody "cares"')
    assert higher.entries["lives"].reason == ""
    assert lower.hunts == {"H": frozenset({"that"})}
    assert (tmp_path / "mutants.toml").read_text().startswith("# head\n[model]\n")


@pytest.mark.parametrize(
    "broken", ["", "[model", LEDGER.replace("equivalent", "fine"), LEDGER.replace("[ratchet]", "")]
)
def test_an_incomplete_or_invalid_ledger_is_refused(tmp_path: Path, broken: str) -> None:
    (tmp_path / "mutants.toml").write_text(broken)

    with pytest.raises(ConfigurationError, match="The ledger"):
        Ledger.read(tmp_path / "mutants.toml")


class _InterruptedSession:
    """A session that is interrupted after its first mutant."""

    def __init__(self, *about: object) -> None:
        del about

    def measure(self) -> tuple[Baseline, ...]:
        return (BASELINE,)

    def hunt(
        self, baselines: object, wanted: Sequence[Mutant], afresh: object, report: Callable[[Hunted], None]
    ) -> None:
        del baselines, afresh
        report(Hunted(wanted[0], Finding(Fate.PROPERTY, "Counts", "Lamp")))
        raise KeyboardInterrupt


@pytest.mark.parametrize(("repin", "known"), [(True, 1), (False, 0)])
def test_an_interrupted_run_writes_its_results_only_if_it_pins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repin: bool, known: int
) -> None:
    lamp = Path(shutil.copytree(Path(__file__).parent / "lamp", tmp_path / "lamp"))
    head, *_ = (lamp / "mutants.toml").read_text().partition("\n[[mutant]]")
    (lamp / "mutants.toml").write_text(head)
    monkeypatch.setattr(mutants_display, "Session", _InterruptedSession)
    toolchain = Toolchain(Path("java"), Path("tla2tools.jar"))

    with pytest.raises(KeyboardInterrupt):
        mutants_display.hunt_mutants(
            Manifest.read(lamp), lamp / "mutants.toml", toolchain, Console(file=io.StringIO()), Share(), repin=repin
        )

    assert len(Ledger.read(lamp / "mutants.toml").entries) == known


# Our own ledger and model.


def test_our_ledger_has_exactly_the_mutants_of_the_model(ledger: Ledger, whole: Sequence[Mutant]) -> None:
    assert len(whole) >= 900
    assert list(stale(ledger, whole)) == []


def test_exactly_the_surviving_mutants_of_our_ledger_have_a_reason(ledger: Ledger) -> None:
    for entry in ledger.entries.values():
        assert bool(entry.reason) is entry.lives, entry.name


def test_our_score_reaches_the_ratchet_and_the_lowest_allowed_score(ledger: Ledger) -> None:
    assert ledger.score.percent >= ledger.ratchet >= LOWEST_SCORE


def test_our_hunting_configurations_are_the_pinned_proofs_of_mchunt(model: Manifest, ledger: Ledger) -> None:
    for found in model.select(ledger.hunts):
        assert (found.purpose, found.module, found.pinned is None) == (Purpose.PROOF, "MCHunt", False)
    assert set(ledger.hunts) == {found.name for found in model.configurations if found.module == "MCHunt"}


def test_each_situation_is_met_by_some_hunting_configuration(model: Manifest, ledger: Ledger) -> None:
    lookout = Library(model.folder).module("MCHunt")
    assert lookout is not None
    named = set(re.findall(r'See(?:In)?\(\d+, "([^"]+)"', lookout.text))
    met = {situation.partition(",")[0] for found in ledger.hunts.values() for situation in found}

    assert {each.partition(",")[0] for each in named} - _NOT_HUNTED == met


#: Situations that only canaries of their own meet, since their graphs are too large for hunting.
_NOT_HUNTED = {"WiderSend", "WonBack", "BackAfterFailure"}


def test_each_fairness_condition_has_a_configuration_and_a_mutant_without_it(
    model: Manifest, whole: Sequence[Mutant]
) -> None:
    text = Library(model.folder).module("AckProtocol")
    assert text is not None
    bodies = text.definitions["FairClock"].body + text.definitions["FairWorld"].body
    conditions = set(re.findall(r'Fair\("(\w+)"', bodies))
    runs = [found for found in model.configurations if found.purpose is Purpose.UNFAIR and found.module == "MC"]
    unfair = {found.name.removeprefix("MCUnfair") for found in runs}

    assert conditions == unfair
    assert len(conditions) == bodies.count("WF_vars(") == sum(each.operator == "unfair" for each in whole)


@pytest.mark.parametrize(
    "situation", ["StaleAck", "AckAfterDeadline", "Fenced", "Recovery", "AfterRefusal", "Superseded", "CatchesUp"]
)
def test_a_situation_that_must_be_reachable_has_its_canary(model: Manifest, situation: str) -> None:
    [found] = model.select([f"MCCanary{situation}"])

    assert found.purpose is Purpose.CANARY
