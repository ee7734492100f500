"""A reference model of senders, receivers and the network between them.

The model is written from spec/README.md alone and shares no code with the library. It is slow and plain and has no
tables: each event is a method, and each rule is an `if` in that method. A call that would block is a generator, which
yields where the caller would wait. An error that the caller would get is raised as `Raised`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

SENDER, WORKER = "first", "second"

#: How many updates of a link may be unanswered before newer ones wait.
RUN_AHEAD = 2

Key = tuple[int, int]


class Raised(Exception):
    """The error that a caller should get: the name of its type, and the report or fence that it carries."""

    def __init__(self, kind: str, report: Report | None = None, fence: int | None = None) -> None:
        super().__init__(kind)
        self.kind = kind
        self.report = report
        self.fence = fence


class BrokenWire(Exception):
    """Raised by an end of a wire that is closed or dead, or that knows that the other end is gone."""


class Interrupt(Exception):
    """Thrown into a call that waits, to interrupt it as a KeyboardInterrupt would."""


class Message(NamedTuple):
    """A message, with only the fields that the protocol uses."""

    kind: str
    incarnation: int
    version: int = 0
    why: str = ""
    fence: int = 0


class Content(NamedTuple):
    """Weights: whether their layout fits the worker's model, and the number that identifies them."""

    fits: bool
    code: int


class Parcel(NamedTuple):
    """A message in transit to one end of a wire."""

    number: int
    to: str
    message: Message
    #: With an update, its weights; with a sender's Hello, weights of the layout that it names, if any.
    content: Content | None


class Report(NamedTuple):
    """The report that a caller gets."""

    version: int | None
    outcomes: dict[int, str]
    superseded: dict[int, tuple[int, ...]]
    not_caught_up: dict[int, str]
    #: The fences told by workers that were lost to newer senders.
    fences: dict[int, int]
    #: The report of an earlier update that no caller has got.
    previous: Report | None = None
    #: The workers that said goodbye.
    left: tuple[int, ...] = ()

    def judged(self, raises: bool) -> Report:
        """Return this report, or raise its error: if the update was abandoned, or on any failure if `raises` is set."""
        if not (self.kinds() and raises) and "ABANDONED" not in self.outcomes.values():
            return self
        kinds = self.kinds()
        one = {"TIMED_OUT": "AckTimeoutError", "LOST": "WorkerLostError", "REFUSED": "RefusedError"}
        kind = one.get(next(iter(kinds)), "SyncError") if len(kinds) == 1 else "SyncError"
        fence = max(self.all_fences().values(), default=0) if kind == "WorkerLostError" else 0
        raise Raised(kind, self, fence or None)

    def kinds(self) -> set[str]:
        """The kinds of failure in this report and in those before it."""
        before = self.previous.kinds() if self.previous else set()
        return before | {kind for kind in self.outcomes.values() if kind not in ("APPLIED", "PENDING")}

    def all_fences(self) -> dict[int, int]:
        """The fence that each worker told last, in this report or in one before it."""
        return {**(self.previous.all_fences() if self.previous else {}), **self.fences}


