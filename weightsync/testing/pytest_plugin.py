"""A pytest plugin that records every test and checks all traces against the protocol in one batch at the end.

    pytest -p weightsync.testing.pytest_plugin

The session fails if a trace does not conform, and names the test, the file and the line. It also fails if TLC does, and
with ``CI`` set in the environment if Java or TLC is missing. Processes that tests start are recorded too. A test whose
traces need not conform gives a reason and is not recorded: ``@pytest.mark.untraced("why")``. Each worker of
pytest-xdist judges what it has recorded.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from weightsync.clock import now_ns
from weightsync.engine import recorder
from weightsync.model import ToolMissingError, find_toolchain
from weightsync.verify import Finding, Run, TlcFailedError, follow, shown, verify

_MARKER = "untraced(reason): plants a fault on purpose, or checks its machines against the protocol in another way"
#: How many findings are shown; the rest are counted.
_SHOWN = 10
_PASSING_CODES = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
#: The keys under which a worker of pytest-xdist learns where to record, and sends its result.
_SENT_AS = "weightsync_traces"


@dataclass(slots=True)
class _RanTest:
    """One test, and when it ran."""

    name: str
    begun: int
    ended: int


@dataclass
class TraceResult:
    """The result for one process that ran tests."""

    folder: str
    runs: int = 0
    events: int = 0
    #: How many tests gave a reason not to be recorded.
    untraced: int = 0
    #: The seconds that judging took.
    seconds: float = 0.0
    #: What TLC reported; empty if it was not run.
    followed: str = ""
    tool_missing: str = ""
    #: Why TLC did not follow all runs to their ends, if it failed.
    tlc_failed: str = ""
    #: How many lines are wrong, and the first of them in words.
    wrong: int = 0
    shown: list[str] = field(default_factory=list)
    #: For each recorded test, over all its parameters: the number of conforming runs, and of their events.
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def fails(self) -> bool:
        """Whether the session fails because of it."""
        return bool(self.wrong or self.tlc_failed or (self.tool_missing and os.environ.get("CI")))


@dataclass
class Recording:
    """Records the tests that a process runs, and judges their traces.

    Args:
        folder: where the traces go. Those that it has already are not judged.
    """

    folder: Path
    ran: list[_RanTest] = field(default_factory=list)
    untraced: int = 0
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    #: Files of earlier sessions.
    _earlier: frozenset[Path] = field(init=False)

    def __post_init__(self) -> None:
        self._earlier = frozenset(self._files())

    def _files(self) -> Iterator[Path]:
        return (file for file in self.folder.rglob(recorder.PATTERN) if file.stat().st_size)

    def begin(self) -> None:
        """Start recording."""
        self._stack.enter_context(recorder.record(self.folder))

    def pause(self) -> None:
        """Stop recording."""
        self._stack.close()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Note when each test ran; skip tests that give a reason not to be recorded."""
        untraced = item.get_closest_marker("untraced") is not None
        if untraced:
            self.pause()
        begun = now_ns()
        try:
            return (yield)
        finally:
            if untraced:
                self.untraced += 1
                self.begin()
            else:
                self.ran.append(_RanTest(item.nodeid, begun, now_ns()))

    def judge(self) -> TraceResult:
        """Judge all traces that were recorded since this was made."""
        result, begun = TraceResult(str(self.folder), untraced=self.untraced), now_ns()
        files = sorted(set(self._files()) - self._earlier)
        if not files:
            return result
        verdict = verify(files)
        findings = list(verdict.findings)
        try:
            followed = follow(find_toolchain(), verdict.runs)
        except ToolMissingError as error:
            result.tool_missing = str(error)
        except TlcFailedError as error:
            result.tlc_failed = str(error)
        else:
            result.followed = followed.summary()
            findings += followed.findings
        result.runs, result.events, result.wrong = len(verdict.runs), verdict.events, len(findings)
        result.shown = [line for found in findings[:_SHOWN] for line in self._describe_finding(found)]
        result.counts = self._count_runs(verdict.runs)
        result.seconds = (now_ns() - begun) / 1e9
        return result

    def _describe_finding(self, found: Finding) -> list[str]:
        at = found.line.time
        test = next((each.name for each in self.ran if each.begun <= at <= each.ended), "no test")
        return [f"in {test}:", *(f"  {line}" for line in shown(found))]

    def _count_runs(self, runs: Sequence[Run]) -> dict[str, tuple[int, int]]:
        coming = deque(sorted((run.begun, run.ended, run.events) for run in runs if not run.findings))
        counts: dict[str, tuple[int, int]] = {}
        met: list[tuple[int, int, int]] = []
        for ran in self.ran:  # one after another
            while coming and coming[0][0] <= ran.ended:
                met.append(coming.popleft())
            met = [run for run in met if run[1] >= ran.begun]
            name = ran.name.partition("[")[0]
            count, events = counts.get(name, (0, 0))
            counts[name] = (count + len(met), events + sum(run[2] for run in met))
        return {name: count for name, count in counts.items() if count[0]}


