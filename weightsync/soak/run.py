"""The soak's trainer: it sends, plants faults, and checks every report against what the workers have seen."""

from __future__ import annotations

import enum
import gc
import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from weightsync import ConfigurationError, OutcomeKind, State, SyncReport
from weightsync.local_workers import LocalWorkerError, SchemeName, start_forkserver
from weightsync.soak.members import MEMBERS, PROCESS_S, Member
from weightsync.soak.worker import MAKE, MODEL_ID, Look, Request, SoakModel, work

#: How many seconds a send waits for a worker that is well; a stopped worker gets `_STOPPED_S`.
_PATIENCE_S = 60.0
_STOPPED_S = 0.3

_APPLIED = frozenset({OutcomeKind.APPLIED})
_MAY_DIE = frozenset({OutcomeKind.APPLIED, OutcomeKind.LOST})
_MAY_BE_LATE = frozenset({OutcomeKind.APPLIED, OutcomeKind.TIMED_OUT})
_REFUSED = frozenset({OutcomeKind.REFUSED})
_NONE: Mapping[int, frozenset[OutcomeKind]] = {}


class Action(enum.Enum):
    """What the soak does, chosen at random."""

    SEND = "send to all"
    SUBSET = "send to some"
    ASYNC = "send_async, wait_async"
    SUPERSEDE = "send_async, superseded by a send"
    ABANDON = "send_async, abandon"
    KILL = "kill a worker"
    STOP = "stop a worker for a moment"
    REFUSE = "refuse an update"
    RELINK = "give a worker a new link"
    COPY = "pickle the sender"


#: How often each is chosen. Faults that start a process are rare, so that most of the time goes into sends.
WEIGHTS = {
    Action.SEND: 60,
    Action.SUBSET: 20,
    Action.ASYNC: 30,
    Action.SUPERSEDE: 10,
    Action.ABANDON: 5,
    Action.KILL: 1,
    Action.STOP: 1,
    Action.REFUSE: 4,
    Action.RELINK: 2,
    Action.COPY: 2,
}