class Wire:
    """A link: its two ends, and the messages in transit between them."""

    _made = itertools.count()

    def __init__(self, loses: bool) -> None:
        self.loses = loses
        #: Numbers rise in the order of creation, so a sender's newer wire has the higher number.
        self.number = next(self._made)
        self.flying: list[Parcel] = []
        self.inbox: dict[str, list[Parcel]] = {SENDER: [], WORKER: []}
        #: Messages that the sender has read and not handled yet.
        self.unheard: list[Parcel] = []
        self.closed: set[str] = set()
        self.dead: set[str] = set()
        self.notified: set[str] = set()
        self.sent = 0
        #: While set, the worker's end writes nothing: its messages wait in `queued`.
        self.clogged = False
        self.queued: list[Message] = []
        #: Versions that were sent and are not answered, and the newest that waits behind them (0: none does).
        self.unanswered: set[int] = set()
        self.waiting = 0

    def _require(self, end: str) -> None:
        if end in self.closed or end in self.dead or end in self.notified:
            raise BrokenWire

    def post(self, end: str, message: Message, content: Content | None = None) -> None:
        """Send a message from the given end."""
        self._require(end)
        if end == WORKER and (self.clogged or self.queued):
            self.queued.append(message)
        else:
            self._fly(WORKER if end == SENDER else SENDER, message, content)

    def _fly(self, to: str, message: Message, content: Content | None) -> None:
        if to not in self.dead:
            self.sent += 1
            self.flying.append(Parcel(self.sent, to, message, content))

    def flush(self) -> bool:
        """Send what the worker's end has queued, and return whether its queue is empty."""
        if self.queued:
            self._require(WORKER)
            while self.queued and not self.clogged:
                self._fly(SENDER, self.queued.pop(0), None)
        return not self.queued

    def take(self, end: str) -> list[Parcel]:
        """Return all messages that have arrived at the given end."""
        found, self.inbox[end] = self.inbox[end], []
        if not found and not any(parcel.to == end for parcel in self.flying):
            self._require(end)
        return found

    def close(self, end: str, bye: Message | None) -> None:
        """Close the given end, after sending a last message if there is one."""
        if end in self.closed:
            return
        if bye is not None and end not in self.notified and end not in self.dead:
            self.post(end, bye)
        self.closed.add(end)
        if end not in self.dead:
            self._gone(end)
            self.inbox[end] = []
            self.flying = [parcel for parcel in self.flying if parcel.to != end]

    def _gone(self, end: str) -> None:
        if not self.loses:
            self.notified.add(WORKER if end == SENDER else SENDER)

    def cut(self) -> None:
        """Break the wire while the processes at both ends live."""
        self.flying = []
        for end in (SENDER, WORKER):
            self._gone(end)

    def crash(self, end: str) -> None:
        """Kill the process at the given end."""
        self.flying = []
        self.inbox[end] = []
        self.dead.add(end)
        self._gone(end)

    def deliver(self, parcel: Parcel) -> None:
        """Let a message in transit arrive."""
        self.flying.remove(parcel)
        self.inbox[parcel.to].append(parcel)

    def drop(self, parcel: Parcel) -> None:
        """Lose a message in transit."""
        self.flying.remove(parcel)

    def duplicate(self, parcel: Parcel) -> None:
        """Duplicate a message in transit."""
        self.sent += 1
        self.flying.append(parcel._replace(number=self.sent))


@dataclass
class WorkerSetup:
    """What a sender knows of one worker and its newest wire."""

    wire: Wire
    link_state: str = "expected"
    #: Versions (0: none): last acked over this wire, last addressed to the worker, and the one that it catches up with.
    acked: int = 0
    due: int = 0
    catching: int = 0
    fence: int = 0

    @property
    def open(self) -> bool:
        return self.link_state in ("expected", "up")


