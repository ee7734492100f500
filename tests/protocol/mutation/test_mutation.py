"""Tests notice changes of the machines, their pure halves and the drivers: few mutants survive, each with a reason.

Most tests here check the committed results. The slow ones run the mutants (see `run`).
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from asking import OWN
from driven_ledger import PAGE as DRIVEN_PAGE
from driven_ledger import Ledger, Score, killed, known
from mutated import DRIVEN, PURE
from reviewed import PAGE, Key, Reviewed
from skipping import require_modules

RUN = Path(__file__).with_name("run.py")
LOWEST_KILL_RATE = 0.9
#: The number of shares of the drivers' mutants. Each day another share is run.
SHARES = 20


def hunted(tmp_path: Path, *names: str, timeout: float) -> list[list[Any]]:
    """Run the mutants of the functions of these names (none: of all), and return what became of each."""
    require_modules("mutmut", what="WHETHER MUTANTS OF THE CODE ARE KILLED", extra="dev")
    result = tmp_path / "result.json"
    command = [sys.executable, str(RUN), str(result), *names]
    # Mutants are not recorded: their traces need not conform.
    environment = {name: value for name, value in os.environ.items() if name != "WEIGHTSYNC_TRACE"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
    assert done.returncode in (0, 5), (
        done.stdout + done.stderr
    )  # 5: pytest ran no test, since the hunt took their place
    found: list[list[Any]] = json.loads(result.read_text(encoding="utf-8"))
    return found


def test_at_least_90_percent_of_the_machines_mutants_are_killed() -> None:
    reviewed = Reviewed.read()

    assert reviewed.killed + len(reviewed.reasons) == reviewed.mutants
    assert reviewed.killed / reviewed.mutants >= LOWEST_KILL_RATE


def test_every_surviving_mutant_of_the_machines_has_a_reason() -> None:
    assert [key for key, reason in Reviewed.read().reasons.items() if len(reason) < 10] == []


def test_code_mutants_md_shows_the_committed_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == Reviewed.read().page


def test_the_committed_results_count_the_mutants_of_the_current_code() -> None:
    require_modules("mutmut", what="WHETHER MUTANTS OF THE CODE ARE COUNTED", extra="dev")
    reviewed = Reviewed.read()
    keys = known(PURE)

    again = "hunt again: python tests/protocol/mutation/run.py RESULT, then reviewed.py RESULT"
    assert reviewed.reasons.keys() - set(keys) == set(), again
    assert sum(key[0] not in reviewed.unhunted for key in keys) == reviewed.mutants, again


def test_a_result_of_all_mutants_replaces_the_counts_and_keeps_the_reasons() -> None:
    stale: Key = ("module.gone", "a", "b", 0)
    kept: Key = ("module.kept", "a", "b", 1)
    before = Reviewed(2, 0, {stale: "it is gone", kept: "it is the same"})
    result = [
        [*stale, "test"],
        [*kept, "survived"],
        ["module.new", "c", "", 0, "survived"],
        ["module.slow", "", "", 0, "time"],
    ]

    after = before.after(result)

    assert (after.mutants, after.killed) == (4, 2)
    assert after.reasons == {kept: "it is the same", ("module.new", "c", "", 0): ""}
    assert "``c`` is gone" in after.page
    assert "**2 of 4 are killed (50.0 %).**" in after.page


def test_a_result_of_functions_not_run_before_is_added_to_the_counts() -> None:
    known: Key = ("module.b", "a", "b", 0)
    lives: Key = ("module.a", "a", "b", 1)
    before = Reviewed(2, 1, {known: "it is the same"}, ("module.a", "module.later"))

    after = before.after([[*lives, "survived"], ["module.a", "c", "", 0, "test"]])

    assert (after.mutants, after.killed, after.unhunted) == (4, 2, ("module.later",))
    assert list(after.reasons.items()) == [(lives, ""), (known, "it is the same")]


@pytest.mark.slow
def test_the_mutants_of_two_functions_are_planted_and_killed(tmp_path: Path) -> None:
    """Checks on two functions that mutants are planted and found.

    That the shipped code passes all oracles, the run of the mutants checks itself.
    """
    found = hunted(
        tmp_path, "weightsync.protocol.receiver._is_current", "weightsync.protocol.sender.ends_link", timeout=110
    )

    assert {where for where, *_ in found} == {
        "weightsync.protocol.receiver._is_current",
        "weightsync.protocol.sender.ends_link",
    }
    assert [each for each in found if each[-1] == "survived"] == []
    assert len(found) >= 5


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_only_reviewed_mutants_of_the_machines_survive(tmp_path: Path) -> None:
    reviewed = Reviewed.read()
    found = reviewed.after(hunted(tmp_path, timeout=3500))

    assert [key for key in found.reasons if key not in reviewed.reasons] == [], (
        "surviving mutants without a reviewed reason"
    )
    assert [key for key in reviewed.reasons if key not in found.reasons] == [], (
        "they are killed now: remove them from survivors.toml"
    )
    assert found.killed * reviewed.mutants >= reviewed.killed * found.mutants, "the kill rate has dropped"


def test_at_least_90_percent_of_the_drivers_mutants_are_killed() -> None:
    ledger = Ledger.read()

    assert set(ledger.scores) <= set(DRIVEN)
    assert len(ledger.counted) == ledger.whole.mutants - ledger.whole.killed
    assert ledger.whole.share >= LOWEST_KILL_RATE


def test_every_surviving_mutant_of_the_drivers_has_a_reason() -> None:
    ledger = Ledger.read()

    assert [key for key, reason in ledger.survivors.items() if len(ledger.reasons.get(reason, "")) < 10] == []
    assert set(ledger.reasons) == set(ledger.survivors.values()), "a reason without a surviving mutant"


def test_driver_mutants_md_shows_the_committed_ledger() -> None:
    assert DRIVEN_PAGE.read_text(encoding="utf-8") == Ledger.read().page


def test_a_result_of_some_functions_updates_the_survivors_and_scores_of_the_ledger() -> None:
    other: Key = ("weightsync.clock.seconds", "a", "b", 0)
    stale: Key = ("weightsync.protocol.codec.peek", "a", "b", 0)
    kept: Key = ("weightsync.protocol.codec.peek", "c", "d", 1)
    lives: Key = ("weightsync.clock.new", "a", "", 0)
    scores = {"weightsync.protocol.codec": Score(2, 0), "weightsync.clock": Score(1, 0)}
    new = ("weightsync.clock.later", "weightsync.clock.new")
    before = Ledger(scores, {"equal": "it is the same"}, {other: "equal", stale: "equal", kept: "equal"}, new)
    mutants = {other[0]: 4, kept[0]: 2, "weightsync.clock.new": 2, "weightsync.clock.later": 9}
    assert before.after([], mutants).scores == {
        "weightsync.protocol.codec": Score(2, 0),
        "weightsync.clock": Score(4, 3),
    }

    after = before.after([[*kept, "survived"], [kept[0], "e", "", 0, "test"], [*lives, "survived"]], mutants)

    assert after.scores == {"weightsync.protocol.codec": Score(2, 1), "weightsync.clock": Score(6, 4)}
    assert after.survivors == {other: "equal", kept: "equal", lives: ""}
    assert after.new == ("weightsync.clock.later",)
    assert after.without([kept, lives]).survivors == {other: "equal"}
    assert killed([[*kept, "survived"], [*lives, "time"], [*other, "test"]]) == {lives, other}
    assert "1 of 2 (50.0 %)" in after.page
    assert "- `clock.seconds`: ``a`` became ``b``" in after.page


def test_survivors_of_functions_not_run_yet_are_not_counted_in_the_scores() -> None:
    lives: Key = ("weightsync.clock.seconds", "a", "b", 0)
    ledger = Ledger({"weightsync.clock": Score(9, 8)}, {}, {lives: "equal"}, (lives[0],))
    pruned = ledger.after([], {lives[0]: 4, "weightsync.clock.wall_time": 2})

    assert (pruned.counted, pruned.scores) == ([], {"weightsync.clock": Score(2, 2)})
    assert ledger.after([], {"weightsync.clock.wall_time": 2}).new == ()


def test_functions_of_a_module_never_run_before_are_new_until_they_are_run() -> None:
    names = [f"weightsync.clock.{name}" for name in ("seconds", "wall_time")]
    after = Ledger({}, {}, {}).after([[names[0], "a", "b", 0, "test"]], dict.fromkeys(names, 1))

    assert (after.scores, after.new) == ({"weightsync.clock": Score(1, 1)}, (names[1],))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_only_listed_mutants_survive_in_todays_share_of_the_drivers_mutants(tmp_path: Path) -> None:
    share = datetime.date.today().toordinal() % SHARES
    ledger = Ledger.read()
    found = hunted(tmp_path, "--driven", f"--share={share}/{SHARES}", *ledger.scores, timeout=3500)

    assert len(found) > ledger.whole.mutants / SHARES / 2
    known = [(*key, how) for *key, how in found if key[0] not in ledger.new]
    assert [key for *key, how in known if how == "survived" and tuple(key) not in ledger.survivors] == [], (
        "surviving mutants without a reviewed reason"
    )


def test_each_mutated_driver_module_has_tests_named_in_asking() -> None:
    found = {module: [own for name, own in OWN.items() if module.startswith(name)] for module in DRIVEN}

    assert [module for module, own in found.items() if not own] == [], "name them in OWN of asking.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_ledger_of_the_drivers_counts_the_mutants_of_the_current_code() -> None:
    require_modules("mutmut", what="WHETHER MUTANTS OF THE CODE ARE KILLED", extra="dev")
    ledger, keys = Ledger.read(), known()
    again = "count again: python tests/protocol/mutation/driven_ledger.py --prune"

    assert ledger.survivors.keys() - set(keys) == set(), again
    assert ledger.after([], Counter(key[0] for key in keys)) == ledger, again
