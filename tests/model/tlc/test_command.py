"""`weightsync check` as a process: its exit codes, and that an interrupt leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from weightsync.model import Toolchain

pytestmark = [pytest.mark.tlc, pytest.mark.timeout(180)]

ROOT = Path(__file__).resolve().parents[3]
_TIMEOUT_S = 60.0
#: The maintainers' command, which can pin counts.
MAINTAINED = (str(ROOT / "spec" / "check.py"), "model")


def _take_hangups() -> None:
    """Restore the default action of SIGHUP, which child processes would ignore under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Command:
    """Runs `weightsync check` on a model, with a temporary folder of its own."""

    def __init__(self, specs: Path, folder: Path, toolchain: Toolchain) -> None:
        self.folder = folder
        self._specs = specs
        self._environment = {
            **os.environ,
            "TMPDIR": str(folder),
            "PYTHONPATH": str(ROOT),
            "TLA2TOOLS_JAR": str(toolchain.jar),
        }

    def start(self, *words: str, command: Sequence[str] = ("-m", "weightsync", "check")) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *command, "--model", str(self._specs), *words],
            env=self._environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=_take_hangups,  # noqa: PLW1509 - no other thread runs here
        )

    def run(self, *words: str, command: Sequence[str] = ("-m", "weightsync", "check")) -> tuple[int, str]:
        process = self.start(*words, command=command)
        said, _ = process.communicate(timeout=_TIMEOUT_S)
        return process.returncode, said

    def machines(self) -> list[int]:
        """The ids of the JVMs that use the folder."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                line = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            except OSError:
                continue
            if b"tlc2.TLC" in line and str(self.folder).encode() in line:
                found.append(int(entry.name))
        return found

    def left_over(self) -> list[str]:
        return [path.name for path in self.folder.glob("weightsync-tlc-*")]


@pytest.fixture
def command(specs: Path, tmp_path: Path, toolchain: Toolchain) -> Iterator[Command]:
    folder = tmp_path / "tmp"
    folder.mkdir()
    command = Command(specs, folder, toolchain)
    yield command
    for machine in command.machines():
        os.kill(machine, signal.SIGKILL)


@pytest.fixture
def endless(specs: Path) -> None:
    """Make the larger configuration run without an end."""
    path = specs / "manifest.toml"
    path.write_text(path.read_text().replace("Max = 2000 ", "Max = 2000000000 "))


def wait_until(command: Command, count: int) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while len(command.machines()) != count:
        assert time.monotonic() < deadline, f"{command.machines()} instead of {count} JVMs"
        time.sleep(0.05)


def test_verdicts_as_expected_exit_with_0(command: Command) -> None:
    code, said = command.run()

    assert code == 0, said
    assert "Holds  5 distinct states" in said
    assert "Small violated, as expected" in said
    assert "2 of 2 configurations are as expected" in said
    assert "Nothing is said of larger numbers." in said
    assert command.left_over() == []


def test_a_verdict_that_differs_exits_with_1_and_says_why(command: Command, specs: Path) -> None:
    manifest = specs / "manifest.toml"
    manifest.write_text(manifest.read_text().replace("distinct = 5", "distinct = 6"))

    code, said = command.run("Holds", "--json", str(specs / "report.json"))

    assert code == 1, said
    assert "distinct is 5, but 6 is pinned" in said
    assert "python spec/check.py model --pin Holds" in said
    assert "by hand: cd " in said
    [record] = json.loads((specs / "report.json").read_text())
    assert (record["name"], record["as_expected"], record["exit_code"]) == ("Holds", False, 0)
    assert record["counts"] == {"generated": 6, "distinct": 5, "depth": 5}


def test_pin_writes_the_counts_and_exits_with_0(command: Command, specs: Path) -> None:
    manifest = specs / "manifest.toml"
    before = manifest.read_text()
    manifest.write_text(before.replace("distinct = 5", "distinct = 6"))

    code, said = command.run("--pin", "Holds", command=MAINTAINED)

    assert code == 0, said
    assert "pinned Holds: 5 distinct states" in said
    assert before == manifest.read_text()


def test_pin_refuses_a_configuration_that_is_not_as_expected(command: Command, specs: Path) -> None:
    manifest = specs / "manifest.toml"
    manifest.write_text(manifest.read_text().replace('violates = "Small"', 'violates = "TypeOK"'))
    before = manifest.read_text()

    code, said = command.run("--pin", "TooSmall", command=MAINTAINED)

    assert code == 1, said
    assert before == manifest.read_text()


def test_coverage_fails_for_an_action_that_is_never_taken(command: Command) -> None:
    code, said = command.run("--coverage", "Holds")

    assert code == 1, said
    assert "Counter.Reset (line 23) is never taken by any proof" in said


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_leaves_no_jvm_and_no_folder(command: Command, number: signal.Signals) -> None:
    process = command.start("HoldsLarger")
    wait_until(command, 1)

    process.send_signal(number)
    said, _ = process.communicate(timeout=_TIMEOUT_S)

    assert 128 + number == process.returncode, said
    assert (command.machines(), command.left_over()) == ([], [])
    assert "Traceback" not in said


@pytest.mark.usefixtures("endless")
def test_a_jvm_dies_with_a_parent_that_is_killed(command: Command) -> None:
    process = command.start("HoldsLarger")
    wait_until(command, 1)

    process.kill()
    process.communicate(timeout=_TIMEOUT_S)

    wait_until(command, 0)