@dataclass
class Sender:
    """The model of a sender."""

    now: Callable[[], float]
    state: str = "uninitialized"
    incarnation: int = 0
    version: int = 0
    for_all: int = 0
    setups: dict[int, WorkerSetup] = field(default_factory=dict)
    #: The outstanding version, the wire over which each worker owes an answer to it, and the outcomes so far.
    outstanding: int | None = None
    owed: dict[int, Wire] = field(default_factory=dict)
    outcomes: dict[int, str] = field(default_factory=dict)
    fences: dict[int, int] = field(default_factory=dict)
    #: The reports of finished updates that no caller has got yet.
    concluded: dict[int, Report] = field(default_factory=dict)
    stale: int = 0
    not_caught_up: dict[int, str] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)
    given_up: dict[int, tuple[int, ...]] = field(default_factory=dict)
    #: The report of an earlier update that no caller has got: it becomes `previous` of the next one.
    before: Report | None = None
    #: The workers that left or did not catch up, from reports of superseded updates. The following reports repeat them,
    #: up to the first that is final.
    withheld_left: tuple[int, ...] = ()
    withheld_not_caught_up: dict[int, str] = field(default_factory=dict)
    contents: dict[int, Content] = field(default_factory=dict)
    #: The weights that were acked last: a Hello carries their layout.
    applied: Content | None = None
    #: Open wires with their workers, in the order of creation.
    open: list[tuple[int, Wire]] = field(default_factory=list)

    # -------------------------------------------------------------------------------------------- calls

    def connect(self, incarnation: int) -> None:
        self._allow("uninitialized")
        self.incarnation, self.state = incarnation, "ready"
        for worker, setup in self.setups.items():
            self._greet(worker, setup.wire, 0)

    def add(self, worker: int, wire: Wire) -> None:
        self._allow("uninitialized", "ready", "pending_async", "awaiting_ack")
        due = self.for_all
        self.open.append((worker, wire))
        if worker in self.setups:
            due = max(due, self.setups[worker].due)
            self._give_up(worker)
        self.setups[worker] = WorkerSetup(wire, due=due, catching=due)
        if self.state != "uninitialized":
            self._greet(worker, wire, due)

    def remove(self, worker: int) -> None:
        self._allow("uninitialized", "ready", "pending_async", "awaiting_ack")
        if worker not in self.setups:
            raise Raised("ConfigurationError")
        self._give_up(worker)
        del self.setups[worker]
        self.given_up.pop(worker, None)

    def send(self, **asked: object) -> Generator[None, None, Report]:
        try:
            return (yield from self._send("awaiting_ack", **asked))
        except Raised as raised:
            # If failures are only reported, so is a send whose targets were all lost, or had refused, before it.
            if (
                asked["raises"]
                or raised.report is None
                or raised.report.version
                or "ABANDONED" in raised.report.kinds()
            ):
                raise
            return raised.report

    def send_async(self, **asked: object) -> Generator[None, None, Report]:
        return (yield from self._send("pending_async", **asked))

    def _send(
        self,
        to: str,
        *,
        targets: list[int] | None,
        content: Content,
        timeout: float | None,
        raises: bool,
        on_pending: str,
        incarnation: Callable[[], int],
    ) -> Generator[None, None, Report]:
        deadline = self._deadline(timeout)
        self.pump()
        must_connect = self.state == "uninitialized" and bool(self.setups)
        handles_pending = self.state == "pending_async" and on_pending != "raise"
        if not must_connect and not handles_pending:
            self._allow("ready")
        self._chosen(targets)
        if must_connect:
            self.connect(incarnation())
        if self.state == "pending_async" and on_pending == "wait":
            left = None if deadline is None else max(0.0, deadline - self.now())
            self.before = yield from self.waited(timeout=left)
            if "TIMED_OUT" in self.before.outcomes.values():
                chosen = self.setups if targets is None else targets
                return self._nothing_sent(dict.fromkeys(chosen, "TIMED_OUT"), {}).judged(raises)
        elif self.state == "pending_async" and on_pending == "supersede":
            given_up = self.abandon()
            for worker, kind in given_up.outcomes.items():
                if kind == "ABANDONED":
                    self.given_up[worker] = (*self.given_up.get(worker, ()), given_up.version or 0)
            self.before = given_up.previous  # no caller gets the report of the superseded update
            self.withheld_left, self.withheld_not_caught_up = given_up.left, given_up.not_caught_up
        self._allow("ready")
        self._dispatch(to, targets, content)
        if to == "pending_async":
            report = self._so_far("PENDING")
            return report.judged(report.previous is not None and bool(report.previous.kinds()))
        return (yield from self._block(self.version, deadline)).judged(raises)

    def _chosen(self, targets: list[int] | None) -> list[int]:
        chosen = list(dict.fromkeys(self.setups if targets is None else targets))
        if not chosen or any(worker not in self.setups for worker in chosen):
            raise Raised("ConfigurationError")
        setups = {worker: self.setups[worker] for worker in chosen}
        if not any(setup.open for setup in setups.values()):
            fences = {worker: setup.fence for worker, setup in setups.items()}
            report = self._nothing_sent({worker: setup.link_state.upper() for worker, setup in setups.items()}, fences)
            if set(report.outcomes.values()) == {"REFUSED"}:
                raise Raised("RefusedError", report)
            raise Raised("WorkerLostError", report, max(fences.values()) or None)
        return chosen

    def _dispatch(self, to: str, targets: list[int] | None, content: Content) -> None:
        chosen = self._chosen(targets)
        self.state = to
        self.version += 1
        self.contents[self.version] = content
        self.outstanding, self.owed, self.outcomes, self.fences = self.version, {}, {}, {}
        if targets is None:
            self.for_all = self.version
        for worker in chosen:
            setup = self.setups[worker]
            setup.due = self.version
            if not setup.open:
                self.outcomes[worker], self.fences[worker] = setup.link_state.upper(), setup.fence
            else:
                self.owed[worker] = setup.wire
        for worker, wire in list(self.owed.items()):
            self._update(worker, wire, self.version)

    def wait(self, *, timeout: float | None, raises: bool) -> Generator[None, None, Report]:
        return (yield from self.waited(timeout=timeout)).judged(raises)

    def waited(self, *, timeout: float | None) -> Generator[None, None, Report]:
        deadline = self._deadline(timeout)
        self.pump()
        self._allow("pending_async")
        self.state = "awaiting_ack"
        self._settle()
        return (yield from self._block(self.version, deadline))

    def _block(self, version: int, deadline: float | None) -> Generator[None, None, Report]:
        while version not in self.concluded and (deadline is None or self.now() < deadline):
            try:
                yield
            except Interrupt:
                if self.state == "awaiting_ack" and self.outstanding == version:
                    self.state = "pending_async"
                elif version in self.concluded:
                    self.before = self._hand_out(version)
                raise
            self.pump()
        if version in self.concluded:
            return self._hand_out(version)
        self.state = "pending_async"
        return self._so_far("TIMED_OUT")

    def poll(self) -> Report | None:
        self._allow("uninitialized", "ready", "pending_async", "awaiting_ack")
        self.pump()
        return None if self.outstanding is None else self._so_far("PENDING")

    def abandon(self) -> Report:
        self.pump()
        self._allow("pending_async")
        self.state = "ready"
        self._conclude("ABANDONED")
        return self._hand_out(self.version)

    def close(self) -> None:
        was, self.state = self.state, "closed"
        if was == "closed":
            return
        if self.outstanding is not None:
            self._conclude("ABANDONED")
        for worker, wire in list(self.open):
            self._close_wire(worker, wire)

    def _allow(self, *states: str) -> None:
        if self.state not in states:
            raise Raised("StateError")

    def _deadline(self, timeout: float | None) -> float | None:
        return None if timeout is None else self.now() + timeout

    # -------------------------------------------------------------------------------------------- reports

    def _so_far(self, owing: str) -> Report:
        outcomes = {**self.outcomes, **dict.fromkeys(self.owed, owing)}
        superseded = {worker: versions for worker, versions in self.given_up.items() if worker in outcomes}
        left, not_caught_up = (*self.withheld_left, *self.left), self.withheld_not_caught_up
        return Report(self.version, outcomes, superseded, not_caught_up, self.fences, self._tell_before(), left)

    def _nothing_sent(self, outcomes: dict[int, str], fences: dict[int, int]) -> Report:
        return Report(None, outcomes, {}, self.withheld_not_caught_up, fences, self._tell_before(), self.withheld_left)

    def _tell_before(self) -> Report | None:
        before, self.before = self.before, None
        return before

    def _conclude(self, owing: str) -> None:
        outcomes = {**self.outcomes, **dict.fromkeys(self.owed, owing)}
        left = tuple(self.left)
        self.concluded[self.version] = Report(self.version, outcomes, {}, self.not_caught_up, self.fences, left=left)
        self.outstanding, self.owed, self.outcomes, self.not_caught_up, self.left = None, {}, {}, {}, []

    def _hand_out(self, version: int) -> Report:
        report = self.concluded.pop(version)
        superseded = {worker: self.given_up[worker] for worker in report.outcomes if worker in self.given_up}
        for worker, kind in report.outcomes.items():
            if kind != "ABANDONED":
                self.given_up.pop(worker, None)
        left, not_caught_up = (*self.withheld_left, *report.left), self.withheld_not_caught_up | report.not_caught_up
        self.withheld_left, self.withheld_not_caught_up = (), {}
        told = {"left": left, "not_caught_up": not_caught_up}
        return report._replace(superseded=superseded, previous=self._tell_before(), **told)

    def _settle(self) -> None:
        if self.state == "awaiting_ack" and not self.owed:
            self.state = "ready"
            self._conclude("")

    # --------------------------------------------------------------------------------------- outgoing

    def _greet(self, worker: int, wire: Wire, due: int) -> None:
        try:
            wire.post(SENDER, Message("Hello", self.incarnation, due), self.applied)
        except BrokenWire:
            self._hear_last_words(worker, wire)
            return
        if due:
            self._update(worker, wire, due)

    def _update(self, worker: int, wire: Wire, version: int) -> None:
        if len(wire.unanswered) >= RUN_AHEAD and not wire.loses:
            wire.waiting = version
            return
        wire.unanswered.add(version)
        try:
            wire.post(SENDER, Message("Update", self.incarnation, version), self.contents[version])
        except BrokenWire:
            self._hear_last_words(worker, wire)

    def _hear_last_words(self, worker: int, wire: Wire) -> None:
        """Lose a worker whose wire broke, but handle first what it sent before.

        That includes what was read before the write that failed.
        """
        with suppress(BrokenWire):
            wire.unheard += wire.take(SENDER)
        while wire.unheard:
            parcel = wire.unheard.pop(0)
            if (worker, wire) in self.open:
                self._hear(worker, wire, parcel.message)
            else:
                self.stale += 1
        if (worker, wire) in self.open:
            self._lose(worker, wire)

    def _give_up(self, worker: int) -> None:
        setup = self.setups[worker]
        if setup.open:
            self._lose(worker, setup.wire)

    def _lose(self, worker: int, wire: Wire, fence: int = 0, link_state: str = "lost") -> None:
        setup = self.setups[worker]
        setup.link_state, setup.fence, setup.catching = link_state, fence, 0
        if self.owed.get(worker) is wire:
            self.fences[worker] = fence
            self._answered(worker, link_state.upper())
        self._close_wire(worker, wire)

    def _close_wire(self, worker: int, wire: Wire) -> None:
        wire.close(SENDER, Message("Bye", self.incarnation))
        self.open.remove((worker, wire))

    def _answered(self, worker: int, kind: str) -> None:
        del self.owed[worker]
        self.outcomes[worker] = kind
        self._settle()

    # --------------------------------------------------------------------------------------- incoming

    def pump(self) -> None:
        """Read and handle all that has arrived."""
        if self.state in ("uninitialized", "closed"):
            return
        for worker, wire in list(self.open):
            if (worker, wire) not in self.open:
                continue
            try:
                wire.unheard += wire.take(SENDER)
            except BrokenWire:
                self._lose(worker, wire)
                continue
            while wire.unheard:
                parcel = wire.unheard.pop(0)
                if (worker, wire) in self.open:
                    self._hear(worker, wire, parcel.message)

    def _hear(self, worker: int, wire: Wire, message: Message) -> None:
        setup = self.setups[worker]
        assert setup.wire is wire, "only current links are open"
        if message.incarnation == 0 and message.kind in ("Bye", "Refusal") and setup.link_state == "expected":
            self.stale += 1
            self._lose(worker, wire)
        elif message.incarnation != self.incarnation:
            self.stale += 1
        elif message.kind == "Bye":
            self.left = [*(other for other in self.left if other != worker), worker]
            self.remove(worker)
        elif message.kind == "Hello":
            self.stale += setup.link_state == "up"
            setup.link_state = "up"
        else:
            self._hear_answer(worker, setup, message)
            if (worker, wire) in self.open:
                self._send_waiting_update(worker, wire, message.version)

    def _hear_answer(self, worker: int, setup: WorkerSetup, message: Message) -> None:
        kind = "APPLIED" if message.kind == "Ack" else "REFUSED"
        if message.kind == "Refusal" and (message.version == 0 or message.fence > self.incarnation):
            newer = message.fence if message.fence > self.incarnation else 0
            self._lose(worker, setup.wire, newer, "refused" if message.why == "REFUSED" and not newer else "lost")
            return
        owing = self.owed.get(worker) is setup.wire and message.version == self.outstanding
        catching_up = message.version == setup.catching and setup.catching != 0
        if not owing and not catching_up:
            self.stale += 1
            return
        setup.link_state = "up"
        if message.version >= setup.catching:
            setup.catching = 0
        if kind == "APPLIED":
            setup.acked = message.version
            self.applied = self.contents[message.version]
        if owing:
            self._answered(worker, kind)
        elif kind == "REFUSED" and message.why not in ("SUPERSEDED", "STALE"):
            self.not_caught_up[worker] = kind

    def _send_waiting_update(self, worker: int, wire: Wire, answered: int) -> None:
        wire.unanswered = {version for version in wire.unanswered if version > answered}
        if wire.waiting and len(wire.unanswered) < RUN_AHEAD:
            waiting, wire.waiting = wire.waiting, 0
            self._update(worker, wire, waiting)


