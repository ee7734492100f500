"""The trainer: it takes experience from the workers, learns, and sends them the new weights."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from functools import partial

import numpy as np

from weightsync import (
    OutcomeKind,
    ResultTimeoutError,
    State,
    SyncReport,
    WeightSender,
    WorkerFailedError,
    WorkerGroup,
    WorkerLostError,
    WorkerResult,
)
from weightsync.demo.joined import joined_workers
from weightsync.demo.learning import Chunk, Learner, Policy
from weightsync.demo.state import MODEL_ID, START_TIMEOUT, Phase, Proof, RunState, Settings, WorkerState
from weightsync.demo.worker import act
from weightsync.local_workers import SchemeName, running_ray

#: Seconds for a worker to apply a version, to send experience, or to prove its version.
WORKER_TIMEOUT = 15.0
#: Steps of experience for one update of the policy.
_BATCH_STEPS = 512
#: Experience that is more versions behind than this is dropped.
_MAX_STALENESS = 8
#: CartPole-v1 counts as solved at this mean return; the maximum is 500.
SOLVED = 475.0
#: For how many updates in a row the task must be solved before the run ends early.
STAYS_SOLVED = 15
#: With --kill-worker, the worker is killed after half of the time or at this mean return, whichever comes first.
_HALF_WAY = 150.0


def train(state: RunState) -> None:
    """Start the workers, train the policy, and let each worker prove what it serves: see `weightsync.demo.run`."""
    learner = Learner(state.settings.seed)
    with _workers(state.settings, learner.policy) as (group, sends):
        Trainer(state, learner, group, sends).run()


@contextlib.contextmanager
def _workers(settings: Settings, policy: Policy) -> Iterator[tuple[WorkerGroup, WorkerGroup | WeightSender]]:
    """The workers, and what sends them weights; they are being sent the policy. All have ended with the context."""
    with contextlib.ExitStack() as cleanup:
        if settings.scheme in (SchemeName.RPC, SchemeName.DISTRIBUTED):
            yield cleanup.enter_context(joined_workers(policy, settings))
            return
        context = None
        if settings.scheme is SchemeName.RAY:
            cleanup.enter_context(running_ray("weightsync demo --scheme ray", object_store_memory=200 * 2**20))
        else:
            context = multiprocessing.get_context("forkserver")
        run, scheme = partial(act, settings=settings), settings.scheme.value
        group = WorkerGroup(run, policy, settings.workers, scheme=scheme, model_id=MODEL_ID, capacity=1, ctx=context)
        yield cleanup.enter_context(group), group


class Trainer:
    """One run, with workers that are being sent the first version."""

    def __init__(
        self, state: RunState, learner: Learner, group: WorkerGroup, sends: WorkerGroup | WeightSender
    ) -> None:
        self._state, self._settings = state, state.settings
        self._learner, self._group, self._sends = learner, group, sends
        self._sender = state.sender = sends if isinstance(sends, WeightSender) else sends.sender
        self._chunks: list[Chunk] = []

    def run(self) -> None:
        """Wait for the first version, train, prove."""
        self._await_started()
        self._state.enter(Phase.TRAINING)
        self._train()
        self._state.enter(Phase.PROVING)
        self._prove()
        self._state.enter(Phase.ENDED)

    def _await_started(self) -> None:
        """Wait until every worker has applied the first version, and has named its process: it may have to be killed.

        Raises:
            WorkerFailedError: a worker ended before.
            AckTimeoutError, WorkerLostError, RefusedError, SyncError: a worker has not applied it.
        """
        report = self._sends.wait_async(timeout=START_TIMEOUT, on_failure="report")
        if report.failed:
            with contextlib.suppress(ResultTimeoutError):
                list(self._group.results(1.0))  # raises what ended a worker
            report.raise_on_failure()
        self._conclude(report)
        until = time.monotonic() + START_TIMEOUT
        while any(worker.pid is None and not worker.failed for worker in self._state.workers) and self._listen(until):
            continue

    def _train(self) -> None:
        """Train until the task stays solved, time is up, or no worker is left."""
        state, until, solved = self._state, time.monotonic() + self._settings.seconds, 0
        while not all(worker.lost or worker.failed for worker in state.workers):
            chunks = self._collect(until)
            if time.monotonic() >= until:
                break
            if chunks:
                self._learn(chunks)
            self._send(overlap=self._settings.overlap)
            mean = state.last_mean or 0.0
            solved = solved + 1 if mean >= SOLVED else 0
            if self._kill_last_if_due(mean):
                solved = 0
            elif solved >= STAYS_SOLVED:
                break
        self._settle()

    def _kill_last_if_due(self, mean: float) -> bool:
        """Kill the last worker, if that was asked for and now is half way. Return whether it was done now."""
        victim, settings = self._state.workers[-1], self._settings
        half_way = mean >= _HALF_WAY or self._state.elapsed >= settings.seconds / 2
        if not settings.kill_worker or not half_way or victim.killed or victim.pid is None:
            return False
        victim.killed = True
        self._note(f"worker {victim.index} (process {victim.pid}) is killed with SIGKILL half way")
        _kill(victim)
        self._send()  # whose report says LOST
        return True

    def _prove(self) -> None:
        """Send the last weights, and have every remaining worker return with the digest of the weights it serves."""
        self._send()
        self._group.stop()
        until = time.monotonic() + WORKER_TIMEOUT
        while self._listen(until):
            pass
        self._state.sent = Proof(self._sender.version, self._sender.digest())

    def _collect(self, until: float) -> list[Chunk]:
        """Wait for one batch of experience. Empty: time is up, no worker is left, or none has answered for too long."""
        until = min(until, time.monotonic() + WORKER_TIMEOUT)
        while sum(chunk.steps for chunk in self._chunks) < _BATCH_STEPS:
            if not self._listen(until):
                return []
        chunks, self._chunks = self._chunks, []
        oldest = self._sender.version - _MAX_STALENESS
        fresh = [chunk for chunk in chunks if chunk.versions.min() >= oldest]
        self._state.dropped += sum(chunk.steps for chunk in chunks) - sum(chunk.steps for chunk in fresh)
        return fresh

    def _learn(self, chunks: list[Chunk]) -> None:
        self._learner.learn(chunks)
        state = self._state
        state.updates += 1
        state.steps += sum(chunk.steps for chunk in chunks)
        state.staleness = self._sender.version - float(np.mean([chunk.versions for chunk in chunks]))

    # ------------------------------------------------------------------------------------------------- sending

    def _send(self, *, overlap: bool = False) -> None:
        """Send the policy as the next version. If no worker is left to take it, that is recorded."""
        self._settle()
        try:
            if overlap:
                self._sends.send_async(self._learner.policy)
            else:
                self._conclude(self._sends.send(self._learner.policy, timeout=WORKER_TIMEOUT, on_failure="report"))
        except WorkerLostError as error:
            for index, reason in error.lost.items():
                self._lose(index, reason)

    def _settle(self) -> None:
        """Wait for the outstanding version, if there is one."""
        if self._sender.state is State.PENDING_ASYNC:
            self._conclude(self._sends.wait_async(timeout=WORKER_TIMEOUT, on_failure="report"))

    def _conclude(self, report: SyncReport) -> None:
        """Record a report. A worker that did not answer in time is killed, so that later sends do not wait for it."""
        state = self._state
        if report.version is None:  # no worker is left
            return
        state.syncs += 1
        state.report = report
        state.applied_bytes += report.nbytes * len(report.of(OutcomeKind.APPLIED))
        for index, outcome in sorted(report.outcomes.items()):
            match outcome.kind:
                case OutcomeKind.LOST:
                    self._lose(index, outcome.reason)
                case OutcomeKind.REFUSED:
                    self._note(f"report of version {report.version}: worker {index} has {outcome}")
                case OutcomeKind.TIMED_OUT:
                    self._note(f"worker {index} did not answer in time for version {report.version}: killed")
                    _kill(state.workers[index])
        self._settle()  # a worker that was killed for its timeout still owes an answer, and is LOST now

    def _lose(self, index: int, reason: str) -> None:
        worker = self._state.workers[index]
        if not worker.lost:
            worker.lost, worker.state = reason, "LOST"
            self._note(f"report of version {self._sender.version}: worker {index} is LOST ({reason})")

    def _note(self, text: str) -> None:
        self._state.notes.append(text)

    # ----------------------------------------------------------------------------------------------- receiving

    def _listen(self, until: float) -> bool:
        """Take a worker's next result or failure. Return False if none arrived in time, or all workers have ended."""
        try:
            result = next(self._group.results(max(0.0, until - time.monotonic())), None)
        except ResultTimeoutError:
            return False
        except WorkerFailedError as error:
            self._fail(error)
            return True
        if result is not None:
            self._take(result)
        return result is not None

    def _fail(self, error: WorkerFailedError) -> None:
        worker = self._state.workers[error.worker]
        worker.failed = error.reason
        if not worker.lost:
            worker.state = "failed"
        if error.remote_traceback or not worker.lost:
            self._note(f"worker {error.worker} failed: {error.reason}\n{error.remote_traceback}".rstrip())

    def _take(self, result: WorkerResult) -> None:
        state, worker = self._state, self._state.workers[result.worker]
        match result.value:
            case int(pid):
                worker.pid = pid
            case Proof() as proof:
                worker.proof, worker.version = proof, proof.version
            case Chunk() as chunk:
                self._chunks.append(chunk)
                worker.version = int(chunk.versions[-1])
                if not worker.lost:
                    worker.state = chunk.state
                worker.steps += chunk.steps
                worker.episodes += len(chunk.returns)
                state.returns += chunk.returns


def _kill(worker: WorkerState) -> None:
    if worker.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)
