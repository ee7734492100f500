"""TLC gives the same results in a reused JVM as in a new one, until it has found a violated temporal property."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from modelcheck.kept import KeptTlc

from weightsync.model import Manifest, Toolchain, ToolMissingError
from weightsync.model.config import Config
from weightsync.model.output import StatementKind
from weightsync.model.process import Ending, Job, Outcome, TlcRun

pytestmark = [pytest.mark.tlc, pytest.mark.timeout(180)]

#: Configurations without temporal properties, which a reused JVM requires, and one that TLC cannot read.
CONFIGS = {
    "Endless": Config("Unfair", {"Max": 2_000_000_000}, invariants=("TypeOK",)),
    "Safe": Config("Spec", {"Max": 3}, deadlock=True, invariants=("TypeOK",), properties=("Rises",)),
    "NoSuchInvariant": Config("Spec", {"Max": 3}, invariants=("Typo",)),
}


@pytest.fixture
def kept(toolchain: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptTlc]:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    kept = KeptTlc(toolchain)
    yield kept
    kept.close()
    assert list((tmp_path / "tmp").iterdir()) == []


def job(specs: Path, name: str, timeout: float = 100.0) -> Job:
    config = CONFIGS[name] if name in CONFIGS else Manifest.read(specs).select([name])[0].config
    return Job(specs, "Counter", config.text, timeout=timeout)


def machine(kept: KeptTlc) -> int:
    """The process id of the JVM."""
    process = kept._process
    assert process is not None
    return process.pid


def found(outcome: Outcome) -> tuple[object, ...]:
    findings = outcome.findings
    violated = [(each.kind, each.subject) for each in findings.violations]
    return outcome.ending, findings.completed, findings.counts, violated, outcome.exit_code == 0


def test_run_after_run_says_what_a_jvm_of_its_own_says(kept: KeptTlc, specs: Path, toolchain: Toolchain) -> None:
    names = ["Safe", "TooSmall", "Safe", "WrongWay", "Safe", "Stuck", "Safe"]

    ran = [(found(kept.run(job(specs, name))), machine(kept)) for name in names]

    alone = {name: found(TlcRun(toolchain, job(specs, name)).run(lambda _: None)) for name in names}
    assert [what for what, _ in ran] == [alone[name] for name in names]
    assert len({process for _, process in ran}) == 1


def test_after_a_temporal_property_was_violated_comes_another_jvm(kept: KeptTlc, specs: Path) -> None:
    violated = kept.run(job(specs, "Unfair"))
    first = machine(kept)
    holds = kept.run(job(specs, "Holds"))

    assert [each.kind for each in violated.findings.violations] == [StatementKind.TEMPORAL]
    assert (holds.exit_code, holds.findings.violations) == (0, [])
    assert machine(kept) != first


def test_a_jvm_that_has_found_a_temporal_property_violated_finds_every_other_so(
    kept: KeptTlc, specs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason why such a JVM is ended. This test fails once TLC has fixed it, and the JVM can be reused."""
    monkeypatch.setattr("modelcheck.kept._HARMLESS", frozenset({0, 2116}))

    kept.run(job(specs, "Unfair"))

    assert kept.run(job(specs, "Holds")).exit_code == 2116, "TLC forgets what it found, so its JVM may be kept"


def test_what_takes_too_long_is_ended_and_the_next_run_has_a_new_jvm(kept: KeptTlc, specs: Path) -> None:

    assert kept.run(job(specs, "Endless", timeout=5.0)).ending is Ending.TIMED_OUT
    assert kept.run(job(specs, "Safe")).exit_code == 0


def test_a_jvm_that_is_killed_has_no_verdict_and_the_next_run_has_a_new_one(kept: KeptTlc, specs: Path) -> None:
    kept.run(job(specs, "Safe"))
    killing = threading.Timer(1.0, os.kill, [machine(kept), signal.SIGKILL])
    killing.start()

    outcome = kept.run(job(specs, "Endless"))

    killing.join()
    assert (outcome.ending, outcome.exit_code) == (Ending.STOPPED, None)
    assert kept.run(job(specs, "Safe")).exit_code == 0


def test_close_ends_what_is_under_way_and_all_that_would_come(kept: KeptTlc, specs: Path) -> None:
    kept.run(job(specs, "Safe"))
    process = machine(kept)
    closing = threading.Timer(1.0, kept.close)
    closing.start()

    under_way = kept.run(job(specs, "Endless"))

    closing.join()
    later = kept.run(job(specs, "Safe"))
    assert [(each.ending, each.exit_code) for each in (under_way, later)] == [(Ending.STOPPED, None)] * 2
    wait_until_gone(process)


def test_its_jvm_ends_with_a_process_that_is_killed_also_while_it_runs(
    toolchain: Toolchain, specs: Path, tmp_path: Path
) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from weightsync.model import find_toolchain\n"
        "from modelcheck.kept import KeptTlc\n"
        "from weightsync.model.process import Job\n"
        "kept, folder = KeptTlc(find_toolchain()), Path(sys.argv[1])\n"
        f"kept.run(Job(folder, 'Counter', {CONFIGS['Safe'].text!r}))\n"
        "print(kept._process.pid, flush=True)\n"
        f"kept.run(Job(folder, 'Counter', {CONFIGS['Endless'].text!r}))\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "TLA2TOOLS_JAR": str(toolchain.jar)}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3] / "spec")
    with subprocess.Popen(
        [sys.executable, "-c", script, str(specs)], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        jvm = int(process.stdout.readline())
        time.sleep(1)
        process.kill()

    wait_until_gone(jvm)


def wait_until_gone(process: int) -> None:
    deadline = time.monotonic() + 60
    while Path(f"/proc/{process}").exists():
        assert time.monotonic() < deadline, "its JVM lives on"
        time.sleep(0.05)


def test_without_jpype_it_says_what_to_install(toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ToolMissingError, match=r"JPype .*pip install jpype1"):
        KeptTlc(toolchain)


def test_a_model_that_cannot_be_read_is_said_to_be_so(kept: KeptTlc, specs: Path) -> None:
    outcome = kept.run(job(specs, "NoSuchInvariant"))

    assert outcome.exit_code not in (0, None)
    assert "nvariant" in " ".join([*outcome.findings.errors, *outcome.loose])
    assert kept.run(job(specs, "Safe")).exit_code == 0
