"""Work in several threads: each part is done once, and helper threads live exactly as long as they have an owner."""

from __future__ import annotations

import gc
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch

from weightsync import SharedMemWeightSyncScheme, WeightReceiver, WeightSender
from weightsync.transports.process import ProcessWatch
from weightsync.weights import threads
from weightsync.weights.threads import Keeping, alone, in_threads, shares, threads_for

MIB = 1 << 20


class Owner:
    """An owner of helper threads."""


_others: list[threading.Thread] = []


@pytest.fixture(autouse=True)
def without_other_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test helpers of its own: senders of other tests that are still open have some, too."""
    monkeypatch.setattr(threads, "_helpers", threads._Helpers())
    _others[:] = threading.enumerate()


def use_the_helpers_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the helpers of the process, which alone are forgotten after a fork, and free those of other tests."""
    monkeypatch.undo()
    gc.collect()


def helpers() -> list[threading.Thread]:
    found = (thread for thread in threading.enumerate() if thread.name == "weightsync-copy")
    return [thread for thread in found if thread not in _others]


def threads_that_work(parts: list[tuple[int, int]], count: int, least: int = 2) -> set[int]:
    """Work on parts, each of which waits until ``least`` threads work. Returns the ids of these threads."""
    together, idents = threading.Barrier(least), set()

    def work(start: int, end: int) -> None:
        together.wait(20)
        idents.add(threading.get_ident())

    in_threads(work, parts, count)
    return idents


@pytest.mark.parametrize("used", [1, 2, 3, 16])
def test_one_thread_is_used_for_each_eight_mebibytes(used: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: used)

    found = [threads_for(nbytes * MIB) for nbytes in (0, 8, 15, 16, 24, 1000)]

    assert found == [1, 1, 1, min(used, 2), min(used, 3), used]


