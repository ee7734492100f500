"""TLC in a JVM that is reused for many runs, each of which takes a fraction of the time of a new JVM.

A JVM spends most of a short run on starting and on compiling TLC. But TLC was not written to run twice, and may keep
state between runs. So its results here are only used to confirm what is known already.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from weightsync.model.output import Findings, MessageReader
from weightsync.model.process import FOLDER_PREFIX, Ending, Job, Outcome, follow, kill, launched
from weightsync.model.toolchain import Toolchain, ToolMissingError, probed

_SCRIPT = Path(__file__).with_name("jvm.py")
_MARK = "@!@!@RAN "

#: The exit codes after which a JVM can be reused: no error, or a violated invariant or action property. After a
#: violated temporal property, TLC reports every other one as violated until its JVM ends.
_HARMLESS = frozenset({0, 2107, 2108, 2110, 2112, 2114})


class KeptTlc:
    """TLC in one JVM, which is started by the first run, and again after it had to be ended.

    There is one run at a time. `close`, from any thread, ends the current run; later runs end at once.

    Args:
        toolchain: Java and TLC.

    Raises:
        ToolMissingError: if JPype is not installed.
    """

    def __init__(self, toolchain: Toolchain) -> None:
        if importlib.util.find_spec("jpype") is None:
            raise ToolMissingError("JPype is needed to keep a JVM: pip install jpype1, or make install.")
        self._toolchain = toolchain
        #: Held during a run. The other lock is held briefly, so that no JVM starts after `close`.
        self._running = threading.Lock()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, ignore_cleanup_errors=True)
        self._runs = 0
        self._closed = False

    def run(self, job: Job) -> Outcome:
        """Run TLC to its end, with one worker, over a configuration that checks no temporal property."""
        started = time.monotonic()
        with self._running:
            process = self._started()
            if process is None:
                return Outcome(Ending.STOPPED, None, Findings(), 0.0)
            self._runs += 1
            answer = _Answer(process)
            deadline = threading.Timer(job.timeout, answer.too_late)
            deadline.start()
            try:
                findings = answer.ask([str(job.folder), self._arguments(job)])
            finally:
                deadline.cancel()
            if answer.code not in _HARMLESS:
                _end(process)
            shutil.rmtree(self._meta, ignore_errors=True)
        seconds, reader = time.monotonic() - started, answer.reader
        return Outcome(answer.ending, answer.code, findings, seconds, tuple(reader.loose), tuple(reader.met))

    def close(self) -> None:
        """End the JVM, and the current run with it."""
        with self._lock:
            self._closed = True
            process = self._process
        if process is not None:
            kill(process)
        with self._running:
            if process is not None:
                _end(process)
            self._folder.cleanup()

    @property
    def _meta(self) -> Path:
        return Path(self._folder.name) / f"meta{self._runs}"

    def _arguments(self, job: Job) -> list[str]:
        config = Path(self._folder.name) / f"{job.module}.cfg"
        config.write_text(job.config, encoding="utf-8")
        options = ("-tool", "-lncheck", "final", "-workers", "1")
        return [*options, "-metadir", str(self._meta), "-config", str(config), f"{job.module}.tla"]

    def _started(self) -> subprocess.Popen[str] | None:
        with self._lock:
            if self._closed:
                return None
            if self._process is None or self._process.poll() is not None:
                if self._process is not None:
                    _end(self._process)
                library = jvm_library(self._toolchain.java)
                words = [sys.executable, "-P", str(_SCRIPT), str(self._toolchain.jar.resolve()), str(library)]
                # Start it in a folder without modules, since TLC searches its working directory before the given path.
                folder = Path(self._folder.name)
                self._process = launched([*words, str(folder), _MARK], subprocess.PIPE, folder)
            return self._process


def _end(process: subprocess.Popen[str]) -> None:
    """End a JVM whose output is no longer read."""
    kill(process)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # a request that it has not read
                pipe.close()


class _Answer:
    """The output of one run. `code` stays None if the JVM ended before the run did."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.reader = MessageReader()
        self.ending = Ending.STOPPED
        self.code: int | None = None

    def too_late(self) -> None:
        self.ending = Ending.TIMED_OUT
        kill(self._process)

    def ask(self, arguments: Sequence[object]) -> Findings:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(arguments) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return Findings()
        return follow(self._lines(), lambda _: None, self.reader)

    def _lines(self) -> Iterator[str]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                self.ending, self.code = Ending.EXITED, int(line.removeprefix(_MARK))
                return
            yield line


def jvm_library(java: Path) -> Path:
    """Return the library that a Java launcher loads its JVM from.

    Raises ToolMissingError: the launcher does not report its location, or the library is not there.
    """
    settings = probed(java, "-XshowSettings:properties")
    home = re.search(r"java\.home = (.+)", settings)
    library = Path(home.group(1).strip() if home else "") / "lib" / "server" / "libjvm.so"
    if not library.is_file():
        raise ToolMissingError(f"The JVM of {java} is not at {library}: put another Java on PATH.")
    return library
