"""A pytest plugin that records every test and holds all traces against the protocol in one batch at the end.

    pytest -p weightsync.testing.pytest_plugin

The session fails if a trace does not conform, and names the test, the file and the line. Processes that tests start are
recorded too. A test that plants a fault on purpose says so: ``@pytest.mark.untraced("why")``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from weightsync import tracing
from weightsync.checker import ToolMissingError, find_toolchain
from weightsync.checker.traces import Finding, Followed, Run, Verdict, follow, shown, verify
from weightsync.timing import now_ns

_MARKER = "untraced(reason): plants a fault on purpose, so that its traces need not conform to the protocol"
#: How many findings are shown; the rest is counted.
_SHOWN = 10
#: How many events TLC follows at most, the shortest runs first: about half a minute.
_MOST_EVENTS = 4000
_FINE = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


@dataclass(slots=True)
class _Played:
    """One test, and when it ran."""

    name: str
    begun: int
    ended: int
    untraced: str = ""


@dataclass
class Traces:
    """Records a session's tests, and judges their traces.

    Args:
        folder: where the traces go.
        keeps: whether they stay.
        counts: where to write how much was recorded of each test; None: nowhere.
    """

    folder: Path
    keeps: bool
    counts: Path | None = None
    played: list[_Played] = field(default_factory=list)
    verdict: Verdict | None = None
    judged: tuple[Run, ...] = ()
    left_out: int = 0
    followed: Followed | None = None
    tool_missing: str = ""
    seconds: float = 0.0
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def pytest_sessionstart(self) -> None:
        """Begin to record."""
        self._stack.enter_context(tracing.record(self.folder))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Remember when each test ran."""
        marker = item.get_closest_marker("untraced")
        reason = "" if marker is None else str(marker.args[0])
        begun = now_ns()
        try:
            return (yield)
        finally:
            self.played.append(_Played(item.nodeid, begun, now_ns(), reason))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Judge all traces; the session fails if one does not conform."""
        self._stack.close()
        begun = now_ns()
        self._judge()
        if self.counts is not None:
            self.counts.write_text(json.dumps(self._counted(), indent=1) + "\n", encoding="utf-8")
        self.seconds = (now_ns() - begun) / 1e9
        missing = self.tool_missing and os.environ.get("CI")
        if (self.findings or missing) and session.exitstatus in _FINE:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return (yield)

    def _judge(self) -> None:
        if not any(file.stat().st_size for file in self.folder.glob(tracing.PATTERN)):
            return
        self.verdict = verify([self.folder])
        untraced = [played for played in self.played if played.untraced]
        self.judged = tuple(run for run in self.verdict.runs if not any(_meets(run, each) for each in untraced))
        self.left_out = len(self.verdict.runs) - len(self.judged)
        try:
            self.followed = follow(find_toolchain(), self.judged, most_events=_MOST_EVENTS)
        except ToolMissingError as error:
            self.tool_missing = str(error)

    def _counted(self) -> dict[str, list[int]]:
        """Of each test that was recorded, with all its parameters: the runs that conform, and their events."""
        conforming = [run for run in self.judged if not run.findings]
        counted: dict[str, list[int]] = {}
        for played in self.played:
            for run in conforming:
                if _meets(run, played):
                    count = counted.setdefault(played.name.partition("[")[0], [0, 0])
                    count[0] += 1
                    count[1] += run.events
        return dict(sorted(counted.items()))

    @property
    def findings(self) -> list[Finding]:
        """What is wrong, damaged files first."""
        damages = [] if self.verdict is None else list(self.verdict.damages)
        followed = [] if self.followed is None else self.followed.findings
        return [*damages, *(found for run in self.judged for found in run.findings), *followed]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say how much was recorded and judged, and what is wrong."""
        events = sum(run.events for run in self.judged)
        counted = f"{len(self.judged)} traces of {events} events conform" if not self.findings else "do not conform"
        left_out = f", {self.left_out} of untraced tests were left out" if self.left_out else ""
        terminalreporter.section("traces")
        terminalreporter.line(f"{counted}{left_out} ({self.seconds:.1f} s)", red=bool(self.findings))
        if self.followed is not None:
            terminalreporter.line(self.followed.summary())
        if self.tool_missing:
            terminalreporter.line(f"TLC DID NOT FOLLOW THEM: {self.tool_missing}", yellow=True)
        for found in self.findings[:_SHOWN]:
            terminalreporter.line(f"in {self._test_at(found.line.time)}:")
            for line in shown(found):
                terminalreporter.line(f"  {line}")
        if self.findings:
            self.keeps = True
            terminalreporter.line(f"{len(self.findings)} lines are wrong. The traces are kept in {self.folder}.")

    def _test_at(self, time: int) -> str:
        """The test that ran then."""
        return next((each.name for each in self.played if each.begun <= time <= each.ended), "no test")

    def pytest_unconfigure(self) -> None:
        """Let the traces go that nobody wants."""
        self._stack.close()
        if not self.keeps:
            shutil.rmtree(self.folder, ignore_errors=True)


def _meets(run: Run, played: _Played) -> bool:
    return run.begun <= played.ended and run.ended >= played.begun


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add our options."""
    group = parser.getgroup("weightsync")
    group.addoption("--traces", metavar="FOLDER", default=None, help="Keep the recorded traces in a folder.")
    group.addoption("--trace-counts", metavar="FILE", default=None, help="Write how much was recorded of each test.")
    group.addoption("--no-traces", action="store_true", help="Record no traces.")


def pytest_configure(config: pytest.Config) -> None:
    """Begin, unless nothing is to be recorded."""
    config.addinivalue_line("markers", _MARKER)
    if config.getoption("no_traces") or config.getoption("collectonly"):
        return
    kept = config.getoption("traces")
    folder = Path(kept).absolute() if kept else Path(tempfile.mkdtemp(prefix="weightsync-traces-"))
    counts = config.getoption("trace_counts")
    traces = Traces(folder, bool(kept), Path(counts).absolute() if counts else None)
    config.pluginmanager.register(traces, "weightsync-traces")
