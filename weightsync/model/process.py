"""One run of TLC: a JVM with its own temporary folders, which are removed however it ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from weightsync.model.output import Findings, MessageReader
from weightsync.model.toolchain import Toolchain, jar_place

#: The prefix of the names of temporary folders.
FOLDER_PREFIX = "weightsync-tlc-"
#: For so many runs an archive of TLC's classes is worth making. It takes a second, and saves each run a quarter of one.
_MANY_RUNS = 10
#: A model with an invariant, an action property, fairness and a temporal property, so that TLC loads nearly all it has.
_TINY = """---- MODULE Tiny ----
EXTENDS Integers, FiniteSets, Sequences
VARIABLE x
Spec == x = 0 /\\ [][x < 2 /\\ x' = x + 1]_x /\\ WF_x(x < 2 /\\ x' = x + 1)
Few == x \\in 0..2
Grows == [][x' > x]_x
Ends == <>(x = 2)
====
"""
_TINY_CONFIG = "SPECIFICATION Spec\nCHECK_DEADLOCK FALSE\nINVARIANT Few\nPROPERTIES Grows Ends\n"


class Ending(Enum):
    """How a run of TLC ended."""

    EXITED = "exited"
    TIMED_OUT = "timed out"
    STOPPED = "stopped"


class Coverage(Enum):
    """Whether TLC counts how often each action is taken, which makes it slower."""

    COUNTED = "counted"
    NOT_COUNTED = "not counted"


class Size(Enum):
    """The expected duration of a run, by which the JVM's options are chosen."""

    #: Seconds. The optimising compiler would take half of them, so it is switched off.
    SMALL = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
    #: Minutes. Several run at once, and the threads of a parallel collector would take each other's cores.
    LARGE = ("-XX:+UseSerialGC",)


@dataclass(frozen=True, slots=True)
class Job:
    """A run of TLC to do.

    Attributes:
        folder: the folder of the modules.
        module: the root module.
        config: the text of the configuration.
        workers: how many threads TLC uses.
        timeout: seconds after which the run is stopped.
        coverage: whether actions are counted.
        size: the expected duration.
    """

    folder: Path
    module: str
    config: str
    workers: int = 1
    timeout: float = 600.0
    coverage: Coverage = Coverage.NOT_COUNTED
    size: Size = Size.LARGE


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run.

    Attributes:
        ending: how it ended.
        exit_code: TLC's exit code, if it exited.
        findings: the findings from its messages.
        seconds: how long it took, including the start of the JVM.
        loose: its last lines outside messages, such as parse errors.
        met: the situations that the model reported it had reached.
    """

    ending: Ending
    exit_code: int | None
    findings: Findings
    seconds: float
    loose: tuple[str, ...] = ()
    met: tuple[str, ...] = ()


def by_hand(name: str, job: Job) -> str:
    """Return the shell command that repeats a run without weightsync."""
    return (
        f"cd {job.folder} && T=$(mktemp -d) && weightsync check --model . --write-cfg $T {name}"
        f" && java -Djava.io.tmpdir=$T -cp {jar_place()} tlc2.TLC"
        f" -lncheck final -workers {job.workers} -metadir $T -config $T/{name}.cfg {job.module}.tla"
    )


class TlcRun:
    """One run. `run` blocks until it has ended; `stop` ends it early and may be called from any thread."""

    def __init__(self, toolchain: Toolchain, job: Job) -> None:
        self._toolchain = toolchain
        self._job = job
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._ending = Ending.EXITED

    def run(self, progressed: Callable[[Findings], None], printed: Callable[[str], None] | None = None) -> Outcome:
        """Run TLC until it ends."""
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, ignore_cleanup_errors=True) as folder:
            process = self._start(folder)
            if process is None:
                return Outcome(Ending.STOPPED, None, Findings(), 0.0)
            deadline = threading.Timer(self._job.timeout, self._end, [Ending.TIMED_OUT])
            deadline.start()
            try:
                reader = MessageReader(printed)
                findings = follow(_lines(process), progressed, reader)
            finally:
                deadline.cancel()
                kill(process)
            exit_code = process.returncode if self._ending is Ending.EXITED else None
            seconds = time.monotonic() - started
            return Outcome(self._ending, exit_code, findings, seconds, tuple(reader.loose), tuple(reader.met))

    def stop(self) -> None:
        """End the run now. Its JVM is killed, and `run` returns soon."""
        self._end(Ending.STOPPED)

    def _end(self, ending: Ending) -> None:
        with self._lock:
            self._ending = ending
            if self._process is not None:
                kill(self._process)

    def _start(self, folder: str) -> subprocess.Popen[str] | None:
        with self._lock:
            if self._ending is not Ending.EXITED:
                return None
            config = Path(folder) / f"{self._job.module}.cfg"
            config.write_text(self._job.config, encoding="utf-8")
            command = _command(self._toolchain, self._job, folder, config)
            self._process = launched(command, subprocess.DEVNULL, self._job.folder)
            return self._process


@contextlib.contextmanager
def archived(toolchain: Toolchain, runs: int) -> Iterator[Toolchain]:
    """Yield the tools for some runs. If they are many: with an archive of TLC's classes, which is deleted at the end.

    Args:
        toolchain: Java and TLC.
        runs: how many runs there will be, about.
    """
    if runs < _MANY_RUNS:
        yield toolchain
        return
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, ignore_cleanup_errors=True) as name:
        folder, archive = Path(name), Path(name) / "tlc.jsa"
        (folder / "Tiny.tla").write_text(_TINY, encoding="utf-8")
        making = replace(toolchain, options=(f"-XX:ArchiveClassesAtExit={archive}",))
        made = TlcRun(making, Job(folder, "Tiny", _TINY_CONFIG, size=Size.SMALL)).run(lambda _: None)
        whole = made.exit_code == 0 and archive.is_file()
        yield replace(toolchain, options=(f"-XX:SharedArchiveFile={archive}",)) if whole else toolchain


def _command(toolchain: Toolchain, job: Job, folder: str, config: Path) -> list[str]:
    # A parent that is killed with SIGKILL cannot clean up, so let the kernel end the JVM in that case.
    guard = shutil.which("setpriv")
    command = [guard, "--pdeathsig", "KILL"] if guard else []
    command += [
        str(toolchain.java),
        *toolchain.options,
        *job.size.value,
        "-XX:-UsePerfData",
        f"-Djava.io.tmpdir={folder}",
    ]
    # By default TLC checks temporal properties once a minute too: what a run finds first would depend on the machine.
    command += ["-cp", str(toolchain.jar), "tlc2.TLC", "-tool", "-lncheck", "final"]
    command += ["-workers", str(job.workers), "-metadir", f"{folder}/meta", "-config", str(config)]
    if job.coverage is Coverage.COUNTED:
        command += ["-coverage", "1"]
    return [*command, f"{job.module}.tla"]


def follow(lines: Iterable[str], progressed: Callable[[Findings], None], reader: MessageReader) -> Findings:
    """Return the findings from the lines that TLC prints."""
    findings = Findings()
    for line in lines:
        message = reader.feed(line)
        if message is not None:
            findings.take(message)
            progressed(findings)
    return findings


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    with process.stdout:
        yield from process.stdout
    process.wait()


def launched(command: Sequence[str], stdin: int, folder: Path | None = None) -> subprocess.Popen[str]:
    """Start a process in its own session, for `kill`; its output and errors are read as text from one stream."""
    return subprocess.Popen(
        command,
        cwd=folder,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a process that `launched` has started, and all processes that it has started itself."""
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
    process.wait()
