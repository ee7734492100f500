"""The members of a group: each is one worker through all its lives.

Nothing here waits but `wait`, and for a moment what gives a worker up.
"""

from __future__ import annotations

import enum
import logging
import select
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Protocol

from weightsync.clock import Deadline, Stopwatch, Timeout
from weightsync.engine.driver import Shield
from weightsync.engine.events import EventKind, SyncEvent, SyncRole
from weightsync.errors import GIVE_RESTARTS, WorkerFailedError
from weightsync.group.channel import Failed, Finished, Frame, Held, Put, TrainerEnd
from weightsync.group.pickling import unpickled
from weightsync.group.stack_dump import StackDump
from weightsync.protocol.sender import Entry
from weightsync.transports.base import SLICE, Link

logger = logging.getLogger("weightsync")

#: Seconds that a worker has to end after its last word.
_GRACE: Final = 10.0
#: The longest delay before a restart, in seconds.
_LONGEST_DELAY: Final = 60.0
#: How often the delay is doubled at most, so that it stays a number.
_DOUBLINGS: Final = 64
#: Seconds between two looks at a link that has no descriptor to wait for.
_LOOK_SECONDS: Final = 0.1
#: Why a worker that fails after `Member.stop` is not restarted.
_STOPPED: Final = "It is not restarted, since the group was stopped."
#: The advice after an error whose message says what to correct.
_LASTING: Final = "A restarted worker would fail in the same way: correct the argument first."


class MemberState(enum.Enum):
    """What a member does, or how it ended."""

    #: Its process was started, and its function has not begun.
    STARTING = "starting"
    #: Its function runs, or its process has just died.
    RUNNING = "running"
    #: Its function waits for a newer version, as ``max_staleness`` wants.
    HELD = "waiting for a newer version"
    #: It failed, and is started again after a delay.
    WAITING = "waiting to be restarted"
    #: Its function has returned.
    FINISHED = "finished"
    #: It failed, and is not started again.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Rules:
    """What a group knows about its workers.

    Attributes:
        capacity: how many results of one worker may be in flight.
        max_restarts: how often each worker may be restarted.
        restart_delay: seconds before its first restart; doubled each time.
        deadline: seconds that a worker may take for one result; None: no limit.
        remedy: what to do about a worker that failed and was never restarted.
    """

    capacity: int
    max_restarts: int
    restart_delay: float
    deadline: float | None
    remedy: str = GIVE_RESTARTS


class Process(Protocol):
    """What runs one life of a worker: a process, an actor, or a rank of a running world."""

    #: What is done to one that is given up, for messages.
    fate: str

    @property
    def handle(self) -> Any:
        """What the user knows the worker by: a process, an actor or a rank."""

    def fileno(self) -> int:
        """Readable once it is dead."""

    @property
    def dead(self) -> bool:
        """Whether it is dead. Never waits."""

    def how_it_ended(self, state: MemberState) -> str:
        """How it ended, in words, once it is dead.

        Args:
            state: what its member did until then.
        """

    def stack_dump(self) -> StackDump:
        """Its main thread's stack, as far as it can be had in a moment."""

    def join(self, deadline: Deadline) -> None:
        """Wait until it is dead."""

    def kill(self) -> None:
        """Kill it, and what it has started, as far as that can be done. It may already be dead."""

    def close(self) -> None:
        """Kill what is left, and release all resources."""


class Running(NamedTuple):
    """One life of a worker."""

    process: Process
    channel: TrainerEnd
    #: Announces a version to it.
    announce: Callable[[int], None]


class UntakenResult(NamedTuple):
    """A result that the trainer has not taken yet."""

    member: Member
    life: Running | None
    put: Put


