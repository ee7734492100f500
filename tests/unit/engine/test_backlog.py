"""The backlog of a link: how many unanswered updates are sent, and which one waits."""

from __future__ import annotations

from scripted import ack, plain, refusal

from weightsync.engine.driver import Backlog
from weightsync.errors import TransportError
from weightsync.protocol import sender as pure
from weightsync.protocol._tables import RefusalKind
from weightsync.protocol.messages import version_of
from weightsync.transports.base import Received


def test_two_unanswered_versions_are_sent_and_only_the_newest_further_one_waits() -> None:
    backlog = Backlog()

    assert [backlog.admit(1), backlog.admit(2), backlog.waits] == [True, True, False]
    assert [backlog.admit(3), backlog.waits, backlog.admit(4), backlog.waits] == [False, True, False, True]


def test_an_answer_counts_for_all_earlier_versions_and_releases_the_waiting_one_once() -> None:
    backlog = Backlog()
    for version in (1, 2, 3):
        backlog.admit(version)

    assert [backlog.answered(0), backlog.waits] == [0, True]
    assert [backlog.answered(2), backlog.waits] == [3, False]
    assert [backlog.answered(2), backlog.waits] == [0, False]
    assert [backlog.admit(3), backlog.admit(4), backlog.admit(5)] == [True, True, False]
    assert [backlog.answered(3), backlog.waits] == [5, False]


def test_received_messages_are_handled_in_order_before_the_link_loss_of_a_failed_write() -> None:
    fleet = plain()
    link = fleet.links[0]
    fleet.gives_up(2)
    fleet.sends()  # waits behind the two unanswered ones
    taken: list[tuple[str, int]] = []
    fleet.driver.watch_steps(lambda _state, _data, event, _step: taken.append(named(event)))
    link.raises = {"send": TransportError("It is gone.")}
    link.receives(refusal(1))
    link.receives(ack(2))
    answers, last = link.receive, [Received(refusal(0, RefusalKind.FAILED))]
    link.receive = lambda: answers() or [last.pop() for _ in last]

    fleet.driver.pump()

    assert taken == [("Refusal", 1), ("Ack", 2), ("Refusal", 0), ("LinkLost", 0)]
    assert fleet.reason() == "it failed: no"


def named(event: pure.Event) -> tuple[str, int]:
    """The type and version of a worker's answer, or the type of any other event and 0."""
    if isinstance(event, pure.Answer):
        return type(event.message).__name__, version_of(event.message)
    return type(event).__name__, 0
