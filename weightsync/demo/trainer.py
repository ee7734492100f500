"""The trainer: it trains the policy, sends each version, and asks the workers to prove at the end what they serve."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from weightsync import (
    OutcomeKind,
    ResultTimeoutError,
    State,
    SyncReport,
    WorkerFailedError,
    WorkerGroup,
    WorkerLostError,
    WorkerResult,
)
from weightsync.demo.joined import JoinedWorkers
from weightsync.demo.learning import Chunk, Learner, Policy
from weightsync.demo.state import (
    MODEL_ID,
    START_TIMEOUT,
    WORKER_TIMEOUT,
    Phase,
    Proof,
    Result,
    RunState,
    Settings,
    judge,
)
from weightsync.demo.worker import act
from weightsync.local_workers import SchemeName, running_ray

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
#: How many updates must follow the kill before the run may end early.
_UPDATES_AFTER_KILL = 20


def train(state: RunState) -> Result:
    """Start the workers, train the policy, and let each worker prove what it serves: see `weightsync.demo.run`."""
    learner = Learner(state.settings.seed)
    with workers(state.settings, learner.policy) as group:
        return Trainer(state, learner, group).run()


@contextlib.contextmanager
def workers(settings: Settings, policy: Policy) -> Iterator[WorkerGroup | JoinedWorkers]:
    """The workers, which have been sent the policy. All have ended with the context."""
    with contextlib.ExitStack() as cleanup:
        context = None
        if settings.scheme is SchemeName.RAY:
            cleanup.enter_context(running_ray("weightsync demo --scheme ray", object_store_memory=200 * 2**20))
        else:
            context = multiprocessing.get_context("forkserver")
        run = partial(act, settings=settings)
        if settings.scheme in (SchemeName.RPC, SchemeName.DISTRIBUTED):
            yield cleanup.enter_context(JoinedWorkers(run, policy, settings))
            return
        scheme = settings.scheme.value
        group = WorkerGroup(run, policy, settings.workers, scheme=scheme, model_id=MODEL_ID, capacity=1, ctx=context)
        yield cleanup.enter_context(group)


class Trainer:
    """One run, with workers that have been sent the first version."""

    def __init__(self, state: RunState, learner: Learner, group: WorkerGroup | JoinedWorkers) -> None:
        self._state, self._settings = state, state.settings
        self._learner, self._group = learner, group
        self._sender = state.sender = group.sender
        self._chunks: list[Chunk] = []
        self._proofs: dict[int, Proof] = {}
        self._pids: dict[int, int] = {}
        #: Workers that a report called LOST, and workers that failed, and why.
        self._lost: dict[int, str] = {}
        self._failed: dict[int, str] = {}
        self._victim: int | None = None
        #: The number of updates before the run may end early.
        self._least_updates = math.inf if self._settings.kill_worker else 0.0

    def run(self) -> Result:
        """Wait for the first version, train, prove."""
        self._await_started()
        self._state.enter(Phase.TRAINING)
        self._train()
        self._state.enter(Phase.PROVING)
        self._prove()
        self._state.enter(Phase.ENDED)
        sent = Proof(self._sender.version, self._sender.digest())
        killed = self._victim if self._victim in self._lost else None
        results = judge(self._settings.workers, sent, self._proofs, self._failed | self._lost, killed)
        return Result(self._state, sent, results)

    def _await_started(self) -> None:
        """Wait until every worker has applied the first version, and its process id is here.

        Raises:
            WorkerFailedError: a worker ended before.
            AckTimeoutError, WorkerLostError, RefusedError, SyncError: a worker has not applied it.
        """
        report = self._group.wait_async(timeout=START_TIMEOUT, on_failure="report")
        if report.failed:
            with contextlib.suppress(ResultTimeoutError):
                for _ in self._group.results(0.0):
                    pass  # raises what ended a worker
            report.raise_on_failure()
        self._conclude(report)
        until = time.monotonic() + START_TIMEOUT
        while len(self._pids.keys() | self._failed.keys()) < self._settings.workers and self._listen(until):
            pass

    def _train(self) -> None:
        """Train until the task stays solved, time is up, or no worker is left."""
        state, until, solved = self._state, time.monotonic() + self._settings.seconds, 0
        while len(self._failed | self._lost) < self._settings.workers:
            chunks = self._collect(until)
            if time.monotonic() >= until:
                break
            if chunks:
                self._learn(chunks)
            self._publish()
            mean = state.last_mean or 0.0
            if self._settings.kill_worker and (mean >= _HALF_WAY or state.elapsed >= self._settings.seconds / 2):
                self._kill_last()
            solved = solved + 1 if mean >= SOLVED else 0
            if solved >= STAYS_SOLVED and state.updates >= self._least_updates:
                break
        self._settle()

    def _kill_last(self) -> None:
        victim = self._settings.workers - 1
        if self._victim is None and victim in self._pids:
            self._victim = victim
            self._state.notes.append(f"worker {victim} (process {self._pids[victim]}) is killed with SIGKILL half way")
            self._kill(victim)
            self._least_updates = self._state.updates + _UPDATES_AFTER_KILL
            self._send(WORKER_TIMEOUT)  # whose report says LOST

    def _kill(self, index: int) -> None:
        if index in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[index], signal.SIGKILL)

    def _prove(self) -> None:
        """Send the last weights, and have every remaining worker return with the digest of the weights it serves."""
        self._send(WORKER_TIMEOUT)
        self._group.stop()
        until = time.monotonic() + WORKER_TIMEOUT
        while self._listen(until):
            pass

    def _publish(self) -> None:
        """Send the policy as the next version, blocking or not as the settings say."""
        if not self._settings.overlap:
            self._send(WORKER_TIMEOUT)
            return
        self._settle()
        with self._nobody_left():
            self._group.send_async(self._learner.policy)

    def _send(self, timeout: float) -> None:
        """Send the policy as the next version, and handle the report."""
        self._settle()
        with self._nobody_left():
            self._conclude(self._group.send(self._learner.policy, timeout=timeout, on_failure="report"))

    def _settle(self) -> None:
        """Wait for the outstanding version, if there is one."""
        if self._sender.state is State.PENDING_ASYNC:
            self._conclude(self._group.wait_async(timeout=WORKER_TIMEOUT, on_failure="report"))

    def _conclude(self, report: SyncReport) -> None:
        """Record a report. A worker that did not answer in time is killed, so that later sends do not wait for it."""
        state = self._state
        if report.version is None:  # no worker is left
            return
        state.syncs += 1
        state.report = report
        state.applied_bytes += report.nbytes * len(report.of(OutcomeKind.APPLIED))
        self._lose({index: report[index].reason for index in report.of(OutcomeKind.LOST)})
        for index in report.of(OutcomeKind.REFUSED):
            state.notes.append(f"report of version {report.version}: worker {index} has {report[index]}")
        for index in report.of(OutcomeKind.TIMED_OUT):
            state.notes.append(f"worker {index} did not answer in time for version {report.version}: killed")
            self._kill(index)
        self._settle()  # a worker that was killed for its timeout still owes an answer, and is LOST now

    @contextlib.contextmanager
    def _nobody_left(self) -> Iterator[None]:
        """Suppress the error of a send if every worker is lost, which here only ends the training."""
        try:
            yield
        except WorkerLostError as error:
            self._lose(error.lost)

    def _lose(self, lost: Mapping[int, str]) -> None:
        for index in sorted(lost.keys() - self._lost.keys()):
            self._lost[index] = lost[index]
            self._state.workers[index].state = "LOST"
            version = self._sender.version
            self._state.notes.append(f"report of version {version}: worker {index} is LOST ({lost[index]})")

    def _fail(self, error: WorkerFailedError) -> None:
        self._failed[error.worker] = error.reason
        if error.worker not in self._lost:
            self._state.workers[error.worker].state = "failed"
        if error.remote_traceback or error.worker not in self._lost:
            trace = error.remote_traceback.rstrip()
            self._state.notes.append(f"worker {error.worker} failed: {error.reason}\n{trace}".rstrip())

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
        if state.last_mean is not None:
            state.curve.append((state.steps, state.last_mean))

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

    def _take(self, result: WorkerResult) -> None:
        state, worker = self._state, self._state.workers[result.worker]
        match result.value:
            case int(pid):
                self._pids[result.worker] = pid
            case Proof() as proof:
                self._proofs[result.worker] = proof
                worker.version = proof.version
            case Chunk() as chunk:
                self._chunks.append(chunk)
                worker.version = int(chunk.versions[-1])
                if result.worker not in self._lost:
                    worker.state = chunk.state
                worker.steps += chunk.steps
                worker.episodes += len(chunk.returns)
                state.returns += chunk.returns
