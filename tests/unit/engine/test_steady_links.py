"""A link whose descriptors stay the same is asked for them, and flushed, only when something may have changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from scripted import DIGEST, EPOCH, LAYOUT, Fleet, Scripted, ack, hello
from test_sender_links import Process

from weightsync.engine.receiver_driver import ReceiverDriver
from weightsync.protocol import receiver as pure
from weightsync.protocol.messages import Bye, Update
from weightsync.transports.base import Steady


class SteadyLink(Scripted, Steady):
    """A link that tells whether it has something left to write, and counts the requests for its descriptors."""

    def __init__(self) -> None:
        super().__init__()
        self.outlet = SimpleNamespace(idle=True)
        #: Whether messages leave as soon as they are sent.
        self.leaves = True
        self.asked = 0

    def send(self, message: Any, payload: Any = None) -> None:
        super().send(message, payload)
        self.outlet.idle = self.outlet.idle and self.leaves

    def waitables(self) -> list[int]:
        self.asked += 1
        return []


def asked(driver: Any, links: tuple[SteadyLink, ...]) -> list[int]:
    """How often the next wait asks each link for its descriptors."""
    before = [link.asked for link in links]
    driver.wait(0.0, driver.waker.fired)
    return [link.asked - known for link, known in zip(links, before, strict=True)]


def flushed(links: tuple[SteadyLink, ...]) -> list[int]:
    """How often each link was flushed since the last call."""
    found = [link.flushed for link in links]
    for link in links:
        link.flushed = 0
    return found


# ------------------------------------------------------------------------------------------------- senders


@pytest.fixture
def links() -> tuple[SteadyLink, ...]:
    return SteadyLink(), SteadyLink()


@pytest.fixture
def fleet(links: tuple[SteadyLink, ...]) -> Fleet:
    made = Fleet(*links)
    assert asked(made.driver, links) == [1, 1]
    assert asked(made.driver, links) == [0, 0]
    return made


def test_a_sender_flushes_a_link_and_asks_for_its_descriptors_until_all_has_left(
    fleet: Fleet, links: tuple[SteadyLink, ...]
) -> None:
    links[1].leaves = False
    fleet.sends()
    assert asked(fleet.driver, links) == [0, 1]
    fleet.driver.pump()
    assert (flushed(links), asked(fleet.driver, links)) == ([0, 1], [0, 1])

    links[1].outlet.idle = True
    fleet.driver.pump()
    assert (flushed(links), asked(fleet.driver, links)) == ([0, 0], [0, 0])


def test_a_sender_asks_a_link_for_its_descriptors_again_once_its_process_is_watched(
    fleet: Fleet, links: tuple[SteadyLink, ...]
) -> None:
    fleet.receives(1, hello())
    assert asked(fleet.driver, links) == [0, 1]

    late, process = SteadyLink(), Process()
    fleet.driver.join(2, late, process)
    assert asked(fleet.driver, (*links, late)) == [1, 1, 1]
    process.known = (77, 88)
    fleet.driver.pump()
    assert (asked(fleet.driver, (*links, late)), late.watched) == ([0, 0, 1], [(77, 88)])


# ------------------------------------------------------------------------------------------------ receivers


def update(version: int) -> Update:
    layout = {"layout_digest": LAYOUT.digest, "layout": LAYOUT.encode(), "nbytes": LAYOUT.nbytes}
    return Update(model_id="policy", incarnation=EPOCH, version=version, digest=DIGEST, **layout)  # type: ignore[arg-type]


@pytest.fixture
def worker(links: tuple[SteadyLink, ...]) -> ReceiverDriver:
    driver = ReceiverDriver("policy")
    for link in links:
        driver.add_link(link)
    for _ in range(2):  # a new link wakes the first wait, after which all links are asked again
        assert asked(driver, links) == [1, 1]
    links[0].receives(hello())
    driver.pump()
    assert asked(driver, links) == [1, 0]
    return driver


def test_a_receiver_flushes_a_link_and_asks_for_its_descriptors_until_all_has_left(
    worker: ReceiverDriver, links: Any
) -> None:
    links[0].receives(update(1))
    worker.pump()
    worker.take(pure.Applied(ack(1)))
    assert (flushed(links), asked(worker, links)) == ([0, 0], [0, 0])

    links[0].leaves = False
    links[0].receives(update(2))
    links[0].receives(update(3))
    worker.pump()
    assert (flushed(links), asked(worker, links)) == ([0, 0], [1, 0])
    worker.flush()
    assert (flushed(links), asked(worker, links)) == ([1, 0], [1, 0])


def test_a_receiver_keeps_nothing_of_a_link_that_has_ended(worker: ReceiverDriver, links: Any) -> None:
    links[0].receives(Bye(model_id="policy", incarnation=EPOCH, reason="enough"))
    worker.pump()

    assert set(worker._links) == set(worker._outlets) == {2}