@pytest.mark.parametrize("count", [1, 2, 3, 16])
@pytest.mark.parametrize("nbytes", [0, 1, MIB, 16 * MIB, 100 * MIB + 1, 1000 * MIB])
@pytest.mark.parametrize("unit", [MIB // 2, 16 * MIB])
def test_parts_cover_everything_once_and_end_at_whole_units(count: int, nbytes: int, unit: int) -> None:
    parts = shares(nbytes, unit, count)

    assert (parts[0][0], parts[-1][1]) == (0, nbytes)
    assert all(end == start for (_, end), (start, _) in pairwise(parts))
    assert all(start < end and end % unit == 0 for start, end in parts[:-1])


@pytest.mark.parametrize(("count", "mebibytes", "expected"), [(1, 1000, 1), (2, 1000, 8), (2, 16, 4), (3, 8, 3)])
def test_large_work_is_split_into_more_parts_than_threads(count: int, mebibytes: int, expected: int) -> None:
    assert len(shares(mebibytes * MIB, MIB // 2, count)) == expected


@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_part_is_worked_on_once(count: int) -> None:
    done: list[tuple[int, int]] = []
    parts = [(number, number + 1) for number in range(20)]

    in_threads(lambda start, end: done.append((start, end)), parts, count)

    assert sorted(done) == parts


def test_parts_are_worked_on_by_several_threads_including_the_caller() -> None:
    idents = threads_that_work([(0, 1), (1, 2)], 2)

    assert len(idents) == 2
    assert threading.get_ident() in idents


def test_every_helper_is_waited_for_even_after_another_has_finished() -> None:
    all_three, slower, done = threading.Barrier(3), threading.Semaphore(1), list[int]()
    caller, owner = threading.get_ident(), Owner()
    keeping = Keeping(owner)

    def work(start: int, end: int) -> None:
        all_three.wait(20)
        if threading.get_ident() != caller and slower.acquire(blocking=False):
            time.sleep(0.1)
            done.append(end)

    in_threads(work, [(0, 1), (1, 2), (2, 3)], 3)
    counted = len(done)
    keeping.end()

    assert counted == 1


def test_an_error_of_any_part_is_raised_once_all_have_ended() -> None:
    ended = []

    def work(start: int, end: int) -> None:
        if start == 1:
            raise ValueError("the second part")
        ended.append(end)

    with pytest.raises(ValueError, match="the second part"):
        in_threads(work, [(0, 1), (1, 2), (2, 3)], 2)

    assert sorted(ended) == [1, 3]


def test_an_interrupt_is_raised_only_after_every_helper_has_finished() -> None:
    """Otherwise a helper would go on writing into a slot that the next send fills, or that is unmapped."""
    both, done = threading.Barrier(2), list[int]()
    caller, owner = threading.get_ident(), Owner()
    keeping = Keeping(owner)

    def work(start: int, end: int) -> None:
        both.wait(20)
        if threading.get_ident() != caller:
            time.sleep(0.05)  # by now the caller waits for this helper
            signal.pthread_kill(caller, signal.SIGINT)
            time.sleep(0.05)
            done.append(end)

    with pytest.raises(KeyboardInterrupt):
        in_threads(work, [(0, 1), (1, 2)], 2)
    counted = len(done)
    keeping.end()

    assert counted == 1


def test_an_error_keeps_nothing_alive_once_it_is_dropped() -> None:
    owner = Owner()
    dropped = weakref.ref(owner)

    def fail(start: int, end: int, _buffer: Owner = owner) -> None:
        raise ValueError(f"{start} to {end}")

    gc.disable()
    try:
        with pytest.raises(ValueError, match="to"):
            in_threads(fail, [(0, 1), (1, 2)], 2)
        del fail, owner
        assert dropped() is None
    finally:
        gc.enable()


def test_the_caller_does_all_work_if_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    done: list[tuple[int, int]] = []
    in_threads(lambda start, end: done.append((start, end)), [(0, 1), (1, 2)], 2)

    assert sorted(done) == [(0, 1), (1, 2)]


def test_a_helper_that_is_busy_elsewhere_is_not_waited_for() -> None:
    """The caller does all parts that no thread has begun, since the only helper is busy."""
    owner, busy, over = Owner(), threading.Barrier(3), threading.Event()
    keeping = Keeping(owner)

    def hold(start: int, end: int) -> None:
        busy.wait(20)
        over.wait(20)

    holding = threading.Thread(target=in_threads, args=(hold, [(0, 1), (1, 2)], 2))
    holding.start()
    busy.wait(20)
    done: list[int] = []
    in_threads(lambda start, end: done.append(threading.get_ident()), [(0, 1), (1, 2)], 2)
    over.set()
    holding.join(20)
    keeping.end()

    assert done == [threading.get_ident()] * 2


def test_helpers_stay_until_the_last_owner_has_ended_and_are_used_again() -> None:
    first, second = Owner(), Owner()
    keepings = [Keeping(first), Keeping(second)]

    used = [threads_that_work([(0, 1), (1, 2)], 2) for _ in range(3)]
    kept = [helpers()]
    for keeping in (*keepings, keepings[0]):  # an owner may end twice
        keeping.end()
        kept.append(helpers())

    assert used[0] == used[1] == used[2]
    assert [len(each) for each in kept] == [1, 1, 0, 0]
    assert all(helper.daemon for helper in kept[0])  # no process waits for helpers whose sender was not closed


def test_a_process_begins_without_helpers() -> None:
    owner = Owner()
    keeping = Keeping(owner)

    before = threads._helpers.resting
    threads_that_work([(0, 1), (1, 2)], 2)
    kept = threads._helpers.resting
    keeping.end()

    assert (before, kept, helpers()) == (0, 1, [])


def test_without_an_owner_helpers_end_with_the_work() -> None:
    threads_that_work([(0, 1), (1, 2), (2, 3)], 3, least=3)

    assert helpers() == []


def test_helpers_end_when_their_owner_is_collected() -> None:
    owner = Owner()
    Keeping(owner)
    threads_that_work([(0, 1), (1, 2)], 2)
    (helper,) = helpers()

    del owner
    gc.collect()
    helper.join(20)

    assert not helper.is_alive()


def clear(view: memoryview, start: int, end: int) -> None:
    view[start:end] = bytes(end - start)


def test_an_idle_helper_keeps_nothing_of_the_work_alive() -> None:
    owner = Owner()
    keeping = Keeping(owner)
    buffer = bytearray(4)

    in_threads(partial(clear, memoryview(buffer)), [(0, 2), (2, 4)], 3)

    buffer.clear()  # raises BufferError if a view of it is left
    keeping.end()


def test_helpers_that_wait_for_work_do_not_count_as_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, found = Owner(), []
    monkeypatch.setattr(threading, "active_count", lambda: 1 + len(helpers()))
    keeping = Keeping(owner)
    before = alone()

    in_threads(lambda start, end: found.append(alone()), [(0, 1)], 2)
    idle = len(helpers()), alone()
    keeping.end()

    assert (before, idle) == (True, (1, True))
    assert found == [False]  # a helper may be at work


def in_child(work: Callable[[], bool]) -> bool:
    """Whether the work returns True in a forked child."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if work() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_helpers_of_its_own_and_its_parent_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    use_the_helpers_of_the_process(monkeypatch)
    owner = Owner()
    keeping = Keeping(owner)
    before = threads_that_work([(0, 1), (1, 2)], 2)

    def child() -> bool:
        started = threads._helpers.resting == 0
        found = threads_that_work([(0, 1), (1, 2)], 2)
        keeping.end()
        return started and len(found) == 2 and threads._helpers.resting == 0

    forked = in_child(child)
    after = threads_that_work([(0, 1), (1, 2)], 2)
    keeping.end()

    assert forked
    assert before == after


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_child_forked_while_the_lock_is_held_keeps_helpers_until_its_inherited_sender_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the child, a sender starts over and asks for the lock before the helpers are forgotten."""
    use_the_helpers_of_the_process(monkeypatch)
    sender = WeightSender(SharedMemWeightSyncScheme())
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with threads._helpers._lock:
            held.set()
            over.wait(20)

    holding = threading.Thread(target=hold)
    holding.start()
    held.wait(20)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            threads_that_work([(0, 1), (1, 2)], 2)
            kept = threads._helpers.resting
            sender.close()
            code = 0 if (kept, threads._helpers.resting) == (1, 0) else 1
        finally:
            os._exit(code)
    ended = ProcessWatch(pid, 0)
    select.select([ended], [], [], 20)
    if not ended.dead:
        os.kill(pid, signal.SIGKILL)
    over.set()
    holding.join(20)
    sender.close()

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("used", [1, 2, 3])
def test_all_helpers_end_even_if_the_start_of_one_was_interrupted(used: int, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, start = Owner(), threading.Thread.start
    keeping = Keeping(owner)

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        threads_that_work([(0, 1), (1, 2)], 2)
    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(used):
        threads_that_work([(0, 1), (1, 2)], 2)
    found = helpers()
    ending = threading.Thread(target=keeping.end, daemon=True)
    ending.start()
    for thread in (ending, *found):
        thread.join(20)

    assert len(found) == 2  # of which only one is counted
    assert not ending.is_alive()
    assert helpers() == []


def test_an_open_sender_or_receiver_keeps_helpers_and_a_closed_one_does_not() -> None:
    counts = []
    for make in (WeightSender, WeightReceiver):
        participant = make(SharedMemWeightSyncScheme())
        threads_that_work([(0, 1), (1, 2)], 2)
        counts.append(len(helpers()))
        participant.close()
        counts.append(len(helpers()))

    assert counts == [1, 0, 1, 0]
