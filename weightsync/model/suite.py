"""Runs many configurations, in parallel if there are enough cores. No JVM outlives the caller."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weightsync.model.config import config_traps
from weightsync.model.manifest import Configuration, Expected, Manifest
from weightsync.model.output import Findings, Progress
from weightsync.model.process import Coverage, Job, Outcome, Size, TlcRun
from weightsync.model.text import Library, traps
from weightsync.model.toolchain import Toolchain
from weightsync.model.verdict import Verdict, judge

_MOST_AT_ONCE = 2
_WAKE_SECONDS = 0.5
_FEW_STATES = 100_000


class Observer(Protocol):
    """Is notified about the runs, always in the caller's thread."""

    def started(self, configuration: Configuration) -> None:
        """Handle the start of a run."""

    def progressed(self, configuration: Configuration, progress: Progress) -> None:
        """Handle the progress of a run."""

    def ended(self, verdict: Verdict) -> None:
        """Handle the verdict on a configuration."""


@dataclass(slots=True)
class _Running:
    configuration: Configuration
    job: Job
    run: TlcRun
    thread: threading.Thread
    seen: Progress | None = None


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


class Suite:
    """Runs configurations and judges each."""

    def __init__(
        self,
        toolchain: Toolchain,
        manifest: Manifest,
        observer: Observer,
        coverage: Coverage = Coverage.NOT_COUNTED,
    ) -> None:
        self._toolchain = toolchain
        self._manifest = manifest
        self._observer = observer
        self._coverage = coverage
        self._library = Library(manifest.folder)
        self._ended: queue.SimpleQueue[tuple[str, Outcome | BaseException]] = queue.SimpleQueue()
        self._running: dict[str, _Running] = {}

    def run(self, configurations: Sequence[Configuration]) -> list[Verdict]:
        """Run all configurations, the largest first, and return the verdicts in the order of the argument.

        If this call ends early, for example by an interrupt, it first ends the JVMs and removes their folders.
        """
        waiting = deque(sorted(configurations, key=_states, reverse=True))
        verdicts: dict[str, Verdict] = {}
        try:
            while waiting or self._running:
                self._start_what_fits(waiting, verdicts)
                self._await_one(verdicts)
        finally:
            self._stop()
        return [verdicts[found.name] for found in configurations]

    def _start_what_fits(self, waiting: deque[Configuration], verdicts: dict[str, Verdict]) -> None:
        while waiting and (not self._running or self._fits(waiting[0])):
            configuration = waiting.popleft()
            job = self._job(configuration)
            found = self._traps(configuration)
            if found:
                verdicts[configuration.name] = Verdict(configuration, job, None, (), found)
                self._observer.ended(verdicts[configuration.name])
            else:
                self._start(configuration, job)

    def _fits(self, configuration: Configuration) -> bool:
        busy = [running.configuration.workers for running in self._running.values()]
        alone = configuration.workers > 1 or max(busy) > 1
        return not alone and len(busy) < min(_MOST_AT_ONCE, cores())

    def _job(self, configuration: Configuration) -> Job:
        return Job(
            self._manifest.folder,
            configuration.module,
            configuration.config.text,
            configuration.workers,
            configuration.timeout,
            self._coverage,
            _size(configuration),
        )

    def _traps(self, configuration: Configuration) -> tuple[str, ...]:
        root = configuration.module
        found = [trap for module in self._library.closure(root) for trap in traps(module)]
        return (*found, *config_traps(self._library, root, configuration.config, configuration.workers))

    def _start(self, configuration: Configuration, job: Job) -> None:
        run = TlcRun(self._toolchain, job)
        thread = threading.Thread(target=self._follow, args=(configuration, run), name=configuration.name)
        self._running[configuration.name] = _Running(configuration, job, run, thread)
        self._observer.started(configuration)
        thread.start()

    def _follow(self, configuration: Configuration, run: TlcRun) -> None:
        try:
            self._ended.put((configuration.name, run.run(lambda found: self._note(configuration.name, found))))
        except BaseException as error:  # noqa: BLE001 - it is re-raised in the caller's thread
            self._ended.put((configuration.name, error))

    def _note(self, name: str, findings: Findings) -> None:
        running = self._running.get(name)
        if running is not None:
            running.seen = findings.progress

    def _await_one(self, verdicts: dict[str, Verdict]) -> None:
        if not self._running:
            return
        try:
            name, outcome = self._ended.get(timeout=_WAKE_SECONDS)
        except queue.Empty:
            for running in self._running.values():
                if running.seen is not None:
                    self._observer.progressed(running.configuration, running.seen)
            return
        running = self._running.pop(name)
        running.thread.join()
        if isinstance(outcome, BaseException):
            raise outcome
        verdicts[name] = judge(running.configuration, running.job, outcome, self._library)
        self._observer.ended(verdicts[name])

    def _stop(self) -> None:
        for running in self._running.values():
            running.run.stop()
        for running in self._running.values():
            if running.thread.is_alive():
                running.thread.join()


def _states(configuration: Configuration) -> int:
    return configuration.pinned.generated if configuration.pinned else 0


def _size(configuration: Configuration) -> Size:
    """Estimate the size: a run that must fail ends early, and one without pinned counts may be of any size."""
    if configuration.expected is Expected.PASS and configuration.pinned is None:
        return Size.LARGE
    return Size.SMALL if _states(configuration) < _FEW_STATES else Size.LARGE
