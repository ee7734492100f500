"""What a sender's driver knows of its links and of the processes at their other ends."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fleet import PATIENCE
from scripted import EPOCH, Fleet, Scripted, Telling, both, hello, plain

from weightsync import TransportError
from weightsync.clock import Stopwatch
from weightsync.engine.driver import Hearing
from weightsync.engine.sender_driver import SenderDriver
from weightsync.protocol.messages import Bye
from weightsync.testing import FakeClock
from weightsync.transports.base import SharesMemory, Waker
from weightsync.transports.buffers import Buffer
from weightsync.transports.calls.client import BlockingLink
from weightsync.transports.device import CarriesDevices
from weightsync.transports.wakeup import AwaitedProcess

# ------------------------------------------------------------------------------------------- awaited processes


class Process(AwaitedProcess):
    """A process whose identity and end are set by a test."""

    def __init__(self) -> None:
        super().__init__(1)
        self.known: tuple[int, int] | None = None
        self.over = ""

    @property
    def end(self) -> str:
        return self.over

    @property
    def identity(self) -> tuple[int, int] | None:
        return self.known


def test_a_process_is_watched_once_it_has_started() -> None:
    fleet, process, link = plain(), Process(), Scripted()
    assert fleet.driver.awaited == 0
    fleet.driver.join(1, link, process)
    fleet.driver.pump()
    assert (fleet.driver.awaited, link.watched) == (1, [])

    process.known = (77, 88)
    fleet.driver.pump()
    fleet.driver.pump()
    assert (fleet.driver.awaited, link.watched) == (0, [(77, 88)])


def test_processes_are_awaited_until_the_last_has_started() -> None:
    fleet, processes = plain(), (Process(), Process())
    for worker, process in enumerate(processes, 1):
        fleet.driver.join(worker, Scripted(), process)
    fleet.driver.join(3, Scripted())
    for left, process in zip((2, 1), processes, strict=True):
        assert fleet.driver.awaited == left
        process.known = (77, 88)
        fleet.driver.pump()

    assert fleet.driver.awaited == 0


class Ringing(Scripted):
    """A link with a descriptor that a test makes readable."""

    def __init__(self) -> None:
        super().__init__()
        self.bell = Waker()

    def waitables(self) -> list[int]:
        return [self.bell.fd]


def test_look_pumps_the_readable_links_and_checks_awaited_processes() -> None:
    quiet, rings, process = Ringing(), Ringing(), Process()
    fleet = Fleet(quiet, rings)
    fleet.driver.look()
    assert (quiet.flushed, rings.flushed) == (0, 0)
    rings.bell.fire()
    rings.receives(hello())
    fleet.driver.look()
    assert (quiet.flushed, rings.flushed, fleet.link_state(1).name) == (0, 1, "UP")

    rings.bell.clear()
    fleet.driver.join(2, late := Ringing(), process)
    process.known = (77, 88)
    fleet.driver.look()
    assert (late.watched, quiet.flushed) == ([(77, 88)], 0)


def test_adding_a_link_in_another_thread_wakes_a_waiting_caller() -> None:
    fleet, added = Fleet(Ringing()), Ringing()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fleet.driver.wait, PATIENCE, fleet.driver.waker.fired)
        while not fleet.driver.waker._waiting:
            time.sleep(0.001)
        fleet.driver.join(1, added)

        assert waiting.result(PATIENCE / 2) == []


def test_a_worker_whose_process_object_was_closed_before_it_was_watched_is_lost() -> None:
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    process.join()
    process.close()
    fleet = plain()
    fleet.driver.join(1, Scripted(), AwaitedProcess(process))
    fleet.driver.pump()

    assert fleet.reason(1) == "its process has ended, and its Process object is closed"


def test_a_worker_whose_process_has_ended_or_cannot_be_watched_is_lost() -> None:
    fleet, blind, dead = plain(), Process(), Process()
    blind.known, dead.known, dead.over = (77, 88), (78, 89), "it has ended"
    links = Scripted(), Scripted()
    links[0].raises["watch"] = TransportError("no descriptor")
    fleet.driver.join(1, links[0], blind)
    fleet.driver.join(2, links[1], dead)
    links[1].receives(hello())
    fleet.driver.pump()

    assert (fleet.reason(1), fleet.reason(2)) == ("no descriptor", "it has ended")
    assert fleet.driver.awaited == 0
    assert fleet.driver.links() == [fleet.links[0]]
    assert links[1].watched == []


def test_the_driver_keeps_nothing_of_replaced_or_removed_links() -> None:
    fleet = plain()
    fleet.driver.join(1, Scripted(), Process())
    fleet.sends()
    fleet.links[0].receives(hello())
    fleet.driver.pump()
    driver = fleet.driver
    assert (set(driver._links), set(driver.hearing.first)) == ({1, 2}, {1})
    assert driver.awaited == 1
    fleet.driver.join(1, Scripted())
    assert driver.awaited == 0
    fleet.driver.join(0, Scripted())
    fleet.driver.join(2, Scripted(), Process())
    assert driver.awaited == 1
    fleet.driver.remove(2, "not needed")

    assert fleet.driver.awaited == 0
    assert (set(driver._links), set(driver.hearing.first)) == ({3, 4}, set())


def test_a_link_can_be_replaced_before_connect() -> None:
    driver, first, second = SenderDriver("policy"), Scripted(), Scripted()
    driver.join(0, first)
    driver.join(0, second)

    assert (driver.links(), first.closed, second.closed) == ([second], 1, 0)
    assert driver.data.late == 0


# ----------------------------------------------------------------------------------------------- what it knows


class Blocking(Scripted, BlockingLink):
    """A link over which messages leave only while a caller waits."""


def test_what_a_worker_has_read_and_its_remark_are_asked_of_its_link() -> None:
    fleet = Fleet(Scripted(), Telling())
    assert [fleet.driver.has_read(worker) for worker in (0, 1)] == [False, False]
    for worker in (0, 1):
        fleet.receives(worker, hello())

    assert [fleet.driver.has_read(worker) for worker in (0, 1)] == [None, True]
    assert [fleet.driver.remark(worker) for worker in (0, 1)] == ["", "it is asleep"]
    fleet.gives_up(3, (1,))
    assert fleet.driver.has_read(1) is False
    fleet.links[1].raises["receive"] = TransportError("cut")
    fleet.driver.pump()
    assert fleet.driver.remark(1) == ""


def test_a_worker_that_another_thread_has_removed_has_no_remark() -> None:
    fleet = Fleet(Telling(), Telling())
    fleet.driver.remove(0, "not needed")

    assert [fleet.driver.remark(worker) for worker in (0, 1)] == ["", "it is asleep"]


class Reaching(Scripted, CarriesDevices):
    """A link whose worker can open slots on a device."""

    opens = False
    reached = frozenset({b"d" * 16})

    def copied_to_device(self) -> None:
        """Do nothing."""


def test_the_devices_that_workers_reach_are_listed_per_link() -> None:
    assert Fleet(Scripted(), Reaching()).driver.reached() == [frozenset(), Reaching.reached]


def test_a_flushed_link_is_asked_again_for_its_descriptors() -> None:
    fleet = plain()
    driver = fleet.driver
    driver.wait(0.0, driver.waker.fired)
    driver.pump()

    assert [waits.changed for waits in driver._waits] == [{id(fleet.links[0])}]


class Sharing(Scripted, SharesMemory):
    """A link whose worker maps payloads of up to 8 bytes."""

    def shares(self, payload: Buffer, nbytes: int) -> bool:
        return payload.nbytes == 16 and nbytes <= 8


def test_a_payload_is_shared_if_every_worker_maps_it() -> None:
    buffer = Buffer(16)
    alike, mixed = Fleet(Sharing(), Sharing()), [Fleet(Sharing(), Scripted()), Fleet(Scripted(), Sharing())]

    assert Fleet().driver.all_share(buffer, 9)
    assert alike.driver.all_share(buffer, 8)
    assert not alike.driver.all_share(buffer, 9)
    assert [fleet.driver.all_share(buffer, 8) for fleet in mixed] == [False, False]


def test_a_link_that_cannot_be_written_is_read_once_more_and_never_again() -> None:
    fleet = both()
    link = fleet.links[0]
    link.raises["flush"] = link.raises["receive"] = TransportError("cut")
    fleet.driver.pump()

    assert fleet.reason(0) == "cut"
    # The link is reported lost twice: after the last read, and after the failed write.
    assert fleet.driver.data.late == 1


def test_workers_that_need_a_waiting_caller_are_reported() -> None:
    fleet = Fleet(Scripted(), Blocking(), Blocking())  # type: ignore[call-arg]

    assert fleet.driver.blocking(None) == [1, 2]
    assert fleet.driver.blocking((0, 2)) == [2]
    assert fleet.driver.blocking(()) == []


def test_links_are_listed_by_worker_and_in_the_order_of_link_numbers() -> None:
    fleet, late = both(), Scripted()
    fleet.driver.join(0, late)

    assert list(fleet.driver.by_worker().items()) == [(0, late), (1, fleet.links[1])]
    assert fleet.driver.links() == [fleet.links[1], late]
    assert fleet.links[0].closed == 1


@pytest.mark.parametrize("how", ["removed", "goodbye"])
def test_a_worker_that_left_or_was_removed_is_forgotten_and_its_link_closed(how: str) -> None:
    fleet = both()
    fleet.driver.kept.append(kept := {0: "here", 1: "gone"})
    fleet.receives(1, hello())
    assert fleet.driver.hearing.silent_for(1) is not None
    if how == "removed":
        fleet.driver.remove(1, "not needed")
    else:
        fleet.receives(1, Bye(model_id="policy", incarnation=EPOCH, reason="enough"))

    assert fleet.driver.hearing.silent_for(1) is None
    assert kept == {0: "here"}
    assert (list(fleet.driver.data.workers), fleet.links[1].closed) == ([0], 1)


def test_silence_counts_from_the_last_message_and_a_link_connects_at_its_first() -> None:
    with FakeClock() as clock:
        hearing, since = Hearing(), Stopwatch()
        assert hearing.silent_for(1) is None
        clock.advance(2)
        assert hearing.connected_after(5, since) == 2, "a link that has not connected counts until now"
        for _ in range(2):
            hearing.heard(1, 5)
            clock.advance(4)
        assert hearing.silent_for(1) == 4
        assert hearing.connected_after(5, since) == 2
        assert hearing.connected_after(6, since) == 10

        later = Stopwatch()
        clock.advance(1)
        assert hearing.connected_after(5, later) == 0, "the link connected before the stopwatch was started"
        for _ in range(2):
            hearing.closed(5)
            hearing.forget(1)
        assert (hearing.connected_after(5, since), hearing.silent_for(1)) == (11, None)
