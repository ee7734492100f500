"""One member of a group through its lives, on a fake clock: deadlines, restarts, and their delays."""

from __future__ import annotations

import pickle
import signal
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.clock import Deadline, Timeout, seconds, use_clock
from weightsync.engine.driver import Shield
from weightsync.errors import GIVE_RESTARTS, ConfigurationError, WorkerFailedError
from weightsync.group import members as members_module
from weightsync.group.advice import too_late
from weightsync.group.channel import Failed, Finished, Frame, Held, Put, Released, Started
from weightsync.group.members import Member, Members, MemberState, Rules, Running, UntakenResult
from weightsync.group.ranks import RankLauncher
from weightsync.group.stack_dump import StackDump
from weightsync.testing import FakeClock


class Process:
    """A process that lives until it is killed."""

    fate = "killed"

    def __init__(self) -> None:
        self.dead = False

    def kill(self) -> None:
        self.dead = True

    def close(self) -> None:
        self.kill()

    def stack_dump(self) -> StackDump:
        return StackDump("it was at line 3", "in act")

    def how_it_ended(self, state: MemberState) -> str:
        return "its process was ended by SIGSEGV"


class Channel:
    """A channel that returns what a test has set, and counts what it is told."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.nbytes = self.arriving = 0
        self.room = 0
        self.stops = 0

    def read(self) -> list[Frame]:
        frames, self.frames = self.frames, []
        self.nbytes, self.arriving = self.nbytes + self.arriving, 0
        return frames

    def make_room(self) -> None:
        self.room += 1

    def stop(self) -> None:
        self.stops += 1

    def close(self) -> None:
        pass


class Lives:
    """Starts lives, and keeps their processes and channels."""

    def __init__(self) -> None:
        self.processes: list[Process] = []
        self.channels: list[Channel] = []
        #: The error of each attempt to begin a life, if any.
        self.refusal: Exception | None = None

    def begin(self, index: int, restarts: int) -> Running:
        if self.refusal is not None:
            raise self.refusal
        self.processes.append(Process())
        self.channels.append(Channel())
        made: Any = (self.processes[-1], self.channels[-1], lambda version: None)
        return Running(*made)


class Link:
    """A link with some descriptors or none, or one that raises when it is asked for them."""

    def __init__(self, *fds: int, fails: bool = False) -> None:
        self.fds = fds
        self.fails = fails

    def waitables(self) -> list[int]:
        if self.fails:
            raise RuntimeError("this adapter is broken")
        return list(self.fds)

    def wants_write(self) -> int | None:
        return None


class Poller:
    """A poller that records its timeouts, and returns at once."""

    def __init__(self, naps: list[float]) -> None:
        self._naps = naps

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        self._naps.append(milliseconds)
        return []


class Feed:
    """A sender with one link, which counts calls of `progress`."""

    def __init__(self, link: Link) -> None:
        self.link: Any = link
        self.workers: dict[int, Any] = {}
        self.drives = 0

    def transports(self) -> dict[int, Any]:
        return {0: self.link}

    def progress(self) -> None:
        self.drives += 1


@pytest.fixture
def clock() -> Iterator[FakeClock]:
    with use_clock(clock := FakeClock()):
        yield clock


@pytest.fixture
def lives() -> Lives:
    return Lives()


def started(lives: Lives, **rules: Any) -> Member:
    given = {"capacity": 1, "max_restarts": 3, "restart_delay": 1.0, "deadline": 10.0, **rules}
    member = Member(0, Rules(**given), lives.begin)
    member.start()
    return member


def says(member: Member, lives: Lives, *frames: Frame) -> None:
    lives.channels[-1].frames += frames
    member.read()


def members_with_link(link: Link) -> tuple[Feed, Members]:
    feed = Feed(link)
    return feed, Members({}, lambda: feed)


def test_data_on_a_link_ends_a_wait_and_drives_the_sender() -> None:
    near, far = socket.socketpair()
    with near, far:
        feed, members = members_with_link(Link(near.fileno()))
        members.pump()
        assert feed.drives == 0
        far.send(b"an answer")
        members.wait(Deadline(None))
        members.pump()
        assert feed.drives == 1


def test_a_worker_that_has_served_nothing_failed_without_a_version() -> None:
    feed, members = members_with_link(Link())
    feed.workers = {0: SimpleNamespace(served=0), 1: SimpleNamespace(served=3)}
    assert [members._served(index) for index in range(3)] == [None, 3, None]


@pytest.mark.parametrize("link", [Link(), Link(fails=True)])
def test_a_link_without_a_descriptor_is_polled_periodically(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    feed, members = members_with_link(link)
    naps: list[float] = []
    monkeypatch.setattr("select.poll", lambda: Poller(naps))
    for _ in range(2):
        members.wait(Deadline(None))
        members.pump()
    assert feed.drives == 2
    assert naps == [101.0] * 2  # milliseconds


def test_a_wait_ends_when_a_restart_is_due(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    member = started(lives, restart_delay=0.25)
    lives.processes[-1].kill()
    assert member.died() is not None
    naps: list[float] = []
    monkeypatch.setattr("select.poll", lambda: Poller(naps))
    Members({0: member}, lambda: None).wait(Deadline(None))
    assert 1.0 <= naps[0] <= 251.0  # milliseconds


def test_a_worker_that_puts_no_result_within_its_deadline_is_killed(clock: FakeClock, lives: Lives) -> None:
    member = started(lives, capacity=2)
    says(member, lives, Started())
    clock.advance(9.0)
    says(member, lives, Put((1,), b""))
    clock.advance(9.0)
    member.do_what_is_due()
    assert not member.dead
    clock.advance(2.0)
    member.do_what_is_due()
    assert member.dead
    error = member.died()
    assert error is not None
    assert error.reason == "it gave no result for 10.0 s, and was killed; it was at line 3"
    assert error.remote_traceback == "in act"


def test_time_that_a_worker_waits_for_room_does_not_count_toward_its_deadline(clock: FakeClock, lives: Lives) -> None:
    member = started(lives, capacity=1)
    says(member, lives, Started(), Put((1,), b""))  # the channel is full now
    for _ in range(5):
        clock.advance(11.0)
        member.do_what_is_due()
    assert not member.dead


def test_the_deadline_of_a_worker_that_waited_for_room_counts_from_when_its_result_is_taken(
    clock: FakeClock, lives: Lives
) -> None:
    member = started(lives)
    lives.channels[-1].frames += [Started(), Put((1,), b"")]
    (result,) = member.read()
    clock.advance(11.0)
    member.take(result)
    member.do_what_is_due()
    assert not member.dead


def test_time_that_a_worker_waits_for_a_newer_version_does_not_count_toward_its_deadline(
    clock: FakeClock, lives: Lives
) -> None:
    member = started(lives)
    says(member, lives, Started(), Held())
    for _ in range(5):
        clock.advance(11.0)
        member.do_what_is_due()
    assert not member.dead
    assert member.state_in_words == "is waiting for a newer version"

    says(member, lives, Released())
    clock.advance(11.0)
    member.do_what_is_due()
    assert member.dead


def test_time_that_the_trainer_reads_a_large_result_does_not_count_toward_the_deadline(
    clock: FakeClock, lives: Lives
) -> None:
    member = started(lives)
    says(member, lives, Started())
    for _ in range(3):
        clock.advance(11.0)  # the trainer trains, and bytes that do not fit into the socket wait
        lives.channels[-1].arriving = 1
        says(member, lives)
        member.do_what_is_due()
        assert not member.dead
    clock.advance(11.0)
    says(member, lives)
    member.do_what_is_due()
    assert member.dead


def test_a_result_put_after_the_function_returned_counts_and_the_worker_has_finished(
    clock: FakeClock, lives: Lives
) -> None:
    member = started(lives)
    lives.channels[-1].frames += [Started(), Finished(), Put((1,), b"by a thread")]
    assert len(member.read()) == 1
    lives.processes[-1].kill()
    member.died()
    assert member.over


def test_a_worker_that_does_not_start_in_time_is_killed_even_without_a_deadline(clock: FakeClock, lives: Lives) -> None:
    member = started(lives, deadline=None)
    clock.advance((seconds(Timeout.START) or 0) + 1)
    member.do_what_is_due()
    error = member.died()
    assert error is not None
    assert "did not start in time" in error.reason


def test_a_worker_whose_process_does_not_end_after_its_function_returned_is_killed(
    clock: FakeClock, lives: Lives
) -> None:
    member = started(lives)
    says(member, lives, Started(), Finished())
    assert member.over
    clock.advance(11.0)
    member.do_what_is_due()
    assert member.dead
    assert member.died() is None  # the worker's function had returned, so this is no failure
    assert member.state is MemberState.FINISHED


def test_restart_delays_double_and_restarts_end_at_max_restarts(clock: FakeClock, lives: Lives) -> None:
    member = started(lives, max_restarts=2)
    for delay in (1.0, 2.0):
        says(member, lives, Failed("ValueError: a pole fell", "Traceback", 3))
        lives.processes[-1].kill()
        restarted = member.died()
        assert restarted is not None
        assert str(restarted).endswith(f"It restarts in {delay:g} s (restart {restarted.restarts + 1} of at most 2).")
        clock.advance(delay - 0.5)
        member.do_what_is_due()
        assert member.state is MemberState.WAITING
        clock.advance(0.5)
        member.do_what_is_due()
        assert member.state is MemberState.STARTING
    lives.processes[-1].kill()
    error = member.died()
    assert error is not None
    assert (member.state, error.restarts, error.reason) == (MemberState.FAILED, 2, "its process was ended by SIGSEGV")
    assert str(error).startswith("worker 0 failed after 2 restarts: its process was ended")
    assert str(error).endswith("It has been restarted as often as max_restarts=2 allows.")


def test_the_failure_for_a_configuration_error_in_a_worker_does_not_advise_restarts(lives: Lives) -> None:
    said = []
    for error in (ValueError("a pole fell"), ConfigurationError("make_model= returned None")):
        member = started(lives, max_restarts=0)
        says(member, lives, Failed.by(error, None))
        lives.processes[-1].kill()
        said.append(str(member.died()))
    assert GIVE_RESTARTS in said[0]
    assert "max_restarts" not in said[1]
    assert said[1].endswith("A restarted worker would fail in the same way: correct the argument first.")


def test_a_failed_restart_counts_toward_max_restarts(clock: FakeClock, lives: Lives) -> None:
    member = started(lives, max_restarts=2)
    lives.processes[-1].kill()
    member.died()
    lives.refusal = OSError(24, "Too many open files")
    errors = []
    for _ in range(4):
        clock.advance(60.0)
        errors.append(member.do_what_is_due())
    first, last, *others = errors
    assert (others, member.state, member.restarts) == ([None, None], MemberState.FAILED, 2)
    assert "could not be started again (OSError: [Errno 24] Too many open files)" in str(first)
    assert "It restarts in 2 s" in str(first)
    assert str(last).endswith("It has been restarted as often as max_restarts=2 allows.")


def test_the_restart_delay_is_bounded_after_many_restarts(clock: FakeClock, lives: Lives) -> None:
    for delay, longest in ((1.0, 60.0), (0.0, 0.0)):
        member = started(lives, max_restarts=10_000, restart_delay=delay)
        member.restarts = 5_000
        lives.processes[-1].kill()
        assert f"It restarts in {longest:g} s" in str(member.died())


def test_the_failure_of_a_worker_without_restarts_gives_the_launchers_remedy(clock: FakeClock) -> None:
    for lives, remedy in ((Lives(), GIVE_RESTARTS), (Lives(), RankLauncher.remedy)):
        member = started(lives, max_restarts=0, remedy=remedy)
        lives.processes[-1].kill()
        error = str(member.died())
        assert error.startswith("worker 0 failed: its process was ended by SIGSEGV")
        assert error.endswith(f"Any other workers keep running. {remedy}")
    assert remedy.startswith("The group cannot restart a rank")


def test_a_result_of_a_former_life_makes_no_room_in_the_new_channel(clock: FakeClock, lives: Lives) -> None:
    member = started(lives, restart_delay=0.0)
    lives.channels[0].frames.append(Put((1,), b""))
    (former,) = member.read()
    lives.processes[0].kill()
    member.died()
    member.do_what_is_due()
    lives.channels[1].frames.append(Put((2,), b""))
    (latter,) = member.read()

    member.take(former)
    assert (lives.channels[1].room, member.untaken) == (0, 1)
    member.take(latter)
    assert (lives.channels[1].room, member.untaken) == (1, 0)


def test_a_result_that_was_counted_as_taken_makes_no_room_after_its_worker_has_died(lives: Lives) -> None:
    member = started(lives)
    lives.processes[-1].kill()
    member.died()
    member.take(UntakenResult(member, None, Put((1,), b"")))
    assert (member.untaken, lives.channels[-1].room) == (0, 0)


def test_a_stopped_worker_is_told_to_stop_once_and_not_restarted(clock: FakeClock, lives: Lives) -> None:
    member = started(lives)
    member.stop()
    lives.processes[0].kill()
    assert str(member.died()).endswith("It is not restarted, since the group was stopped.")
    assert (lives.channels[0].stops, member.state) == (1, MemberState.FAILED)

    waiting = started(other := Lives(), restart_delay=5.0)
    other.processes[0].kill()
    waiting.died()
    waiting.stop()
    assert waiting.state is MemberState.FINISHED


def test_the_timeout_for_a_worker_that_waits_for_a_newer_version_advises_wait_async(lives: Lives) -> None:
    """Such a worker may have refused the newest version, of which results() said nothing."""
    member = started(lives)
    lives.channels[0].frames = [Started()]
    member.read()
    assert "wait_async()" not in too_late({0: member})
    lives.channels[0].frames = [Held()]
    member.read()
    assert "(worker 0 is waiting for a newer version)" in too_late({0: member})
    assert "wait_async() says why" in too_late({0: member})


class ResultError(Exception):
    """Raised in the trainer by the class of a result."""


def raise_error(error: type[BaseException]) -> None:
    raise error


class RaisesWhenUnpickled:
    """A result whose unpickling raises an error."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return raise_error, (self.error,)


