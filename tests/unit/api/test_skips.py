"""Tests without a tool skip by `skipping`, which fails in CI, so none goes unnoticed. Other skips are listed here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import skipping

TESTS = Path(__file__).parents[2]
#: Files whose tests skip for another reason than a missing tool, and that reason.
OTHER_REASONS = {
    "skipping.py": "it is how tests skip",
    "unit/api/test_skips.py": "it tests that",
    "unit/weights/test_devices.py": "GPUs",
    "transports/device/test_gpu.py": "GPUs",
    "transports/device/test_passed_models.py": "GPUs",
    "transports/store/test_store_ipv6.py": "a machine without IPv6",
    "transports/store/test_store_nccl.py": "GPUs: what is said without one, where there is one",
    "protocol/stateful/test_random_walks.py": "only a run of the whole folder has walked enough",
    "model/tlc/test_canaries.py": "a fault of TLC's own that need not show",
}


def skips(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_pytests(node.value)}
    return bool(names & {"skip", "skipif", "importorskip"})


def is_pytests(node: ast.expr) -> bool:
    return ast.unparse(node) in ("pytest", "pytest.mark")


def test_only_the_listed_files_skip_for_other_reasons_than_a_missing_tool() -> None:
    assert {str(path.relative_to(TESTS)) for path in TESTS.rglob("*.py") if skips(path)} == set(OTHER_REASONS)


def test_a_missing_tool_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="A THING WAS NOT TESTED: no tool"):
        skipping.not_tested("A THING", "no tool")
    with pytest.raises(pytest.fail.Exception, match="no surely_no_such_module"):
        skipping.require_modules("pytest", "surely_no_such_module", what="A THING", extra="dev")


def test_a_folder_with_the_name_of_a_module_does_not_count_as_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_a_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("CI", raising=False)

    with pytest.raises(pytest.skip.Exception, match="no only_a_folder"):
        skipping.require_modules("only_a_folder", what="A THING", extra="dev")


def test_outside_ci_a_missing_tool_skips_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="A THING WAS NOT TESTED: no tool"):
        skipping.not_tested("A THING", "no tool")


def test_missing_gpus_skip_in_ci_unless_weightsync_gpus_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    monkeypatch.delenv("WEIGHTSYNC_GPUS", raising=False)
    with pytest.raises(pytest.skip.Exception, match="NCCL WAS NOT TESTED"):
        skipping.skip_without_gpus("NCCL", "no GPU")
    monkeypatch.setenv("WEIGHTSYNC_GPUS", "2")
    with pytest.raises(pytest.fail.Exception, match="NCCL WAS NOT TESTED"):
        skipping.skip_without_gpus("NCCL", "no GPU")