@dataclass
class Receiver:
    """The model of a receiver, and of the worker's weights."""

    state: str = "uninitialized"
    wire: Wire | None = None
    fence: int = 0
    decided: Key | None = None
    answer: Message | None = None
    pending: Key | None = None
    arrived: Content | None = None
    served: Key | None = None
    #: The number of the weights in the worker's model; None: they are not of one version.
    code: int | None = 0
    #: What the model's hook does: it works ("fine"), raises ("refuses"), or raises and cannot be undone ("breaks").
    mood: str = "fine"
    open: list[Wire] = field(default_factory=list)
    #: The error that a caller gets once every link has ended, by how the last one ended; empty: none has.
    ended: str = ""
    #: The last link to which a write failed.
    unwritable: Wire | None = None
    #: A swap failed half way: `serving()` raises an error.
    broken: bool = False

    # -------------------------------------------------------------------------------------------- calls

    def register(self, wire: Wire) -> None:
        if self.state == "closed":
            raise Raised("StateError")
        self.open.append(wire)
        self.ended = ""

    def receive(self, held: bool = False) -> bool:
        """Look at the links once. ``held``: the caller is inside `serving()`, so no version may become live."""
        if held and self.broken:
            raise Raised("WeightSyncError")
        self.pump()
        if self.state == "pending_async" and not held:
            return self._apply()
        if self.state == "pending_async" and self.arrived is not None and not self.arrived.fits:
            self._refuse()
            return False
        if self.state == "closed" or (not self.open and not self.ended):
            raise Raised("StateError")
        if not self.open:
            raise Raised(self.ended)
        return False

    def apply_by_hand(self, content: Content) -> None:
        if self.state == "closed":
            raise Raised("StateError")
        self.pump()
        if self.pending is not None and content == self.arrived:
            if not self._apply():
                raise Raised("WeightSyncError")
            return
        if not content.fits:
            raise Raised("LayoutError")
        if self.mood == "refuses":
            raise Raised("RuntimeError")
        self.served = None
        if self.mood == "breaks":
            self.code = None
            raise Raised("SwapBroken")
        self.code = content.code
        if self.pending is not None:
            self._refuse()

    def close(self) -> None:
        current = self.wire
        if self.state != "closed":
            self.state, self.wire, self.pending = "closed", None, None
        for wire in list(self.open):
            self._close_wire(wire, Message("Bye", self.fence if wire is current else 0))

    # -------------------------------------------------------------------------------------------- the swap

    def _apply(self) -> bool:
        assert self.arrived is not None
        if not self.arrived.fits or self.mood == "refuses":
            self._refuse()
            return False
        if self.mood == "breaks":
            self.code, self.served, self.broken = None, None, True
            if self.wire is not None:
                self._close_wire(self.wire, self._failed())
            for wire in list(self.open):
                self._close_wire(wire, Message("Bye", 0))
            self.close()
            raise Raised("WeightSyncError")
        assert self.pending is not None
        self.code, self.served, self.decided = self.arrived.code, self.pending, self.pending
        self._decide(Message("Ack", *self.pending))
        return True

    def _refuse(self) -> None:
        assert self.pending is not None
        self.decided = self.pending
        self._decide(Message("Refusal", *self.pending, "REFUSED", self.fence))

    def _decide(self, answer: Message) -> None:
        self.state, self.pending, self.answer = "awaiting_ack", None, answer
        assert self.wire is not None
        self._say(self.wire, answer)
        self._flush()

    # -------------------------------------------------------------------------------------------- links

    def _say(self, wire: Wire, message: Message) -> None:
        try:
            wire.post(WORKER, message)
        except BrokenWire:
            self._handle_write_failure(wire)

    def _handle_write_failure(self, wire: Wire) -> None:
        self.unwritable, unread = wire, self._read_remaining(wire)
        self._take_link_down(wire)
        for message in unread:
            self._note_goodbye(message)

    def _read_remaining(self, wire: Wire) -> list[Message]:
        try:
            return [parcel.message for parcel in wire.take(WORKER)]
        except BrokenWire:
            return []

    def _note_goodbye(self, message: Message) -> None:
        if message.kind == "Bye" and message.incarnation == self.fence:
            self.ended = "SenderClosed"

    def _flush(self) -> None:
        for wire in list(self.open):
            try:
                gone = wire.flush()
            except BrokenWire:
                self._handle_write_failure(wire)
                continue
            if gone and wire is self.wire and self.state == "awaiting_ack":
                self.state = "ready"

    def _take_link_down(self, wire: Wire, failed: bool = True) -> None:
        self.ended = "TransportError" if failed else "SenderClosed"
        ours = self.wire in (wire, None)
        if ours:
            self.state, self.wire, self.pending = "uninitialized", None, None
        self._close_wire(wire, self._failed() if ours and failed else None)

    def _failed(self) -> Message:
        return Message("Refusal", self.fence, 0, "FAILED", self.fence)

    def _close_wire(self, wire: Wire, word: Message | None = None) -> None:
        if wire in self.open:
            self.open.remove(wire)
            wire.close(WORKER, word)

    # --------------------------------------------------------------------------------------- incoming

    def pump(self) -> None:
        """Read and handle all that has arrived, except on the current link while it has an answer to write."""
        if self.state == "closed":
            return
        self._flush()
        for wire in list(self.open):
            if wire not in self.open or (wire is self.wire and self.state == "awaiting_ack"):
                continue
            for parcel in self._read(wire):
                self._hear(wire, parcel)

    def _read(self, wire: Wire) -> Iterator[Parcel]:
        try:
            arrived = wire.take(WORKER)
        except BrokenWire:
            self._take_link_down(wire)
            return
        for parcel in arrived:
            if wire in self.open:
                yield parcel
            elif wire is self.unwritable:
                self._note_goodbye(parcel.message)

    def _hear(self, wire: Wire, parcel: Parcel) -> None:
        message = parcel.message
        if message.kind == "Hello":
            self._greeted(wire, message.incarnation, parcel.content)
        elif message.kind == "Update":
            self._offered(wire, (message.incarnation, message.version), parcel.content)
        elif message.kind == "Bye" and (message.incarnation == self.fence or wire is not self.wire):
            self._take_link_down(wire, failed=False)

    def _greeted(self, wire: Wire, incarnation: int, sample: Content | None) -> None:
        old = incarnation < self.fence
        if self.wire is not None and incarnation == self.fence and wire.number < self.wire.number:
            self._close_wire(wire)  # its sender has replaced it by the current one
        elif old or (sample is not None and not sample.fits):
            self.ended = "TransportError"
            self._say(wire, Message("Refusal", incarnation, 0, "FENCED" if old else "REFUSED", self.fence))
            if wire is not self.wire:
                self._close_wire(wire)
        elif wire is not self.wire or incarnation != self.fence:
            before, self.fence = self.fence, incarnation
            if self.wire is wire and self.pending is not None:
                self._say(wire, Message("Refusal", *self.pending, "STALE", incarnation))
            elif self.wire is not None and self.wire is not wire:
                fenced = Message("Refusal", before, 0, "FENCED", incarnation) if before < incarnation else None
                self._close_wire(self.wire, fenced)
            self.state, self.wire, self.pending = "ready", wire, None
            if self.served is None and self.answer is not None and self.answer.kind == "Ack":
                self.decided = self.answer = None  # the model no longer holds that version: it is applied again
            serves = self.served[1] if self.served and self.served[0] == incarnation else 0
            self._say(wire, Message("Hello", incarnation, serves, "", incarnation))

    def _offered(self, wire: Wire, key: Key, content: Content | None) -> None:
        if key[0] < self.fence or (
            key not in (self.decided, self.pending) and key < max(self.decided or (0, 0), self.pending or (0, 0))
        ):
            self._say(wire, Message("Refusal", *key, "STALE", self.fence))
        elif key == self.decided:
            assert self.answer is not None
            self._say(wire, self.answer)
        elif key != self.pending:
            overtaken, self.pending, self.arrived = self.pending, key, content
            self.state = "pending_async"
            if overtaken is not None:
                self._say(wire, Message("Refusal", *overtaken, "SUPERSEDED", self.fence))