def test_an_interrupt_while_unpickling_keeps_the_result_and_an_unpickling_error_drops_it(lives: Lives) -> None:
    members = Members({0: (member := started(lives))}, lambda: None)
    (channel,) = lives.channels
    channel.frames = [Put((1,), pickle.dumps(RaisesWhenUnpickled(error))) for error in (KeyboardInterrupt, ResultError)]
    members.results += member.read()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            members.take_first()
        assert (len(members.results), channel.room) == (2, 0)
    members.results.rotate()
    with pytest.raises(ResultError):
        members.take_first()
    assert (len(members.results), channel.room) == (1, 1)


#: Functions that are called while a result is unpickled, as a signal handler may be.
HANDLER: list[Callable[[], Any]] = []


def run_handlers(value: Any) -> Any:
    while HANDLER:
        HANDLER.pop()()
    return value


class RunsHandlerWhenUnpickled:
    """A result during whose unpickling a signal handler runs."""

    def __reduce__(self) -> Any:
        return run_handlers, ("first",)


@pytest.mark.parametrize("more", [["second", "third"], ["second"], []])
@pytest.mark.parametrize("when", ["unpickled", "about to be taken off", "taken off"])
def test_a_signal_handler_that_takes_results_causes_neither_duplicates_nor_losses(
    when: str, more: list[str], lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take() -> None:
        found = members.take_first()
        taken.append(found and found[1])

    taken: list[Any] = []
    members = Members({0: (member := started(lives))}, lambda: None)
    (channel,) = lives.channels
    first = RunsHandlerWhenUnpickled() if when == "unpickled" else "first"
    channel.frames = [Put((1,), pickle.dumps(each)) for each in (first, *more)]
    members.results += member.read()
    before = signal.signal(signal.SIGUSR1, lambda *_: take())
    if when == "unpickled":
        HANDLER.append(take)
    elif when == "about to be taken off":
        shield = members_module.Shield

        def late(wake: Callable[[], None]) -> Shield:
            monkeypatch.setattr(members_module, "Shield", shield)
            signal.raise_signal(signal.SIGUSR1)
            return shield(wake)

        monkeypatch.setattr(members_module, "Shield", late)
    else:
        make_room = channel.make_room

        def struck() -> None:
            monkeypatch.setattr(channel, "make_room", make_room)
            make_room()
            signal.raise_signal(signal.SIGUSR1)

        monkeypatch.setattr(channel, "make_room", struck)
    try:
        while members.results:
            take()
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert [each for each in taken if each] == ["first", *more]
    assert (channel.room, member.untaken, len(members.results)) == (1 + len(more), 0, 0)


def test_g10_a_process_whose_start_is_interrupted_is_still_ended_by_release(lives: Lives) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def interrupted(index: int, restarts: int) -> Running:
        signal.raise_signal(signal.SIGUSR1)
        return lives.begin(index, restarts)

    member = Member(0, Rules(2, 0, 1.0, None), interrupted)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            member.start()
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert (member.running is None, member.state) == (False, MemberState.STARTING)
    member.release()
    assert [process.dead for process in lives.processes] == [True]


def test_an_interrupt_while_a_result_is_read_or_taken_loses_neither_the_result_nor_its_room(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def striking(call: Callable[[], Any]) -> Callable[[], Any]:
        def struck() -> Any:
            found = call()
            signal.raise_signal(signal.SIGUSR1)
            return found

        return struck

    members = Members({0: (member := started(lives))}, lambda: None)
    (channel,) = lives.channels
    channel.frames = [Put((1,), pickle.dumps("one"))]
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        for struck, name, call in ((member, "read", members.pump), (channel, "make_room", members.take_first)):
            with monkeypatch.context() as patched:
                patched.setattr(struck, name, striking(getattr(struck, name)))
                with pytest.raises(KeyboardInterrupt):
                    call()
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert (members.take_first()[1], channel.room, member.untaken, len(members.results)) == ("one", 1, 0, 0)


def test_an_interrupt_while_a_dead_worker_is_handled_loses_no_failure(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: `failures` lacked it, `results` ended, and the next send raised IndexError or StopIteration."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    members = Members({0: (member := started(lives, max_restarts=0))}, lambda: None)
    lives.processes[0].dead = True
    after_death = member._restart_or_fail

    def failing() -> str:
        followed = after_death()
        signal.raise_signal(signal.SIGUSR1)
        return followed

    monkeypatch.setattr(member, "_restart_or_fail", failing)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            members.pump()
    finally:
        signal.signal(signal.SIGUSR1, before)
    members.pump()

    assert [error.worker for error in members.unreported] == [0]
    with pytest.raises(WorkerFailedError, match="SIGSEGV"):
        members.require_one()


def test_a_failure_that_is_raised_repeatedly_does_not_accumulate_tracebacks(lives: Lives) -> None:
    members = Members({0: started(lives, max_restarts=0)}, lambda: None)
    lives.processes[0].dead = True
    members.pump()
    lengths = set()
    for _ in range(3):
        with pytest.raises(WorkerFailedError) as caught:
            members.require_one()
        lengths.add(len(caught.traceback))

    assert len(lengths) == 1