@dataclass
class TraceReporter:
    """Reports on the traces of all processes that ran tests, and fails the session for what is wrong.

    Args:
        folder: where the traces go; each worker of pytest-xdist has a folder of its own in it.
        recording: the recording of this process, if it runs tests itself.
        keeps: whether the traces are kept.
        counts: the file for how much was recorded of each test. None: no file.
    """

    folder: Path
    recording: Recording | None
    keeps: bool
    counts: Path | None
    results: list[TraceResult] = field(default_factory=list)

    def pytest_sessionstart(self) -> None:
        """Start recording."""
        if self.recording is not None:
            self.recording.begin()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """A worker of pytest-xdist starts."""
        node.workerinput[_SENT_AS] = str(self.folder / node.gateway.id)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """A worker of pytest-xdist has ended. One that crashed has judged nothing, and its test has failed."""
        if error is None:
            self.results.append(TraceResult(**node.workeroutput[_SENT_AS]))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Judge all traces; the session fails if one does not conform."""
        if self.recording is not None:
            self.recording.pause()
            self.results.append(self.recording.judge())
        if any(result.fails for result in self.results) and session.exitstatus in _PASSING_CODES:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.counts is not None:
            self.counts.write_text(json.dumps(self._merge_counts(), indent=1) + "\n", encoding="utf-8")
        return (yield)

    def _merge_counts(self) -> dict[str, tuple[int, int]]:
        """All counts. Tests of one name with different parameters may have run in different processes."""
        counted: dict[str, tuple[int, int]] = {}
        for name, (runs, events) in (item for result in self.results for item in result.counts.items()):
            before = counted.get(name, (0, 0))
            counted[name] = (before[0] + runs, before[1] + events)
        return dict(sorted(counted.items()))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Report how much was recorded and judged, and what is wrong."""
        terminalreporter.section("traces")
        for result in self.results:
            counted = (
                f"{result.runs} traces of {result.events} events conform" if not result.wrong else "do not conform"
            )
            untraced = f", {result.untraced} untraced tests were not recorded" if result.untraced else ""
            terminalreporter.line(f"{counted}{untraced} ({result.seconds:.1f} s)", red=bool(result.wrong))
            if result.followed:
                terminalreporter.line(result.followed)
            if result.tool_missing:
                terminalreporter.line(f"TLC DID NOT FOLLOW THEM: {result.tool_missing}", yellow=True)
            if result.tlc_failed:
                terminalreporter.line(f"TLC DID NOT FOLLOW THEM: {result.tlc_failed}", red=True)
            for line in result.shown:
                terminalreporter.line(line)
            if result.wrong:
                terminalreporter.line(f"{result.wrong} lines are wrong.", red=True)
            if result.wrong or result.tlc_failed:
                terminalreporter.line(f"The traces are kept in {result.folder}.")

    def pytest_unconfigure(self) -> None:
        """Delete the traces unless they are to be kept."""
        if self.recording is not None:
            self.recording.pause()
        if not (self.keeps or any(result.wrong or result.tlc_failed for result in self.results)):
            shutil.rmtree(self.folder, ignore_errors=True)


class WorkerTraceReporter(TraceReporter):
    """In a worker of pytest-xdist: its result is reported by the process that started it."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Judge all traces, and send the result with the worker's end."""
        assert self.recording is not None
        self.recording.pause()
        output: dict[str, Any] = session.config.workeroutput  # type: ignore[attr-defined]
        output[_SENT_AS] = asdict(self.recording.judge())
        return (yield)

    def pytest_unconfigure(self) -> None:
        """Delete nothing: the process that started this one deletes the traces, even if this one crashed."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add our options."""
    group = parser.getgroup("weightsync")
    group.addoption("--traces", metavar="FOLDER", default=None, help="Keep the recorded traces in a folder.")
    group.addoption("--trace-counts", metavar="FILE", default=None, help="Write how much was recorded of each test.")
    group.addoption("--no-traces", action="store_true", help="Record no traces.")


def _require_folder(kept: str) -> None:
    try:
        Path(kept).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise pytest.UsageError(
            f"No traces can be kept in --traces={kept}: {error.strerror}. Name a folder."
        ) from error
    if not os.access(kept, os.W_OK):
        raise pytest.UsageError(f"No traces can be kept in --traces={kept}: the folder may not be written.")


def pytest_configure(config: pytest.Config) -> None:
    """Start recording, unless nothing is to be recorded."""
    config.addinivalue_line("markers", _MARKER)
    if config.getoption("no_traces") or config.getoption("collectonly"):
        return
    kept, counts = config.getoption("traces"), config.getoption("trace_counts")
    if counts and not Path(counts).absolute().parent.is_dir():
        raise pytest.UsageError(f"--trace-counts={counts} cannot be written: its folder is missing.")
    if counts and Path(counts).is_dir():
        raise pytest.UsageError(f"--trace-counts={counts} cannot be written: it is a folder. Name a file.")
    if kept:
        _require_folder(kept)
    worker = vars(config).get("workerinput")
    where = worker[_SENT_AS] if worker else kept
    folder = Path(where).absolute() if where else Path(tempfile.mkdtemp(prefix="weightsync-traces-"))
    recording = Recording(folder) if config.getoption("dist", "no") == "no" else None
    if recording is not None:
        config.pluginmanager.register(recording, "weightsync-recording")
    kind = WorkerTraceReporter if worker else TraceReporter
    plugin = kind(folder, recording, bool(kept), Path(counts).absolute() if counts else None)
    config.pluginmanager.register(plugin, "weightsync-traces")
