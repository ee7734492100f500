"""Repeated waits of one thread for the same links: which links are asked for their descriptors again, and when."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from weightsync.errors import TransportError
from weightsync.transports.base import WaitFailed, Waits, Waker


class Bell:
    """A source with a descriptor that a test makes readable."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.asked = 0
        self.writes: int | None = None

    def waitables(self) -> list[int]:
        self.asked += 1
        return [self.fd]

    def wants_write(self) -> int | None:
        return self.writes

    def ring(self) -> None:
        os.eventfd_write(self.fd, 1)

    def still(self) -> None:
        os.eventfd_read(self.fd)

    def replace(self) -> None:
        """Use another descriptor, and close the old one."""
        old, self.fd = self.fd, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        os.close(old)


class WaitSetup:
    """Bells, and the waits of one thread for them."""

    def __init__(self, bells: int = 4) -> None:
        self.bells = [Bell() for _ in range(bells)]
        self.waker = Waker()
        self.waits = Waits[Bell](self.waker)

    def wait(self, bells: list[Bell] | None = None) -> list[int]:
        return [self.bells.index(bell) for bell in self.waits.wait(bells or self.bells, 0.0)]

    def asked(self) -> list[int]:
        """How often each bell was asked for its descriptor since the last call."""
        counts = [bell.asked for bell in self.bells]
        for bell in self.bells:
            bell.asked = 0
        return counts


@pytest.fixture
def wait_setup() -> Iterator[WaitSetup]:
    made = WaitSetup()
    made.bells[0].ring()
    assert made.wait() == [0]
    assert made.asked() == [1, 1, 1, 1]
    yield made
    made.waker.close()
    for bell in made.bells:
        os.close(bell.fd)


def test_only_changed_links_are_asked_again_for_their_descriptors(wait_setup: WaitSetup) -> None:
    wait_setup.bells[0].still()
    wait_setup.bells[2].ring()
    wait_setup.waits.changed.add(id(wait_setup.bells[0]))

    assert wait_setup.wait() == [2]
    assert wait_setup.asked() == [1, 0, 0, 0]


def test_links_that_were_not_asked_again_are_still_waited_for(wait_setup: WaitSetup) -> None:
    wait_setup.bells[3].ring()

    assert wait_setup.wait() == [0, 3]
    assert wait_setup.asked() == [0, 0, 0, 0]


def test_a_new_descriptor_replaces_the_old_one(wait_setup: WaitSetup) -> None:
    wait_setup.bells[0].replace()
    wait_setup.waits.changed.add(id(wait_setup.bells[0]))
    wait_setup.bells[1].ring()
    assert wait_setup.wait() == [1]

    wait_setup.bells[0].ring()

    assert wait_setup.wait() == [0, 1]


def test_writability_is_waited_for_only_while_a_link_wants_to_write(wait_setup: WaitSetup) -> None:
    wait_setup.bells[1].writes = wait_setup.bells[1].fd
    wait_setup.waits.changed.add(id(wait_setup.bells[1]))
    assert wait_setup.wait() == [0, 1]

    wait_setup.bells[1].writes = None
    wait_setup.waits.changed.add(id(wait_setup.bells[1]))

    assert wait_setup.wait() == [0]


def test_a_descriptor_shared_by_two_links_is_waited_for_while_one_still_has_it(wait_setup: WaitSetup) -> None:
    one, other = wait_setup.bells[1], wait_setup.bells[2]
    own, one.fd = one.fd, other.fd
    other.ring()
    wait_setup.waits.changed.add(id(one))
    assert wait_setup.wait() == [0, 1, 2]

    one.fd = own
    wait_setup.waits.changed.add(id(one))

    assert wait_setup.wait() == [0, 2]


def _time_is_up(wait_setup: WaitSetup) -> None:
    wait_setup.bells[0].still()
    wait_setup.waits.changed.add(id(wait_setup.bells[0]))
    assert wait_setup.wait() == []


def _the_waker_fires(wait_setup: WaitSetup) -> None:
    wait_setup.waker.fire()
    assert wait_setup.wait() == [0]


def _a_descriptor_is_closed(wait_setup: WaitSetup) -> None:
    wait_setup.bells[1].replace()
    assert wait_setup.wait() == [0, 1]


def _as_many_waits_as_links(wait_setup: WaitSetup) -> None:
    for _ in wait_setup.bells[1:]:
        assert wait_setup.wait() == [0]


@pytest.mark.parametrize("end", [_time_is_up, _the_waker_fires, _a_descriptor_is_closed, _as_many_waits_as_links])
def test_all_links_are_asked_again_for_their_descriptors_after(
    end: Callable[[WaitSetup], None], wait_setup: WaitSetup
) -> None:
    end(wait_setup)
    wait_setup.asked()

    wait_setup.wait()

    assert wait_setup.asked() == [1, 1, 1, 1]


def test_a_wait_for_other_links_asks_all_of_them(wait_setup: WaitSetup) -> None:
    assert wait_setup.wait(wait_setup.bells[:2]) == [0]
    assert wait_setup.asked() == [1, 1, 0, 0]


def test_a_link_that_cannot_be_asked_is_named_and_all_links_are_asked_again(wait_setup: WaitSetup) -> None:
    def broken() -> list[int]:
        raise TransportError("gone")

    bell = wait_setup.bells[2]
    bell.waitables = broken  # type: ignore[method-assign]
    wait_setup.waits.changed.add(id(bell))
    with pytest.raises(WaitFailed) as caught:
        wait_setup.wait()
    assert caught.value.which == 2

    del bell.waitables
    wait_setup.asked()

    assert wait_setup.wait() == [0]
    assert wait_setup.asked() == [1, 1, 1, 1]
