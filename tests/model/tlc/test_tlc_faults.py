"""Known faults of TLC 2.18: each test pins the wrong behaviour, and our rule against it.

If a release of TLC fixes a fault, its test fails and says which rule is no longer needed.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tlc_support import Recorder

from weightsync.model import Configuration, Counts, Expected, Manifest, Purpose, Suite, Tier, Toolchain
from weightsync.model.config import Config, config_traps
from weightsync.model.process import Outcome
from weightsync.model.text import Library

pytestmark = [pytest.mark.tlc, pytest.mark.timeout(180)]

FAULTS = Path(__file__).parent / "faults"
RunFault = Callable[[str, int], Outcome]
RunTlcDirectly = Callable[..., subprocess.CompletedProcess[str]]


def finds_no_error(outcome: Outcome) -> bool:
    return (outcome.exit_code, outcome.findings.completed, outcome.findings.violations) == (0, True, [])


@pytest.mark.parametrize(
    ("name", "keyword", "named"), [("Symmetric", "SYMMETRY", "Swapped"), ("Viewed", "VIEW", "Seen")]
)
def test_a_violated_temporal_property_is_missed_under_symmetry_and_view(
    run_fault: RunFault, run_tlc_directly: RunTlcDirectly, name: str, keyword: str, named: str
) -> None:
    assert finds_no_error(run_fault(name, 1)), f"TLC has mended #59: temporal properties may stand under {keyword}"
    assert run_tlc_directly("-config", f"{name}Whole.cfg", f"{name}.tla").returncode == 13
    config = Config("Spec", properties=("Ends",), **{keyword.lower(): named})
    assert [keyword in trap for trap in config_traps(Library(FAULTS), name, config, workers=1)] == [True]


def test_with_continue_tlc_prints_a_violation_and_then_reports_no_error(run_tlc_directly: RunTlcDirectly) -> None:
    assert run_tlc_directly("-config", "Continued.cfg", "Continued.tla").returncode == 12
    result = run_tlc_directly("-continue", "-config", "Continued.cfg", "Continued.tla")
    assert "Invariant Small is violated" in result.stdout
    mended = "TLC has mended #1385: its exit code means something under -continue"
    assert (result.returncode, "No error has been found" in result.stdout) == (0, True), mended


def test_tlc_exits_with_0_if_a_property_cannot_be_evaluated_and_we_give_no_verdict(
    run_fault: RunFault, toolchain: Toolchain, recorder: Recorder
) -> None:
    outcome = run_fault("Unevaluated", 1)
    assert (outcome.exit_code, outcome.findings.violations) == (0, []), "TLC has mended #1440: it fails as it should"
    proof = Configuration(
        "Unevaluated", "Unevaluated", Config("Spec", properties=("Ends",)), Purpose.PROOF, Tier.ALL, Expected.PASS,
        None, "", (), 1, 60.0, Counts(1, 1, 1),
    )  # fmt: skip
    [verdict] = Suite(toolchain, Manifest(FAULTS, (proof,), "", ()), recorder).run([proof])
    assert [complaint[:31] for complaint in verdict.complaints] == ["no verdict: TLC exited with 0: "]


@pytest.fixture
def run_tlc_directly(toolchain: Toolchain, tmp_path: Path) -> RunTlcDirectly:
    """Runs TLC with arguments that our own runs never use."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(toolchain.java), "-XX:+UseSerialGC", f"-Djava.io.tmpdir={tmp_path}", "-cp", str(toolchain.jar)]
        command += ["tlc2.TLC", "-workers", "1", "-metadir", str(tmp_path / "meta"), *arguments]
        return subprocess.run(command, cwd=FAULTS, capture_output=True, text=True, timeout=60, check=False)

    return run
