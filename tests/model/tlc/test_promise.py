"""Each clause of the promise (`tla/WeightSync.tla`) has a step in `tla/MCPromise.tla` that only this clause refuses."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightsync.model import Manifest, Purpose, Toolchain, find_model
from weightsync.model.process import Ending, Job, TlcRun
from weightsync.model.text import Library

PROMISE, STEPS = "WeightSync", "MCPromise"
#: Clauses that follow from others, so that no step is refused by them alone. With the reasons.
IMPLIED = {
    ("Connect", "incarnation'[s] # 0"): "with incarnation[s] = 0 and the rest unchanged, 0 again changes nothing",
    ("Send", "lost \\cap refused = {}"): "of one that is in both the outcome says LOST, as if it were in lost alone",
    ("Serve", "incarnation[s] # 0"): "who has no incarnation has sent nothing, and v <= version[s] refuses it",
}

Clause = tuple[str, str]


def clauses(folder: Path) -> list[Clause]:
    """Every conjunct of every action of the promise, as the action and the text in one line."""
    library = Library(folder)
    following = library.resolve(PROMISE, "Next")
    assert following is not None
    actions = list(dict.fromkeys(re.findall(r"\b([A-Z]\w+)\(", following.body)))
    return [(action, clause) for action in actions for clause in _conjuncts(library, action)]


def _conjuncts(library: Library, action: str) -> Iterator[str]:
    found = library.resolve(PROMISE, action)
    assert found is not None
    body = re.sub(r"(?s)^.*?\bIN\n", "\n", found.body, count=1) if "LET" in found.body else found.body
    for conjunct in re.split(r"\n  /\\ ", body)[1:]:
        text = " ".join(conjunct.split())
        whole = re.match(r"\\A|\\E|.*\b(IF|CASE)\b|UNCHANGED", text)
        yield from [text] if whole else (re.sub(r"^\((.*)\)$", r"\1", part) for part in text.split(" /\\ "))


def refused(folder: Path) -> list[Clause]:
    """The clauses for which MCPromise.tla has a step, in its order."""
    text = (folder / f"{STEPS}.tla").read_text(encoding="utf-8")
    steps = text[text.index("Steps == <<") : text.index("\n>>")]
    named = re.findall(r"^  \\\* (\w+): (.+)\n  S\(", steps, flags=re.MULTILINE)
    assert len(named) == len(re.findall(r"^  S\(", steps, flags=re.MULTILINE)), "a step names no clause above it"
    return named


def test_each_clause_of_the_promise_has_a_step_that_it_refuses() -> None:
    folder = find_model()

    assert set(refused(folder)) == set(clauses(folder)) - set(IMPLIED), (
        "WeightSync.tla and MCPromise.tla differ: give each clause a step that it refuses, or a reason in IMPLIED"
    )
    assert set(IMPLIED) <= set(clauses(folder))


def test_the_refused_steps_have_a_quick_proof_and_a_quick_canary() -> None:
    of = {found.purpose: found for found in Manifest.read(find_model()).configurations if found.module == STEPS}

    assert set(of) == {Purpose.PROOF, Purpose.CANARY}
    assert {found.tier.value for found in of.values()} == {"quick"}
    assert of[Purpose.CANARY].violates == "EachClauseRefuses"


@pytest.mark.tlc
@pytest.mark.slow
@pytest.mark.parametrize("clause", sorted(set(clauses(find_model())) - set(IMPLIED)), ids=": ".join)
def test_tlc_finds_a_violation_if_a_clause_of_the_promise_is_removed(
    tmp_path: Path, toolchain: Toolchain, clause: Clause
) -> None:
    folder = find_model()
    shutil.copy(folder / f"{STEPS}.tla", tmp_path)
    [steps] = Manifest.read(folder).select([STEPS])
    (tmp_path / f"{PROMISE}.tla").write_text(without(folder, clause), encoding="utf-8")

    outcome = TlcRun(toolchain, Job(tmp_path, STEPS, steps.config.text, workers=1, timeout=60)).run(lambda _: None)

    assert outcome.ending is Ending.EXITED
    assert outcome.exit_code == 13
    assert outcome.findings.violations


def without(folder: Path, clause: Clause) -> str:
    """The text of the promise, with one clause replaced by TRUE."""
    action, wanted = clause
    text = (folder / f"{PROMISE}.tla").read_text(encoding="utf-8")
    start = re.search(rf"^{action}\(", text, flags=re.MULTILINE)
    assert start is not None
    loose = r"\s+".join(map(re.escape, wanted.split()))
    body, count = re.subn(rf"\(?{loose}(?=\)?(?: /\\|\n))\)?", "TRUE", text[start.start() :], count=1)
    assert count == 1, clause
    return text[: start.start()] + body
