"""`spec/check.py mutants`, as a process, hunts all mutants of a small model of a lamp, with TLC."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from weightsync.model import Toolchain

pytestmark = [pytest.mark.tlc, pytest.mark.timeout(180)]

ROOT = Path(__file__).resolve().parents[3]
_PATIENCE = 120.0
_REASON = 'reason = "the condition is always TRUE"\n'


class Hunt:
    """Runs the command on a copy of the lamp, which a test may change."""

    def __init__(self, folder: Path, toolchain: Toolchain) -> None:
        self.lamp = Path(shutil.copytree(Path(__file__).parent / "lamp", folder / "lamp"))
        self._model = ["--model", str(self.lamp), "--ledger", str(self.lamp / "mutants.toml")]
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._environment = {
            **os.environ,
            "TMPDIR": str(self.temporary),
            "PYTHONPATH": str(ROOT),
            "TLA2TOOLS_JAR": str(toolchain.jar),
        }

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "spec" / "check.py"), "mutants", *self._model, *words],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: str) -> tuple[int, str]:
        process = self.start(*words)
        said, _ = process.communicate(timeout=_PATIENCE)
        return process.returncode, said

    def change(self, name: str, old: str, new: str) -> None:
        path = self.lamp / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))


@pytest.fixture
def hunt(tmp_path: Path, toolchain: Toolchain) -> Hunt:
    return Hunt(tmp_path, toolchain)


def test_all_as_the_ledger_says_exits_with_0_and_prints_the_score_by_killer(hunt: Hunt) -> None:
    code, said = hunt.run()

    assert code == 0, said
    assert re.search(r"9 mutants run, in \d+ s: 7 property, 1 canary, 1 equivalent", said)
    assert "8 of all 9 that TLC can evaluate are killed: 88.9 % (it may not fall below 88.8 %)" in said
    assert [killer in said for killer in ("Counts", "TypeOK", "lit", "Switches")] == [True] * 4
    assert list(hunt.temporary.iterdir()) == []


def test_a_property_left_out_lets_mutants_live_and_exits_with_1(hunt: Hunt) -> None:
    hunt.change("manifest.toml", 'properties = ["Switches", "Counts"]', 'properties = ["Switches"]')

    code, said = hunt.run()

    assert code == 1, said
    assert "killed no more (survived), formerly by Counts in Lamp: Switch: side count + 1 -> count" in said
    assert "the score is 33.3 %, and it was 88.8 %: it may not fall" in said


def test_a_mutant_that_lives_without_reason_exits_with_1(hunt: Hunt) -> None:
    hunt.change("mutants.toml", _REASON, "")

    code, said = hunt.run()

    assert code == 1, said
    assert "lives (equivalent) without a reason in the ledger: Switch: alternative IF TRUE" in said


def test_what_the_ledger_says_is_confirmed_and_what_is_hunted_afresh_is_found_without_it(hunt: Hunt) -> None:
    """The mutant violates a property and also never meets a situation. A new hunt finds the property first."""
    hunt.change("mutants.toml", 'fate = "property"\nby = "Switches"', 'fate = "canary"\nby = "lit"')

    confirmed, afresh = hunt.run(), hunt.run("--share", "1/1")

    assert (confirmed[0], afresh[0]) == (0, 0)
    assert "9 mutants, 0 of them afresh, after the model itself" in confirmed[1]
    assert ": 6 property, 2 canary, 1 equivalent" in confirmed[1]
    assert "9 mutants, 9 of them afresh, after the model itself" in afresh[1]
    assert ": 7 property, 1 canary, 1 equivalent" in afresh[1]


def test_pin_writes_what_was_seen_and_keeps_reasons(hunt: Hunt) -> None:
    before = (hunt.lamp / "mutants.toml").read_text()
    hunt.change("mutants.toml", "score = 88.8", "score = 11.1")

    code, said = hunt.run("--pin")

    assert code == 0, said
    assert before == (hunt.lamp / "mutants.toml").read_text()


def test_a_mutant_that_nothing_is_known_of_is_hunted_with_any_share_and_its_entry_finds_its_place(hunt: Hunt) -> None:
    before = (hunt.lamp / "mutants.toml").read_text()
    entry = before.split("[[mutant]]")[3]
    hunt.change("mutants.toml", f"[[mutant]]{entry}", "")

    code, said = hunt.run("--share", "9/9", "--pin")

    assert code == 0, said
    assert "9 mutants, 2 of them afresh, after the model itself" in said
    assert before == (hunt.lamp / "mutants.toml").read_text()


def test_a_model_that_does_not_hold_is_not_hunted_in(hunt: Hunt) -> None:
    hunt.change("Lamp.tla", "count < Most", "count <= Most")

    code, said = hunt.run()

    assert code == 1, said
    assert "Lamp does not give for the model itself what the manifest says" in said


def test_an_interrupt_leaves_no_folder(hunt: Hunt) -> None:
    process = hunt.start()
    deadline = time.monotonic() + _PATIENCE
    while not list(hunt.temporary.glob("weightsync-tlc-*")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)

    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=_PATIENCE)

    assert process.returncode == 128 + signal.SIGTERM, said
    assert list(hunt.temporary.iterdir()) == []
