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


class Room:
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
def room() -> Iterator[Room]:
    made = Room()
    made.bells[0].ring()
    assert made.wait() == [0]
    assert made.asked() == [1, 1, 1, 1]
    yield made
    made.waker.close()
    for bell in made.bells:
        os.close(bell.fd)


def test_only_what_has_changed_is_asked_again(room: Room) -> None:
    room.bells[0].still()
    room.bells[2].ring()
    room.waits.changed.add(id(room.bells[0]))

    assert room.wait() == [2]
    assert room.asked() == [1, 0, 0, 0]


def test_what_was_not_asked_again_is_still_waited_for(room: Room) -> None:
    room.bells[3].ring()

    assert room.wait() == [0, 3]
    assert room.asked() == [0, 0, 0, 0]


def test_a_new_descriptor_takes_the_place_of_the_old(room: Room) -> None:
    room.bells[0].replace()
    room.waits.changed.add(id(room.bells[0]))
    room.bells[1].ring()
    assert room.wait() == [1]

    room.bells[0].ring()

    assert room.wait() == [0, 1]


def test_room_to_write_is_waited_for_while_it_is_wanted(room: Room) -> None:
    room.bells[1].writes = room.bells[1].fd
    room.waits.changed.add(id(room.bells[1]))
    assert room.wait() == [0, 1]

    room.bells[1].writes = None
    room.waits.changed.add(id(room.bells[1]))

    assert room.wait() == [0]


def test_a_descriptor_of_two_is_waited_for_until_both_have_another(room: Room) -> None:
    one, other = room.bells[1], room.bells[2]
    own, one.fd = one.fd, other.fd
    other.ring()
    room.waits.changed.add(id(one))
    assert room.wait() == [0, 1, 2]

    one.fd = own
    room.waits.changed.add(id(one))

    assert room.wait() == [0, 2]


def _time_is_up(room: Room) -> None:
    room.bells[0].still()
    room.waits.changed.add(id(room.bells[0]))
    assert room.wait() == []


def _the_waker_fires(room: Room) -> None:
    room.waker.fire()
    assert room.wait() == [0]


def _a_descriptor_is_closed(room: Room) -> None:
    room.bells[1].replace()
    assert room.wait() == [0, 1]


def _as_many_waits_as_links(room: Room) -> None:
    for _ in room.bells[1:]:
        assert room.wait() == [0]


@pytest.mark.parametrize("end", [_time_is_up, _the_waker_fires, _a_descriptor_is_closed, _as_many_waits_as_links])
def test_all_are_asked_again_after(end: Callable[[Room], None], room: Room) -> None:
    end(room)
    room.asked()

    room.wait()

    assert room.asked() == [1, 1, 1, 1]


def test_others_are_all_asked(room: Room) -> None:
    assert room.wait(room.bells[:2]) == [0]
    assert room.asked() == [1, 1, 0, 0]


def test_one_that_cannot_be_asked_is_named_and_the_others_are_asked_anew(room: Room) -> None:
    def broken() -> list[int]:
        raise TransportError("gone")

    bell = room.bells[2]
    bell.waitables = broken  # type: ignore[method-assign]
    room.waits.changed.add(id(bell))
    with pytest.raises(WaitFailed) as caught:
        room.wait()
    assert caught.value.which == 2

    del bell.waitables
    room.asked()

    assert room.wait() == [0]
    assert room.asked() == [1, 1, 1, 1]
