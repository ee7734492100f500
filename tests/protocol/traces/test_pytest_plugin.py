"""The pytest plugin records every test but those marked `untraced`, and names each whose trace does not conform."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recorded import recorded

from weightsync.testing import pytest_plugin
from weightsync.verify import TlcFailedError

#: Seconds after which a session is ended; only a failure takes that long. Two processes import torch, one starts TLC.
PATIENCE = 280.0
#: The number of events in the trace of the test that conforms.
EVENTS = 168

TESTS = """
import pytest
from recorded import play
from weightsync.engine import recorder


def test_that_conforms():
    play()



shipped = recorder.MachineTrace.tell


def faulty(self, what, model_id, **said):
    if what is recorder.LineKind.STEP:
        said["after"] = said["before"]
    shipped(self, what, model_id, **said)


def test_that_plants_a_fault(monkeypatch):
    monkeypatch.setattr(recorder.MachineTrace, "tell", faulty)
    play()


@pytest.mark.untraced("its recorder is broken")
def test_that_says_why(monkeypatch):
    test_that_plants_a_fault(monkeypatch)
"""


def session(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_played.py").write_text(TESTS, encoding="utf-8")
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parents[2]), str(here)])}
    environment.pop("WEIGHTSYNC_TRACE", None)
    command = [sys.executable, "-m", "pytest", "-p", "weightsync.testing.pytest_plugin", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, "--rootdir", str(folder), *options, str(folder)],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip


@pytest.mark.timeout(300)
def test_a_nonconforming_trace_fails_the_session_and_untraced_tests_are_not_recorded(
    tmp_path: Path,
) -> None:
    """Under xdist, each worker verifies what it has recorded, and the session reports the results of all."""
    counts, kept = tmp_path / "counts.json", tmp_path / "kept"
    done = session(tmp_path, f"--traces={kept}", f"--trace-counts={counts}", "-n", "1")

    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "3 passed" in done.stdout
    assert "in test_played.py::test_that_plants_a_fault:" in done.stdout
    assert "in test_played.py::test_that_conforms:" not in done.stdout
    assert "in test_played.py::test_that_says_why:" not in done.stdout
    assert "must be 'READY'" in done.stdout
    assert "1 untraced tests were not recorded" in done.stdout
    assert list(kept.glob("gw?/trace-*.jsonl"))
    assert json.loads(counts.read_text(encoding="utf-8")) == {"test_played.py::test_that_conforms": [1, EVENTS]}


def test_one_failing_xdist_worker_fails_the_session_and_the_results_of_all_are_reported(tmp_path: Path) -> None:
    counts, lines = tmp_path / "counts.json", list[str]()
    reporter = pytest_plugin.TraceReporter(tmp_path, None, False, counts)
    wrong = pytest_plugin.TraceResult("gw0", runs=1, wrong=1, shown=["in b:"], counts={"a": (1, 7), "b": (1, 2)})
    fine = pytest_plugin.TraceResult("gw1", runs=2, events=5, counts={"a": (1, 5)})
    for result in (wrong, fine):
        ended = SimpleNamespace(workeroutput={pytest_plugin._SENT_AS: asdict(result)})
        reporter.pytest_testnodedown(ended, None)
    session: Any = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    terminal: Any = SimpleNamespace(section=lines.append, line=lambda text, **_: lines.append(text))

    next(reporter.pytest_sessionfinish(session))
    reporter.pytest_terminal_summary(terminal)

    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED
    assert json.loads(counts.read_text(encoding="utf-8")) == {"a": [2, 12], "b": [1, 2]}
    assert {"in b:", "2 traces of 5 events conform (0.0 s)"} <= set(lines)


def test_a_tlc_failure_fails_the_session_prints_the_reason_and_keeps_the_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise TlcFailedError("TLC did not follow 3 traces within 300 s.")

    monkeypatch.setattr(pytest_plugin, "find_toolchain", lambda: None)
    monkeypatch.setattr(pytest_plugin, "follow", fails)
    recording, lines = pytest_plugin.Recording(tmp_path), list[str]()
    trace = recorded(tmp_path)
    reporter = pytest_plugin.TraceReporter(tmp_path, recording, False, None)
    session: Any = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    terminal: Any = SimpleNamespace(section=lines.append, line=lambda text, **_: lines.append(text))

    next(reporter.pytest_sessionfinish(session))
    reporter.pytest_terminal_summary(terminal)
    reporter.pytest_unconfigure()

    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED
    assert "TLC DID NOT FOLLOW THEM: TLC did not follow 3 traces within 300 s." in lines
    assert f"The traces are kept in {tmp_path}." in lines
    assert trace.is_file()


@pytest.mark.parametrize(
    ("option", "given", "why"),
    [
        ("trace_counts", "no/counts.json", "cannot be written: its folder is missing"),
        ("trace_counts", ".", "cannot be written: it is a folder"),
        ("traces", "file", "No traces can be kept in .*file: File exists. Name a folder"),
        ("traces", "file/traces", "No traces can be kept in .*file/traces: Not a directory"),
    ],
)
def test_an_invalid_output_path_is_a_usage_error_before_the_first_test(
    option: str, given: str, why: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    options: dict[str, Any] = {"no_traces": False, "collectonly": False, "traces": None, "trace_counts": None}
    options[option] = str(tmp_path / given)
    config: Any = SimpleNamespace(addinivalue_line=lambda *_: None, getoption=options.get)

    with pytest.raises(pytest.UsageError, match=why):
        pytest_plugin.pytest_configure(config)


def test_a_folder_without_write_permission_is_a_usage_error_before_the_first_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    options = {"no_traces": False, "collectonly": False, "traces": str(tmp_path), "trace_counts": None}
    config: Any = SimpleNamespace(addinivalue_line=lambda *_: None, getoption=options.get)

    with pytest.raises(pytest.UsageError, match="the folder may not be written"):
        pytest_plugin.pytest_configure(config)


@pytest.mark.parametrize("text", ["of another release\n", None])
def test_traces_of_earlier_sessions_are_kept_and_not_verified(tmp_path: Path, text: str | None) -> None:
    earlier = recorded(tmp_path)
    if text is not None:
        earlier.write_text(text, encoding="utf-8")

    result = pytest_plugin.Recording(tmp_path).judge()

    assert (result.runs, result.wrong) == (0, 0)
    assert earlier.is_file()
