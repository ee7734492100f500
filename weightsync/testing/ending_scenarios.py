"""Scenarios of links that are closed, lost or cut: earlier messages arrive, the end is reported, nothing leaks."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial

from weightsync.errors import TransportError
from weightsync.testing.line import Line, must_raise
from weightsync.testing.link_recorder import LinkRecorder
from weightsync.testing.link_setup import Ability, LinkSetup, Scenario
from weightsync.testing.rules import Rule, RuleViolation
from weightsync.transports.base import Link
from weightsync.transports.buffers import Storage

#: How many connections are opened to see whether they leak. A few descriptors may come and go at the same time.
_CONNECTIONS = 10
#: More bytes than any transport takes at once.
_LARGE = 8 * 2**20
#: What a process can run out of, and how much of it this process uses.
_RESOURCE_COUNTS: Mapping[str, Callable[[], int]] = {
    "descriptors": lambda: len(os.listdir("/dev/fd")),
    "threads": threading.active_count,
}


def closing(link_setup: LinkSetup) -> None:
    """Closing takes effect at once, is final, and may be repeated."""
    line = Line(link_setup)
    line.greet()
    for recorder in (line.sender, line.receiver):
        link_setup.watch.steps.append(f"{recorder.end.value} is closed, twice")
        recorder.close()
        recorder.close()
        must_raise("send() on a closed link", partial(_send_ack, line, recorder), Rule.CLOSED)
        must_raise("flush() on a closed link", recorder.flush, Rule.CLOSED)
        must_raise("receive() on a closed link", recorder.receive, Rule.CLOSED)
        if recorder.waitables() or recorder.wants_write() is not None:
            raise RuleViolation(Rule.CLOSED, f"{recorder.end.value} is closed but still has waitables")


def _send_ack(line: Line, recorder: LinkRecorder) -> None:
    recorder.send(line.ack(99))


def many_connections(link_setup: LinkSetup) -> None:
    """When closed, a link frees what it opened without garbage collection: this function still holds its ends."""
    held = [*_use_and_close(link_setup)]
    gc.collect()
    before = {what: count() for what, count in _RESOURCE_COUNTS.items()}
    for _ in range(_CONNECTIONS):
        held += _use_and_close(link_setup)
    link_setup.watch.steps.append(f"{_CONNECTIONS} connections have been used and closed")
    for what, count in before.items():
        left = f"{_CONNECTIONS} connections were closed, but each left at least one of its {what}"
        link_setup.until(partial(_has_fewer, what, count + _CONNECTIONS), lambda: None, Rule.FREED, left)


def _has_fewer(what: str, bound: int) -> bool:
    return _RESOURCE_COUNTS[what]() < bound


def _use_and_close(link_setup: LinkSetup) -> tuple[Link, Link]:
    line = Line(link_setup)
    line.greet()
    line.tell(*line.update(1, nbytes=100_000))
    line.receive(line.receiver)
    line.answer(line.ack(1))
    line.receive(line.sender)
    link_setup.clear()
    return line.sender.link, line.receiver.link


def the_senders_last_words(link_setup: LinkSetup) -> None:
    """What the sender's end sent before it was closed is delivered. Then the receiver's end reports the death."""
    line = Line(link_setup)
    line.greet()
    for version in range(1, 11):
        line.tell(*line.update(version, nbytes=500 * (version % 2)))
    line.write_everything(line.sender)
    line.sender.close()
    line.require_death(line.receiver)


def the_receivers_last_words(link_setup: LinkSetup) -> None:
    """What the receiver's end sent before it was closed is delivered."""
    line = Line(link_setup)
    line.greet()
    for version in range(1, 11):
        line.tell(line.update(version)[0])
    line.receive(line.receiver)
    for version in range(1, 11):
        line.answer(line.ack(version))
    line.write_everything(line.receiver)
    line.receiver.close()
    line.receive_until_dead(line.sender)


def an_update_that_is_cut_off(link_setup: LinkSetup) -> None:
    """The sender's end is closed while it sends a large update, which arrives whole or not at all."""
    link_setup.storage = Storage.HEAP
    line = Line(link_setup)
    line.greet()
    line.tell(*line.update(1, nbytes=_LARGE))
    link_setup.watch.steps.append("the sender's end is closed before it can have sent all of it")
    line.sender.close()
    line.require_death(line.receiver)


def a_receiver_that_is_gone(link_setup: LinkSetup) -> None:
    """The receiver's end is closed while no message is in flight: the sender's end reports that by itself."""
    line = Line(link_setup)
    line.greet()
    line.receiver.close()
    line.require_death(line.sender)


def a_send_to_one_that_is_gone(link_setup: LinkSetup) -> None:
    """The receiver's end is closed: a later send raises, or the sender's end reports the death soon after."""
    line = Line(link_setup)
    line.greet()
    line.receiver.close()
    try:
        line.tell(*line.update(1, nbytes=1000))
    except TransportError:
        return
    line.require_death(line.sender)


def a_cut(link_setup: LinkSetup) -> None:
    """The connection breaks: both ends report it."""
    line = Line(link_setup)
    line.greet()
    line.tell(*line.update(1, nbytes=100_000))
    link_setup.watch.steps.append("the connection is cut")
    line.link_pair.cut = True
    assert line.ends.cut is not None
    line.ends.cut()
    for recorder in (line.sender, line.receiver):
        line.require_death(recorder)
        must_raise("send() on a link that reported its death", partial(_send_ack, line, recorder), Rule.DEATH_REPORTED)


ENDING_SCENARIOS = (
    Scenario("closing", closing, over_losses=True),
    Scenario("many connections", many_connections),
    Scenario("the sender's last words", the_senders_last_words),
    Scenario("the receiver's last words", the_receivers_last_words),
    Scenario("an update that is cut off", an_update_that_is_cut_off),
    Scenario("a receiver that is gone", a_receiver_that_is_gone),
    Scenario("a send to one that is gone", a_send_to_one_that_is_gone),
    Scenario("a cut", a_cut, needs=Ability.CUT),
)
