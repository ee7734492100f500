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


def test_runs_in_a_reused_jvm_find_the_same_as_runs_in_new_jvms(
    kept: KeptTlc, specs: Path, toolchain: Toolchain
) -> None:
    names = ["Safe", "TooSmall", "Safe", "WrongWay", "Safe", "Stuck", "Safe"]

    ran = [(found(kept.run(job(specs, name))), machine(kept)) for name in names]

    alone = {name: found(TlcRun(toolchain, job(specs, name)).run(lambda _: None)) for name in names}
    assert [what for what, _ in ran] == [alone[name] for name in names]
    assert len({process for _, process in ran}) == 1


def test_a_new_jvm_is_started_after_a_temporal_property_was_violated(kept: KeptTlc, specs: Path) -> None:
    violated = kept.run(job(specs, "Unfair"))
    first = machine(kept)
    holds = kept.run(job(specs, "Holds"))

    assert [each.kind for each in violated.findings.violations] == [StatementKind.TEMPORAL]
    assert (holds.exit_code, holds.findings.violations) == (0, [])
    assert machine(kept) != first


def test_a_jvm_that_found_a_temporal_violation_reports_one_in_its_next_run(
    kept: KeptTlc, specs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason why such a JVM is ended. This test fails once TLC has fixed it, and the JVM can be reused."""
    monkeypatch.setattr("modelcheck.kept._HARMLESS", frozenset({0, 2116}))

    kept.run(job(specs, "Unfair"))

    assert kept.run(job(specs, "Holds")).exit_code == 2116, (
        "TLC has been fixed: a JVM can be reused after a temporal violation"
    )


def test_a_run_that_times_out_is_ended_and_the_next_run_succeeds(kept: KeptTlc, specs: Path) -> None:

    assert kept.run(job(specs, "Endless", timeout=5.0)).ending is Ending.TIMED_OUT
    assert kept.run(job(specs, "Safe")).exit_code == 0


def test_a_run_whose_jvm_is_killed_has_no_verdict_and_the_next_run_succeeds(kept: KeptTlc, specs: Path) -> None:
    kept.run(job(specs, "Safe"))
    killing = threading.Timer(1.0, os.kill, [machine(kept), signal.SIGKILL])
    killing.start()

    outcome = kept.run(job(specs, "Endless"))

    killing.join()
    assert (outcome.ending, outcome.exit_code) == (Ending.STOPPED, None)
    assert kept.run(job(specs, "Safe")).exit_code == 0


def test_close_stops_the_current_run_and_every_later_one(kept: KeptTlc, specs: Path) -> None:
    kept.run(job(specs, "Safe"))
    process = machine(kept)
    closing = threading.Timer(1.0, kept.close)
    closing.start()

    under_way = kept.run(job(specs, "Endless"))

    closing.join()
    later = kept.run(job(specs, "Safe"))
    assert [(each.ending, each.exit_code) for each in (under_way, later)] == [(Ending.STOPPED, None)] * 2
    wait_until_gone(process)


def test_the_jvm_ends_if_its_parent_is_killed_during_a_run(toolchain: Toolchain, specs: Path, tmp_path: Path) -> None:
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
        assert time.monotonic() < deadline, "the JVM is still running"
        time.sleep(0.05)


def test_the_error_without_jpype_says_how_to_install_it(toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ToolMissingError, match=r"JPype .*pip install jpype1"):
        KeptTlc(toolchain)


def test_an_unreadable_model_is_reported_and_the_next_run_succeeds(kept: KeptTlc, specs: Path) -> None:
    outcome = kept.run(job(specs, "NoSuchInvariant"))

    assert outcome.exit_code not in (0, None)
    assert "nvariant" in " ".join([*outcome.findings.errors, *outcome.loose])
    assert kept.run(job(specs, "Safe")).exit_code == 0
