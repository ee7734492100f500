"""The trainer: it trains the policy, sends each version, and asks the workers to prove at the end what they serve."""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Iterator, Mapping

import numpy as np

import weightsync
from weightsync import OutcomeKind, State, SyncReport, WorkerLostError
from weightsync.demo.learning import Chunk, Learner
from weightsync.demo.state import START_TIMEOUT, WORKER_TIMEOUT, Phase, Proof, Result, RunState, SchemeName, judge
from weightsync.demo.worker import Failure, Request
from weightsync.demo.workers import Answer, ProcessWorkers, RayWorkers, start_workers

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
    scheme = make_scheme(state.settings.scheme)
    workers = start_workers(state.settings, scheme, learner.policy)
    with contextlib.closing(workers), scheme:
        return Trainer(state, learner, workers, scheme).run()


def make_scheme(name: SchemeName) -> weightsync.WeightSyncScheme:
    """Make a scheme. Worker processes get copies of it, which find the trainer by themselves."""
    match name:
        case SchemeName.SHARED:
            return weightsync.SharedMemWeightSyncScheme()
        case SchemeName.PIPE:
            return weightsync.MultiProcessWeightSyncScheme()
        case SchemeName.RAY:
            return weightsync.RayWeightSyncScheme()
        case SchemeName.RPC:
            return weightsync.RPCWeightSyncScheme()
        case SchemeName.DISTRIBUTED:
            # torch's store can be reached from other hosts, so a key is needed to keep them out.
            return weightsync.DistributedWeightSyncScheme(key=secrets.token_bytes(16))


class Trainer:
    """One run, with workers that have started."""

    def __init__(
        self,
        state: RunState,
        learner: Learner,
        workers: ProcessWorkers | RayWorkers,
        scheme: weightsync.WeightSyncScheme,
    ) -> None:
        self._state = state
        self._settings = state.settings
        self._learner = learner
        self._workers = workers
        self._sender = state.sender = scheme.get_sender()
        self._chunks: list[Chunk] = []
        self._proofs: dict[int, Proof] = {}
        #: Workers that a report called LOST, and why; and workers that no longer answer, and why.
        self._lost: dict[int, str] = {}
        self._gone: dict[int, str] = {}
        self._victim: int | None = None
        #: The number of updates before the run may end early.
        self._least_updates = math.inf if self._settings.kill_worker else 0.0

    def run(self) -> Result:
        """Send the first version, train, prove."""
        self._send(START_TIMEOUT)
        self._state.enter(Phase.TRAINING)
        self._train()
        self._state.enter(Phase.PROVING)
        self._prove()
        self._state.enter(Phase.ENDED)
        sent = Proof(self._sender.version, self._sender.digest())
        killed = self._victim if self._victim in self._lost else None
        results = judge(self._settings.workers, sent, self._proofs, self._gone | self._lost, killed)
        return Result(self._state, sent, results)

    def _train(self) -> None:
        """Train until the task stays solved, time is up, or no worker is left."""
        state, until, solved = self._state, time.monotonic() + self._settings.seconds, 0
        for index in range(self._settings.workers):
            self._workers.ask(index, Request.COLLECT)
        while len(self._gone | self._lost) < self._settings.workers:
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
        if self._victim is None:
            victim = self._victim = self._settings.workers - 1
            pid = self._workers.pids[victim]
            self._state.notes.append(f"worker {victim} (process {pid}) is killed with SIGKILL half way")
            self._workers.kill(victim)
            self._least_updates = self._state.updates + _UPDATES_AFTER_KILL

    def _prove(self) -> None:
        """Send the last weights, and ask every remaining worker for the digest of the weights it serves."""
        self._send(WORKER_TIMEOUT)
        asked = set(range(self._settings.workers)) - self._lost.keys()
        for index in asked:
            self._workers.ask(index, Request.PROVE)
        until = time.monotonic() + WORKER_TIMEOUT
        while asked - self._gone.keys() - self._proofs.keys() and self._listen(until):
            pass

    def _publish(self) -> None:
        """Send the policy as the next version, blocking or not as the settings say."""
        if not self._settings.overlap:
            self._send(WORKER_TIMEOUT)
            return
        self._settle()
        with self._nobody_left():
            self._sender.send_async(self._learner.policy, allow_empty=True)

    def _send(self, timeout: float) -> None:
        """Send the policy as the next version, and handle the report."""
        self._settle()
        with self._nobody_left():
            report = self._sender.send(self._learner.policy, timeout=timeout, on_failure="report", allow_empty=True)
            self._conclude(report)

    def _settle(self) -> None:
        """Wait for the outstanding version, if there is one."""
        if self._sender.state is State.PENDING_ASYNC:
            self._conclude(self._sender.wait_async(timeout=WORKER_TIMEOUT, on_failure="report"))

    def _conclude(self, report: SyncReport) -> None:
        """Record a report. A worker that did not answer in time is killed, so that later sends do not wait for it."""
        state = self._state
        state.syncs += 1
        state.report = report
        state.applied_bytes += report.nbytes * len(report.of(OutcomeKind.APPLIED))
        self._lose({index: report[index].reason for index in report.of(OutcomeKind.LOST)})
        for index in report.of(OutcomeKind.REFUSED):
            state.notes.append(f"report of version {report.version}: worker {index} has {report[index]}")
        for index in report.of(OutcomeKind.TIMED_OUT):
            state.notes.append(f"worker {index} did not answer in time for version {report.version}: killed")
            self._workers.kill(index)
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
            version = self._sender.version
            self._state.notes.append(f"report of version {version}: worker {index} is LOST ({lost[index]})")

    def _collect(self, until: float) -> list[Chunk]:
        """Wait for one batch of experience. Empty: time is up, no worker is left, or none has answered for too long."""
        until = min(until, time.monotonic() + WORKER_TIMEOUT)
        while sum(chunk.steps for chunk in self._chunks) < _BATCH_STEPS:
            if len(self._gone) == self._settings.workers or not self._listen(until):
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
        """Handle the workers' answers. Return False if none came in time."""
        answers = self._workers.answers(max(0.0, until - time.monotonic()))
        for index, answer in answers:
            self._take(index, answer)
        return bool(answers)

    def _take(self, index: int, answer: Answer) -> None:
        state, worker = self._state, self._state.workers[index]
        match answer:
            case Chunk():
                self._chunks.append(answer)
                worker.state, worker.version = answer.state, int(answer.versions[-1])
                worker.steps += answer.steps
                worker.episodes += len(answer.returns)
                state.returns += answer.returns
                if state.phase is Phase.TRAINING:
                    self._workers.ask(index, Request.COLLECT)
            case Proof():
                self._proofs[index] = answer
                worker.version = answer.version
            case Failure(reason, trace):
                self._gone[index] = worker.state = "failed"
                state.notes.append(f"worker {index} failed: {reason}\n{trace.rstrip()}")
            case None:
                self._gone.setdefault(index, "its process has ended")