class Member:
    """One worker.

    Args:
        index: its id.
        rules: the group's.
        start: starts a life of it.
    """

    def __init__(self, index: int, rules: Rules, start: Callable[[int, int], Running]) -> None:
        self.index = index
        self.restarts = 0
        self._rules = rules
        self._start = start
        self.state = MemberState.WAITING
        #: Its process and channel; None if it has none now.
        self.running: Running | None = None
        #: How many of its results wait for the trainer.
        self.untaken = 0
        self._last_word: Failed | Finished | None = None
        self._reason = ""
        #: Its stack when it was given up.
        self._dump = StackDump()
        self._started = Stopwatch()
        #: When it is given up because its link is lost; None if the link is up.
        self._unlinked: Deadline | None = None
        #: When it is restarted; or by when it must start, put its next result, or be dead after its last word.
        self.due = Deadline(0.0)

    def start(self) -> None:
        """Begin a life."""
        with Shield(lambda: None):  # what a handler raises leaves no process running
            self.running = self._start(self.index, self.restarts)
            self.state, self.untaken, self._last_word, self._reason = MemberState.STARTING, 0, None, ""
            self._started, self._unlinked, self._dump = Stopwatch(), None, StackDump()
            self.due = Deadline(Timeout.START)

    def read(self) -> list[UntakenResult]:
        """Read what it has said, and return its new results."""
        if self.running is None:
            return []
        before = self.running.channel.nbytes
        frames = self.running.channel.read()
        if self.running.channel.nbytes > before and self.state is MemberState.RUNNING:
            self.begin_to_wait()  # a large result takes as long as the trainer does to read it
        for frame in frames:
            self._take_frame(frame)
        results = [UntakenResult(self, self.running, frame) for frame in frames if isinstance(frame, Put)]
        self.untaken += len(results)
        return results

    def _take_frame(self, frame: Frame) -> None:
        if isinstance(frame, Failed | Finished):
            self._last_word = frame
            self.due = Deadline(_GRACE)
            self.state = MemberState.FINISHED if isinstance(frame, Finished) else self.state
        elif self._last_word is None:  # else a thread of the worker has put once more
            self.state = MemberState.HELD if isinstance(frame, Held) else MemberState.RUNNING
            self.begin_to_wait()

    def begin_to_wait(self) -> None:
        """Count the deadline for its next result from now."""
        if self._last_word is None:
            self.due = Deadline(self._rules.deadline)

    def take(self, waiting: UntakenResult) -> None:
        """One of its results was taken: it may put another one."""
        if waiting.life is not None and waiting.life is self.running:
            self.untaken -= 1
            waiting.life.channel.make_room()
            self.begin_to_wait()

    def do_what_is_due(self) -> WorkerFailedError | None:
        """Do what is due by now. Returns the error of a life that could not be begun."""
        if self.running is None:
            return self._restart() if self.state is MemberState.WAITING and self.due.passed else None
        if self._waits_for_trainer:
            self.begin_to_wait()
        elif self.due.passed:
            self.give_up(self._overdue_reason())
        return None

    @property
    def _waits_for_trainer(self) -> bool:
        """Whether it waits for the trainer, so that its deadline does not count now."""
        full = self.state is MemberState.RUNNING and self.untaken >= self._rules.capacity
        return full or self.state is MemberState.HELD

    def _restart(self) -> WorkerFailedError | None:
        self.restarts += 1
        try:
            self.start()
        except Exception as error:  # noqa: BLE001 - whatever the system or Ray lacks now, it may have later
            return self._failure(f"it could not be started again ({type(error).__name__}: {error})", "", None)
        return None

    def stop(self) -> None:
        """Ask it to return; it is not restarted any more."""
        self._rules = replace(self._rules, max_restarts=0, remedy=_STOPPED)
        if self.running is not None:
            self.running.channel.stop()
        elif self.state is MemberState.WAITING:
            self.state = MemberState.FINISHED

    def _overdue_reason(self) -> str:
        if self._last_word is not None:
            return f"it did not end within {_GRACE:g} s of its last message"
        if self.state is MemberState.STARTING:
            return "it did not start in time"
        return f"it gave no result for {self._rules.deadline} s"

    def give_up(self, reason: str) -> None:
        """Kill it. It fails for this reason, unless it gave one itself."""
        if self.running is not None:
            if not self._reason:
                self._dump = self.running.process.stack_dump()
                self._reason = f"{reason}, and was {self.running.process.fate}{self._dump.phrase}"
            self.due = Deadline(_GRACE)
            self.running.process.kill()

    def lost_link(self, seconds: float) -> None:
        """Its link is lost. It is about to die, or useless: it has this long to die before it is killed."""
        if self._unlinked is None:
            self._unlinked = Deadline(seconds)
        elif self._unlinked.passed and not self._reason:
            self.give_up("its link is lost")

    @property
    def dead(self) -> bool:
        """Whether its process is dead, which is not yet judged."""
        return self.running is not None and self.running.process.dead

    def died(self, served: int | None = None) -> WorkerFailedError | None:
        """Its process is dead, and its last words were read. Returns the error of that life, if it failed.

        Args:
            served: the version that it last served, as far as the sender knows; None: none, or unknown.
        """
        word, reason = self._last_word, self._reason
        if self.running is not None and not reason:
            reason = self.running.process.how_it_ended(self.state)
        self.release()
        if isinstance(word, Finished):
            return None
        trace, version = (self._dump.stack, served) if word is None else (word.remote_traceback, word.version)
        return self._failure(reason if word is None else word.reason, trace, version)

    def _failure(self, reason: str, trace: str, version: int | None) -> WorkerFailedError:
        error = WorkerFailedError(self.index, reason, trace, version, self.restarts, next_step=self._restart_or_fail())
        if self.state is MemberState.WAITING:
            logger.warning("%s", error)
        return error

    def _restart_or_fail(self) -> str:
        """Wait for a restart, or fail for good. Returns what follows, in words."""
        max_restarts = self._rules.max_restarts
        if self.restarts < max_restarts:
            delay = min(self._rules.restart_delay * 2 ** min(self.restarts, _DOUBLINGS), _LONGEST_DELAY)
            self.state, self.due = MemberState.WAITING, Deadline(delay)
            return f"It restarts in {delay:g} s (restart {self.restarts + 1} of at most {max_restarts})."
        self.state = MemberState.FAILED
        if max_restarts:
            return f"It has been restarted as often as max_restarts={max_restarts} allows."
        lasting, remedy = isinstance(self._last_word, Failed) and self._last_word.lasting, self._rules.remedy
        return _LASTING if lasting and remedy == GIVE_RESTARTS else remedy

    def release(self) -> None:
        """Let go of its process, which is killed if it lives, and of its channel."""
        if self.running is not None:
            self.running.channel.close()
            self.running.process.close()
            self.running = None

    @property
    def state_in_words(self) -> str:
        """What it does now, or how it ended."""
        if self.state is MemberState.STARTING:
            return f"has been starting for {self._started.seconds:.1f} s"
        return f"is {self.state.value}"

    @property
    def over(self) -> bool:
        """Whether nothing more will come of it."""
        return self.state is MemberState.FINISHED or self.state is MemberState.FAILED


