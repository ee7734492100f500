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
_TIMEOUT_S = 120.0
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
        output, _ = process.communicate(timeout=_TIMEOUT_S)
        return process.returncode, output

    def change(self, name: str, old: str, new: str) -> None:
        path = self.lamp / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))


@pytest.fixture
def hunt(tmp_path: Path, toolchain: Toolchain) -> Hunt:
    return Hunt(tmp_path, toolchain)


def test_fates_as_in_the_ledger_exit_with_0_and_print_the_score_by_killer(hunt: Hunt) -> None:
    code, output = hunt.run()

    assert code == 0, output
    assert re.search(r"9 mutants run, in \d+ s: 7 property, 1 canary, 1 equivalent", output)
    assert "8 of all 9 that TLC can evaluate are killed: 88.9 % (it may not fall below 88.8 %)" in output
    assert [killer in output for killer in ("Counts", "TypeOK", "lit", "Switches")] == [True] * 4
    assert list(hunt.temporary.iterdir()) == []


def test_a_removed_property_lets_mutants_survive_and_exits_with_1(hunt: Hunt) -> None:
    hunt.change("manifest.toml", 'properties = ["Switches", "Counts"]', 'properties = ["Switches"]')

    code, output = hunt.run()

    assert code == 1, output
    assert "killed no more (survived), formerly by Counts in Lamp: Switch: side count + 1 -> count" in output
    assert "the score is 33.3 %, and it was 88.8 %: it may not fall" in output


def test_a_surviving_mutant_without_a_reason_exits_with_1(hunt: Hunt) -> None:
    hunt.change("mutants.toml", _REASON, "")

    code, output = hunt.run()

    assert code == 1, output
    assert "lives (equivalent) without a reason in the ledger: Switch: alternative IF TRUE" in output


def test_a_run_confirms_the_fates_in_the_ledger_and_a_share_hunts_without_them(hunt: Hunt) -> None:
    """The mutant violates a property and also never meets a situation. A new hunt finds the property first."""
    hunt.change("mutants.toml", 'fate = "property"\nby = "Switches"', 'fate = "canary"\nby = "lit"')

    confirmed, afresh = hunt.run(), hunt.run("--share", "1/1")

    assert (confirmed[0], afresh[0]) == (0, 0)
    assert "9 mutants, 0 of them afresh, after the model itself" in confirmed[1]
    assert ": 6 property, 2 canary, 1 equivalent" in confirmed[1]
    assert "9 mutants, 9 of them afresh, after the model itself" in afresh[1]
    assert ": 7 property, 1 canary, 1 equivalent" in afresh[1]


def test_pin_writes_the_fates_found_and_keeps_the_reasons(hunt: Hunt) -> None:
    before = (hunt.lamp / "mutants.toml").read_text()
    hunt.change("mutants.toml", "score = 88.8", "score = 11.1")

    code, output = hunt.run("--pin")

    assert code == 0, output
    assert before == (hunt.lamp / "mutants.toml").read_text()


def test_a_mutant_missing_from_the_ledger_is_hunted_with_any_share_and_inserted_in_order(hunt: Hunt) -> None:
    before = (hunt.lamp / "mutants.toml").read_text()
    entry = before.split("[[mutant]]")[3]
    hunt.change("mutants.toml", f"[[mutant]]{entry}", "")

    code, output = hunt.run("--share", "9/9", "--pin")

    assert code == 0, output
    assert "9 mutants, 2 of them afresh, after the model itself" in output
    assert before == (hunt.lamp / "mutants.toml").read_text()


def test_mutants_of_a_model_that_is_wrong_itself_are_not_hunted(hunt: Hunt) -> None:
    hunt.change("Lamp.tla", "count < Most", "count <= Most")

    code, output = hunt.run()

    assert code == 1, output
    assert "Lamp does not give for the model itself what the manifest says" in output


def test_an_interrupt_leaves_no_folder(hunt: Hunt) -> None:
    process = hunt.start()
    deadline = time.monotonic() + _TIMEOUT_S
    while not list(hunt.temporary.glob("weightsync-tlc-*")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)

    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=_TIMEOUT_S)

    assert process.returncode == 128 + signal.SIGTERM, output
    assert list(hunt.temporary.iterdir()) == []