@dataclass(frozen=True, slots=True)
class Usage:
    """What this process holds.

    Attributes:
        rss_nbytes: its resident memory.
        descriptors: its open descriptors.
        threads: its threads.
        children: its child processes.
    """

    rss_nbytes: int
    descriptors: int
    threads: int
    children: int

    @classmethod
    def now(cls) -> Usage:
        """Measure it."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return cls(
            pages * os.sysconf("SC_PAGE_SIZE"),
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            len(multiprocessing.active_children()),
        )


@dataclass(slots=True)
class Tally:
    """What happened.

    Attributes:
        actions: how often each action was taken.
        outcomes: how many outcomes of each kind were reported.
        versions: how many versions were sent.
        reads: how often workers read all their weights.
        findings: what must not happen, in words; empty if all is well.
        before: what this process held before the workers were started.
        after: what it held once all was closed.
        seconds: how long it ran.
    """

    actions: Counter[Action] = field(default_factory=Counter)
    outcomes: Counter[OutcomeKind] = field(default_factory=Counter)
    versions: int = 0
    reads: int = 0
    findings: list[str] = field(default_factory=list)
    before: Usage | None = None
    after: Usage | None = None
    seconds: float = 0.0

    def record(self) -> dict[str, Any]:
        """The tally as plain data, for JSON."""
        held = [asdict(usage) if usage is not None else {} for usage in (self.before, self.after)]
        used = {each.name: [one.get(each.name) for one in held] for each in fields(Usage)}
        return {
            "versions": self.versions,
            "actions": {action.value: self.actions[action] for action in Action},
            "outcomes": {kind.name: self.outcomes[kind] for kind in OutcomeKind},
            "reads": self.reads,
            "usage": used,
            "seconds": round(self.seconds, 1),
            "findings": self.findings,
        }


class Soak:
    """One run.

    Args:
        scheme: the scheme to soak.
        workers: how many workers, at least 2.
        nbytes: the size of the weights.
        seed: the seed of the random choices. Processes race, so two runs with one seed still differ.

    Raises:
        ConfigurationError: there are fewer than 2 workers.
    """

    def __init__(self, scheme: SchemeName, workers: int = 3, nbytes: int = 1 << 20, seed: int = 0) -> None:
        if workers < 2:
            raise ConfigurationError(f"the soak needs at least 2 workers, one to lose and one to keep, not {workers}.")
        self.tally = Tally()
        self._name, self._count, self._nbytes = scheme, workers, nbytes
        self._random = random.Random(seed)
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._members: dict[int, Member] = {}
        self._setup = MEMBERS[scheme](scheme, nbytes, self._context, workers)
        self._values: dict[int, float] = {}
        self._sender: Any = None
        self._model = SoakModel(nbytes)
        self._scheme = MAKE[scheme]()
        self._does: dict[Action, Callable[[], object]] = {
            Action.SEND: lambda: self._send(),  # noqa: PLW0108 - its arguments have defaults
            Action.SUBSET: lambda: self._send(self._pick_workers()),
            Action.ASYNC: self._overlap,
            Action.SUPERSEDE: self._supersede,
            Action.ABANDON: self._abandon,
            Action.KILL: self._kill,
            Action.STOP: self._stop,
            Action.REFUSE: self._refuse,
            Action.RELINK: self._relink,
            Action.COPY: self._copy,
        }

    def run(self, seconds: float, progress: Callable[[Tally], object] = bool) -> Tally:
        """Run for that long, close everything, and return what happened. Ctrl-C ends it early, and cleanly."""
        if self._context.get_start_method() == "forkserver":
            start_forkserver([work.__module__])  # before what is held is counted: it is no leak of the workers'
        self.tally.before = Usage.now()
        started = time.monotonic()
        try:
            self._start_all()
            started = time.monotonic()
            while time.monotonic() - started < seconds and not self.tally.findings:
                action = self._next_action()
                self.tally.actions[action] += 1
                self._does[action]()
                progress(self.tally)
        except KeyboardInterrupt:
            pass
        finally:
            self._end_all()
            self.tally.seconds = time.monotonic() - started
        return self.tally

    def _next_action(self) -> Action:
        weights = {each: WEIGHTS[each] for each in WEIGHTS if each is not Action.KILL or self._setup.can_start}
        # Each once at first, in any order: a short run would have no kill.
        weights = {each: weights[each] for each in weights if not self.tally.actions[each]} or weights
        [action] = self._random.choices(list(weights), list(weights.values()))
        return action

    # ------------------------------------------------------------------------------------------ both sides

    def _start_all(self) -> None:
        self._setup.open()
        endpoints = [self._start(index) for index in range(self._count)]
        processes = [self._setup.watched(member) for member in self._members.values()]
        given = self._setup.init_arguments(endpoints, processes)
        self._scheme.init_on_sender(MODEL_ID, model=self._model, **given)
        self._sender = self._scheme.get_sender()
        self._send()

    def _start(self, index: int) -> Any:
        """Start a worker; returns how it is reached."""
        self._members[index], endpoint = self._setup.start(index)
        return endpoint

    def _end_all(self) -> None:
        for index, member in self._members.items():
            self._ask(index, Request.LOOK)
            self._count_last_reads(index)
            self._setup.dismiss(member)
        for member in self._members.values():
            member.worker.join(PROCESS_S)
            member.worker.kill()
            member.worker.close()
        self._members.clear()
        self._scheme.close()
        self._scheme = MAKE[self._name]()  # the closed one and its sender know the store, which is this process's
        self._sender = None
        self._setup.close()
        self.tally.after = self._settled_usage()

    def _settled_usage(self) -> Usage:
        """What is still held once threads that end by themselves have ended: a store's wait for its answers."""
        until = time.monotonic() + PROCESS_S
        usage = Usage.now()
        while self.tally.before is not None and usage.threads > self.tally.before.threads and time.monotonic() < until:
            time.sleep(0.05)
            usage = Usage.now()
        return usage

    # --------------------------------------------------------------------------------------------- actions

    def _next_value(self) -> float:
        """Give the trainer's weights a new value."""
        self.tally.versions += 1
        value = float(self.tally.versions)
        self._model.set(value)
        return value

    def _send(
        self,
        targets: Sequence[int] | None = None,
        timeout: float = _PATIENCE_S,
        may: Mapping[int, frozenset[OutcomeKind]] = _NONE,
    ) -> SyncReport:
        """Send a new version and judge the report; ``may`` has the outcomes that a worker may have."""
        value = self._next_value()
        version = self._sender.version + 1
        self._values[version] = value
        report: SyncReport = self._sender.send(
            worker_ids=targets, timeout=timeout, on_failure="report", on_pending="supersede"
        )
        self._judge(report, may)
        return report

    def _overlap(self) -> None:
        self._values[self._sender.version + 1] = self._next_value()
        self._sender.send_async(on_pending="supersede")
        self._model.set(-1.0)  # what was sent is a snapshot
        self._judge(self._sender.wait_async(timeout=_PATIENCE_S, on_failure="report"))

    def _supersede(self) -> None:
        self._values[self._sender.version + 1] = self._next_value()
        self._sender.send_async(on_pending="supersede")
        self._send()

    def _abandon(self) -> None:
        self._values[self._sender.version + 1] = self._next_value()
        self._sender.send_async(on_pending="supersede")
        for outcome in self._sender.abandon().outcomes.values():
            self.tally.outcomes[outcome.kind] += 1

    def _kill(self) -> None:
        """Kill a worker, sometimes during a send; it is LOST, the others are served, and it is started again."""
        index = self._pick_worker()
        worker = self._members[index].worker
        if self._random.random() < 0.5:
            worker.kill()
        else:
            killer = threading.Timer(self._random.random() / 100, worker.kill)
            killer.start()
        self._send(may={index: _MAY_DIE})
        worker.join(PROCESS_S)
        self._count_last_reads(index)
        del self._members[index]
        worker.close()
        self._add(index, self._start(index))

    def _stop(self) -> None:
        """Stop a worker until the send has timed out, and let it continue."""
        index = self._pick_worker()
        pid = self._members[index].worker.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            self._send(timeout=_STOPPED_S, may=dict.fromkeys(self._members, _MAY_BE_LATE))
        finally:
            os.kill(pid, signal.SIGCONT)
        self._send()

    def _refuse(self) -> None:
        """Let a worker refuse: it serves what it served before, and says why."""
        index = self._pick_worker()
        self._send()  # an update that was given up may still be in flight
        self._ask(index, Request.REFUSE_NEXT)
        report = self._send(may={index: _REFUSED})
        if "asked to refuse" not in report[index].reason:
            self._found(f"worker {index} refused version {report.version} for another reason: {report[index].reason!r}")

    def _relink(self) -> None:
        """Give a worker that lives a new link: it catches up over it."""
        index = self._pick_worker()
        self._add(index, self._setup.relink(index, self._members[index]))

    def _add(self, index: int, endpoint: Any) -> None:
        """Give the sender a link to a worker, over which it catches up."""
        self._sender.add_worker(index, endpoint, process=self._setup.watched(self._members[index]))
        self._send()

    def _copy(self) -> None:
        """A pickled sender is another, uninitialized machine, and does not disturb this one."""
        copy = pickle.loads(pickle.dumps(self._sender))
        if copy.state is not State.UNINITIALIZED:
            self._found(f"a copy of the sender is {copy.state.value}")
        copy.close()
        self._send()

    # --------------------------------------------------------------------------------------------- judging

    def _pick_worker(self) -> int:
        return self._random.choice(list(self._members))

    def _pick_workers(self) -> list[int]:
        return self._random.sample(list(self._members), self._random.randint(1, self._count - 1))

    def _judge(self, report: SyncReport, may: Mapping[int, frozenset[OutcomeKind]] = _NONE) -> None:
        """Hold a report against what the workers serve."""
        for index, outcome in report.outcomes.items():
            self.tally.outcomes[outcome.kind] += 1
            if outcome.kind not in may.get(index, _APPLIED):
                self._found(f"worker {index}, version {report.version}: {outcome}")
            elif outcome.kind is OutcomeKind.APPLIED and self._members[index].worker.is_alive() and index not in may:
                self._look(index, report.version or 0)

    def _look(self, index: int, version: int) -> None:
        look = self._ask(index, Request.LOOK)
        if look is None:
            self._found(f"worker {index} does not answer, after it applied version {version}")
        elif look.version != version or look.value != self._values[version]:
            self._found(
                f"worker {index} applied version {version} (value {self._values[version]}), "
                f"but serves version {look.version} (value {look.value})"
            )

    def _ask(self, index: int, request: Request) -> Look | None:
        """Ask a worker; None: it is gone, or did not answer in time."""
        member = self._members[index]
        try:
            member.worker.ask(request)
            look: Look = member.worker.answer(PROCESS_S)
        except LocalWorkerError:
            return None
        member.looked = look
        if look.torn:
            self._found(f"worker {index} has read {look.torn} times weights of more than one version")
        return look

    def _count_last_reads(self, index: int) -> None:
        """Count what a worker that is gone had reported last."""
        self.tally.reads += self._members[index].looked.reads

    def _found(self, what: str) -> None:
        self.tally.findings.append(what)