class Feed(Protocol):
    """What sends the workers their weights."""

    @property
    def workers(self) -> Mapping[int, Entry]:
        """What is known of each worker."""

    def transports(self) -> Mapping[int, Link]:
        """The links that are open, by worker."""

    def progress(self) -> None:
        """Read what has arrived, and write what can be written. Never waits."""


class Members:
    """All members.

    Args:
        members: the members by index.
        feed: what sends them their weights; None: nothing does yet.
    """

    def __init__(self, members: Mapping[int, Member], feed: Callable[[], Feed | None]) -> None:
        self.by_index = dict(members)
        self._feed = feed
        #: Results that have arrived and were not taken.
        self.results: deque[UntakenResult] = deque()
        #: Each life that failed, in the order in which they did.
        self.failures: list[WorkerFailedError] = []
        #: Failures of workers that are not restarted, of which the trainer does not know yet.
        self.unreported: deque[WorkerFailedError] = deque()

    def announce(self, version: int) -> None:
        """Announce a version to all that run."""
        for member in self.by_index.values():
            if member.running is not None:
                member.running.announce(version)

    def pump(self) -> None:
        """Advance the send, read what has arrived, detect dead workers, and restart those that are due."""
        self._progress_sender()
        for member in self.by_index.values():
            with Shield(lambda: None):  # what a handler raises loses no result and no failure
                dead = member.dead  # looked up first: what a dead worker has said is then read to its end
                self.results += member.read()
                error = member.died(self._served(member.index)) if dead else member.do_what_is_due()
                self._record_failure(member, error)

    def take_first(self) -> tuple[UntakenResult, Any] | None:
        """Take the first result, and unpickle it; None: there is none. An interrupt meanwhile leaves it there."""
        while self.results:
            first = self.results[0]
            try:
                value = unpickled(first.put.pickled)
            except Exception:
                self._remove_if_first(first.put)  # what cannot be unpickled is not tried again
                raise
            if self._remove_if_first(first.put):
                return first, value
        return None

    def _remove_if_first(self, put: Put) -> bool:
        """Whether it was still the first: a signal handler may have taken it meanwhile, here or as it was unpickled."""
        with Shield(lambda: None):  # what a handler raises leaves the result there, for which there is room already
            if self._is_first(put):
                self.results[0].member.take(self.results[0])
                self.results[0] = self.results[0]._replace(life=None)
        return self._is_first(put) and bool(self.results.popleft())

    def _is_first(self, put: Put) -> bool:
        return self.results[0].put is put if self.results else False  # no call, after which a handler might run

    def starting(self) -> list[Running]:
        """The lives whose functions have not begun, by all that has arrived."""
        for member in self.by_index.values():
            self.results += member.read()
        members = [member for member in self.by_index.values() if member.state is MemberState.STARTING]
        return [member.running for member in members if member.running is not None]

    def log_hung(self, timeout: float | Timeout | None) -> None:
        """Log which workers have not returned in the time that `close` gave them, and what they were doing."""
        for index, member in self.by_index.items():
            life = member.running
            if timeout == 0 or life is None or life.process.dead or member.state is MemberState.STARTING:
                continue
            dump = life.process.stack_dump()
            logger.warning(
                "worker %d had not returned %s s after close(), and was %s%s%s",
                *(index, timeout, life.process.fate, dump.phrase, dump.stack and f"\n{dump.stack}"),
            )

    def _served(self, index: int) -> int | None:
        entry = None if (feed := self._feed()) is None else feed.workers.get(index)
        return None if entry is None else entry.served or None

    def _record_failure(self, member: Member, error: WorkerFailedError | None) -> None:
        if error is not None:
            self.failures.append(error)
            if member.state is MemberState.FAILED:
                self.unreported.append(error)

    def given_up(self, linked: Collection[int]) -> set[int]:
        """Those that have failed for good, and are not among the linked ones any more."""
        return {i for i, member in self.by_index.items() if member.state is MemberState.FAILED and i not in linked}

    def failure(self, index: int) -> WorkerFailedError:
        """The last failure of a member that has failed."""
        return next(error for error in reversed(self.failures) if error.worker == index)

    def restarted(self, index: int, model_id: str, incarnation: int) -> SyncEvent:
        """The event that a member that has failed is started again; `incarnation` is the sender's."""
        return SyncEvent(
            kind=EventKind.RESTARTED,
            role=SyncRole.TRAINER,
            model_id=model_id,
            incarnation=incarnation,
            worker=index,
            reason=self.failure(index).reason,
        )

    def require_one(self) -> None:
        """Raise the last failure, also if it was raised before, if all members have failed for good."""
        if all(member.state is MemberState.FAILED for member in self.by_index.values()):
            raise self.failures[-1].with_traceback(None)  # else each time adds its own to those before

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return all(member.over for member in self.by_index.values())

    def _progress_sender(self) -> None:
        """Let the sender continue: a version may wait in it for answers, and the workers for that version."""
        feed = self._feed()
        if feed is None:
            return
        wanted, all_tell = _descriptors(feed.transports().values())
        if not all_tell or _poller(wanted).poll(0):
            feed.progress()

    def wait(self, deadline: Deadline) -> None:
        """Sleep until something arrives, here or at the sender, a process dies, or a deadline passes."""
        if any(member.dead for member in self.by_index.values()):
            return
        feed = self._feed()
        wanted, all_tell = _descriptors([] if feed is None else feed.transports().values())
        naps = [SLICE, None if all_tell else _LOOK_SECONDS, deadline.nap]
        poller = _poller(wanted)
        for member in self.by_index.values():
            if member.running is not None:
                poller.register(member.running.process, select.POLLIN)
                if not member.running.channel.ended:
                    poller.register(member.running.channel, member.running.channel.events)
            if not member.over or member.running is not None:
                naps.append(member.due.nap)
        poller.poll(min(nap for nap in naps if nap is not None) * 1000 + 1)


def _descriptors(links: Iterable[Link]) -> tuple[dict[int, int], bool]:
    """What to poll links for, and whether each of them has reported."""
    events_of_fd: dict[int, int] = {}
    all_have_descriptors = True
    for link in links:
        try:
            readable, writable = link.waitables(), link.wants_write()
        except Exception:  # noqa: BLE001 - an adapter's fault: the sender finds it too, and gives this link up
            readable, writable = [], None
        all_have_descriptors = all_have_descriptors and bool(readable)
        for fd in readable:
            events_of_fd[fd] = events_of_fd.get(fd, 0) | select.POLLIN
        if writable is not None:
            events_of_fd[writable] = events_of_fd.get(writable, 0) | select.POLLOUT
    return events_of_fd, all_have_descriptors


def _poller(events_of_fd: Mapping[int, int]) -> select.poll:
    poller = select.poll()
    for fd, events in events_of_fd.items():
        poller.register(fd, events)
    return poller
