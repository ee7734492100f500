"""The receiver's guards, rule by rule: which input an event becomes, and what the step returns."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from weightsync.errors import ProtocolError, StateError
from weightsync.protocol import receiver as pure
from weightsync.protocol._tables import ReceiverInput, RefusalKind, State
from weightsync.protocol.messages import Ack, Refusal
from weightsync.protocol.report import SyncReport


@dataclass
class Receiver:
    """The pure half of a receiver, and its current state and data."""

    state: State = State.UNINITIALIZED
    data: pure.ReceiverData = field(default_factory=pure.ReceiverData)

    def take(self, event: pure.Event) -> pure.Step:
        step = pure.step(self.state, self.data, event)
        self.state, self.data = step.to, step.data
        return step

    def applies(self, incarnation: int, version: int) -> None:
        self.take(pure.UpdateArrived(self.data.link or 0, incarnation, version))
        self.take(pure.Applied(ack(incarnation, version)))
        self.take(pure.Answered())


def ack(incarnation: int, version: int) -> Ack:
    return Ack(model_id="policy", incarnation=incarnation, version=version)


def refusal(incarnation: int, version: int) -> Refusal:
    return Refusal(model_id="policy", incarnation=incarnation, version=version, kind=RefusalKind.REFUSED)


@pytest.fixture
def receiver() -> Receiver:
    """A ready receiver, on link 1 with incarnation 5."""
    receiver = Receiver()
    assert receiver.take(pure.HelloArrived(1, 5)).effects == (pure.Greet(1),)
    return receiver


def test_an_update_is_served_once_it_is_applied(receiver: Receiver) -> None:
    receiver.take(pure.UpdateArrived(1, 5, 1))

    assert (receiver.state, receiver.data.served) == (State.PENDING_ASYNC, None)
    step = receiver.take(pure.Applied(ack(5, 1)))

    assert step.effects == (pure.Reply(1, ack(5, 1)),)
    assert receiver.data.served == (5, 1)


def test_a_repeated_hello_is_a_duplicate(receiver: Receiver) -> None:
    assert receiver.take(pure.HelloArrived(1, 5)).input is ReceiverInput.DUPLICATE


def test_a_duplicate_of_the_last_decided_version_gets_the_same_answer(receiver: Receiver) -> None:
    receiver.applies(5, 1)

    step = receiver.take(pure.UpdateArrived(1, 5, 1))

    assert (step.input, step.effects) == (ReceiverInput.DUPLICATE, (pure.Reply(1, ack(5, 1)),))


def test_g6_a_duplicate_of_a_refused_version_is_refused_again(receiver: Receiver) -> None:
    receiver.take(pure.UpdateArrived(1, 5, 1))
    refused = receiver.take(pure.Refused(refusal(5, 1)))
    assert refused.effects == (pure.Reply(1, refusal(5, 1)),)
    receiver.take(pure.Answered())

    step = receiver.take(pure.UpdateArrived(1, 5, 1))

    assert (step.input, step.effects) == (ReceiverInput.DUPLICATE, (pure.Reply(1, refusal(5, 1)),))
    assert (receiver.state, receiver.data.served) == (State.READY, None)


def test_a_duplicate_of_the_pending_version_has_no_effect(receiver: Receiver) -> None:
    receiver.take(pure.UpdateArrived(1, 5, 1))

    step = receiver.take(pure.UpdateArrived(1, 5, 1))

    assert (step.input, step.effects) == (ReceiverInput.DUPLICATE, ())


def test_a_newer_version_supersedes_the_pending_one(receiver: Receiver) -> None:
    receiver.take(pure.UpdateArrived(1, 5, 1))

    step = receiver.take(pure.UpdateArrived(1, 5, 2))

    assert step.input is ReceiverInput.NEWER
    assert step.effects == (pure.Tell(1, (5, 1), RefusalKind.SUPERSEDED),)
    assert receiver.data.pending == (5, 2)


def test_g4_an_older_version_is_stale(receiver: Receiver) -> None:
    receiver.applies(5, 2)

    step = receiver.take(pure.UpdateArrived(1, 5, 1))

    assert (step.input, step.effects) == (ReceiverInput.STALE, (pure.Tell(1, (5, 1), RefusalKind.STALE),))


def test_g4_a_sender_below_the_fence_is_rejected_even_after_its_link_was_lost(receiver: Receiver) -> None:
    receiver.take(pure.LinkDown(1))

    step = receiver.take(pure.HelloArrived(2, 4))

    assert step.input is ReceiverInput.REJECTED
    reject, close = step.effects
    assert isinstance(reject, pure.Reject)
    assert (reject.kind, close) == (RefusalKind.FENCED, pure.CloseLink(2))


def test_g4_an_update_below_the_fence_is_stale(receiver: Receiver) -> None:
    assert receiver.take(pure.UpdateArrived(1, 4, 9)).input is ReceiverInput.STALE


def test_version_1_of_a_restarted_trainer_is_accepted_after_version_9_of_the_old_one(receiver: Receiver) -> None:
    receiver.applies(5, 9)
    receiver.take(pure.HelloArrived(2, 6))

    assert receiver.take(pure.UpdateArrived(2, 6, 1)).input is ReceiverInput.UPDATE


def test_a_takeover_closes_the_old_link_and_drops_the_pending_version_but_not_the_served_one(
    receiver: Receiver,
) -> None:
    receiver.applies(5, 1)
    receiver.take(pure.UpdateArrived(1, 5, 2))

    step = receiver.take(pure.HelloArrived(2, 6))

    fenced = pure.Disown(1, 5, RefusalKind.FENCED, "this worker has seen a newer sender")
    assert (step.input, step.effects) == (ReceiverInput.TAKEOVER, (fenced, pure.CloseLink(1), pure.Greet(2)))
    assert (receiver.data.pending, receiver.data.served) == (None, (5, 1))


def test_g10_a_takeover_on_the_same_link_answers_the_pending_update(receiver: Receiver) -> None:
    receiver.take(pure.UpdateArrived(1, 5, 2))

    step = receiver.take(pure.HelloArrived(1, 6))

    assert (step.input, step.effects) == (
        ReceiverInput.TAKEOVER,
        (pure.Tell(1, (5, 2), RefusalKind.STALE), pure.Greet(1)),
    )
    assert receiver.take(pure.HelloArrived(1, 7)).effects == (pure.Greet(1),)


def test_a_sender_that_reconnects_on_a_new_link_is_not_fenced_on_its_old_link(receiver: Receiver) -> None:
    assert receiver.take(pure.HelloArrived(2, 5)).effects == (pure.CloseLink(1), pure.Greet(2))


NEWEST = replace(pure.ReceiverData(), link=2, fence=5, senders_number=3)


@pytest.mark.parametrize("misfit", ["", "shape differs"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_handshake_over_a_replaced_link_only_closes_that_link(number: int, misfit: str) -> None:
    step = pure.step(State.READY, NEWEST, pure.HelloArrived(1, 5, misfit, number))

    assert (step.input, step.to, step.data) == (None, State.READY, NEWEST)
    assert step.effects == (pure.CloseLink(1),)


@pytest.mark.parametrize(("incarnation", "number"), [(5, 0), (5, 3), (5, 4), (6, 1)])
def test_a_handshake_over_another_link_takes_over_unless_its_link_was_replaced(incarnation: int, number: int) -> None:
    step = pure.step(State.READY, NEWEST, pure.HelloArrived(1, incarnation, "", number))

    assert step.input is ReceiverInput.TAKEOVER
    assert step.data == replace(NEWEST, link=1, fence=incarnation, senders_number=number)


def test_a_handshake_of_a_sender_that_did_not_number_its_links_takes_over() -> None:
    unnumbered = replace(NEWEST, senders_number=0)
    assert pure.step(State.READY, unnumbered, pure.HelloArrived(1, 5, "", 2)).input is ReceiverInput.TAKEOVER


def test_a_repeated_handshake_over_the_current_link_keeps_the_links_number() -> None:
    step = pure.step(State.READY, NEWEST, pure.HelloArrived(2, 5, "", 1))
    assert (step.input, step.data) == (ReceiverInput.DUPLICATE, NEWEST)


@pytest.mark.parametrize("ends", [pure.LinkDown(2), pure.Goodbye(2, 5), pure.Broken(), pure.Close(), pure.Fail("out")])
def test_after_the_current_link_ends_an_older_link_of_its_sender_is_accepted(ends: pure.Event) -> None:
    state = State.PENDING_ASYNC if ends == pure.Broken() else State.READY
    step = pure.step(state, NEWEST, ends)

    assert (step.data.link, step.data.senders_number) == (None, 0)
    if step.to is State.UNINITIALIZED:
        again = pure.step(step.to, step.data, pure.HelloArrived(1, 5, "", 1))
        assert (again.input, again.data.senders_number) == (ReceiverInput.CONNECT, 1)


@pytest.mark.parametrize(
    ("event", "to"),
    [
        (pure.LinkDown(1, "no memory"), State.UNINITIALIZED),
        (pure.Fail("no memory", "line 1"), State.CLOSED),
        (pure.Broken("no memory", "line 1"), State.CLOSED),
    ],
)
def test_a_failure_sends_a_refusal_with_the_reason_and_no_goodbye(
    receiver: Receiver, event: pure.Event, to: State
) -> None:
    receiver.take(pure.UpdateArrived(1, 5, 1))

    step = receiver.take(event)

    trace = "" if isinstance(event, pure.LinkDown) else "line 1"
    assert step.effects == (pure.Disown(1, 5, RefusalKind.FAILED, "no memory", trace), pure.CloseLink(1))
    assert (step.to, receiver.data.pending) == (to, None)


def test_only_a_close_says_goodbye(receiver: Receiver) -> None:
    assert receiver.take(pure.Close()).effects == (pure.Leave(1),)


def test_a_link_that_the_peer_closed_is_closed_without_a_message(receiver: Receiver) -> None:
    assert receiver.take(pure.LinkDown(1)).effects == (pure.CloseLink(1),)


def test_a_handshake_with_a_mismatched_layout_is_rejected_with_its_reason(receiver: Receiver) -> None:
    step = receiver.take(pure.HelloArrived(2, 6, "shape differs"))

    assert step.input is ReceiverInput.REJECTED
    assert isinstance(step.effects[0], pure.Reject)
    assert step.effects[0].reason == "shape differs"
    assert receiver.data.link == 1


@pytest.mark.parametrize(("link", "incarnation"), [(2, 5), (1, 6)])
def test_an_update_without_a_handshake_raises_protocol_error(receiver: Receiver, link: int, incarnation: int) -> None:
    with pytest.raises(ProtocolError):
        receiver.take(pure.UpdateArrived(link, incarnation, 1))


@pytest.mark.parametrize("event", [pure.LinkDown(2), pure.Goodbye(2, 5), pure.Goodbye(2, 4)])
def test_the_end_of_a_link_that_is_not_the_current_link_is_late_and_closes_that_link(
    receiver: Receiver, event: pure.Event
) -> None:
    step = receiver.take(event)

    assert (step.input, step.effects, receiver.data.link) == (None, (pure.CloseLink(2),), 1)


def test_a_failure_of_another_link_is_sent_over_that_link(receiver: Receiver) -> None:
    step = receiver.take(pure.LinkDown(2, "no memory"))

    assert step.effects == (pure.Disown(2, 5, RefusalKind.FAILED, "no memory"), pure.CloseLink(2))
    assert (step.input, receiver.data.link) == (None, 1)


def test_the_goodbye_of_the_current_sender_ends_its_link(receiver: Receiver) -> None:
    step = receiver.take(pure.Goodbye(1, 5))

    assert (step.input, step.to, step.effects) == (
        ReceiverInput.LINK_DOWN,
        State.UNINITIALIZED,
        (pure.CloseLink(1),),
    )


@pytest.mark.parametrize("incarnation", [4, 6])
def test_the_goodbye_of_another_sender_over_the_current_link_changes_nothing(
    receiver: Receiver, incarnation: int
) -> None:
    step = receiver.take(pure.Goodbye(1, incarnation))

    assert (step.input, step.effects, receiver.data.link) == (None, (), 1)


def test_the_last_decision_is_kept_across_links(receiver: Receiver) -> None:
    receiver.applies(5, 1)
    receiver.take(pure.LinkDown(1))
    receiver.take(pure.HelloArrived(2, 5))

    assert receiver.take(pure.UpdateArrived(2, 5, 1)).effects == (pure.Reply(2, ack(5, 1)),)


def test_a_broken_receiver_serves_nothing_and_is_closed_for_good(receiver: Receiver) -> None:
    receiver.applies(5, 1)
    receiver.take(pure.UpdateArrived(1, 5, 2))

    step = receiver.take(pure.Broken())

    assert (step.to, step.effects[-1], receiver.data.served) == (State.CLOSED, pure.CloseLink(1), None)
    with pytest.raises(StateError):
        receiver.take(pure.UpdateArrived(1, 5, 3))


def test_g9_close_keeps_the_served_version_and_drops_the_pending_one(receiver: Receiver) -> None:
    receiver.applies(5, 1)
    receiver.take(pure.UpdateArrived(1, 5, 2))
    receiver.take(pure.Close())

    assert (receiver.state, receiver.data.served, receiver.data.pending) == (State.CLOSED, (5, 1), None)
    assert receiver.take(pure.Close()).to is State.CLOSED


def test_a_deferred_ack_waits_until_its_version_was_passed_on(receiver: Receiver) -> None:
    receiver.take(pure.UpdateArrived(1, 5, 1))

    assert receiver.take(pure.Defer(ack(5, 1))).effects == ()
    assert (receiver.state, receiver.data.served) == (State.AWAITING_ACK, (5, 1))
    with pytest.raises(StateError):
        receiver.take(pure.Answered())

    nested = SyncReport(model_id="policy", version=1, incarnation=0, outcomes={})
    changed = replace(ack(5, 1), nested=nested)
    assert receiver.take(pure.SendAck(nested)).effects == (pure.Reply(1, changed),)
    assert receiver.take(pure.Answered()).to is State.READY
    assert receiver.take(pure.UpdateArrived(1, 5, 1)).effects == (pure.Reply(1, changed),)


def deferring(receiver: Receiver) -> Receiver:
    receiver.take(pure.UpdateArrived(1, 5, 1))
    receiver.take(pure.Defer(ack(5, 1)))
    return receiver


def test_a_deferred_ack_is_sent_over_its_senders_newest_link(receiver: Receiver) -> None:
    deferring(receiver).take(pure.LinkDown(1))
    receiver.take(pure.HelloArrived(2, 5))

    assert receiver.take(pure.UpdateArrived(2, 5, 1)).effects == ()
    assert receiver.take(pure.SendAck()).effects == (pure.Reply(2, ack(5, 1)),)


def test_a_deferred_ack_is_sent_when_its_sender_sends_a_newer_version(receiver: Receiver) -> None:
    deferring(receiver).take(pure.LinkDown(1))
    receiver.take(pure.HelloArrived(2, 5))

    step = receiver.take(pure.UpdateArrived(2, 5, 2))

    assert (step.input, step.effects) == (ReceiverInput.UPDATE, (pure.Reply(2, ack(5, 1)),))
    assert (receiver.data.answer, receiver.data.pending) == (ack(5, 1), (5, 2))
    assert receiver.take(pure.SendAck()).input is None


def test_a_deferred_ack_is_not_sent_to_a_newer_sender(receiver: Receiver) -> None:
    deferring(receiver).take(pure.HelloArrived(2, 6))

    step = receiver.take(pure.SendAck())

    assert (step.input, step.effects, receiver.data.answer) == (ReceiverInput.SEND_ACK, (), ack(5, 1))


def test_a_takeover_on_the_same_link_sends_the_deferred_ack_before_the_new_handshake(
    receiver: Receiver,
) -> None:
    deferring(receiver)

    step = receiver.take(pure.HelloArrived(1, 6))

    assert step.effects == (pure.Reply(1, ack(5, 1)), pure.Greet(1))


@pytest.mark.parametrize("event", [pure.LinkDown(1), pure.HelloArrived(2, 5)])
def test_a_decision_on_a_newer_version_replaces_a_deferred_ack(receiver: Receiver, event: pure.Event) -> None:
    deferring(receiver).take(event)
    receiver.take(pure.HelloArrived(2, 5))
    receiver.applies(5, 2)

    step = receiver.take(pure.SendAck())

    assert (step.input, step.effects, receiver.data.answer) == (None, (), ack(5, 2))


def test_g9_a_closed_receiver_sends_no_deferred_ack(receiver: Receiver) -> None:
    deferring(receiver).take(pure.Close())
    before = receiver.data

    assert receiver.take(pure.SendAck()).input is None
    assert receiver.data == before


@pytest.mark.parametrize("closed", [False, True])
def test_weights_written_by_hand_are_served_as_no_version_and_the_last_decision_stays(
    receiver: Receiver, closed: bool
) -> None:
    receiver.applies(5, 1)
    if closed:
        receiver.take(pure.Close())
    before = receiver.data

    step = receiver.take(pure.Invalidate())

    assert (step.input, step.effects) == (ReceiverInput.INVALIDATED, ())
    assert receiver.data == replace(before, served=None)


@pytest.mark.parametrize("down", [False, True])
def test_g2_a_version_that_was_overwritten_by_hand_is_applied_again_over_a_new_link(
    receiver: Receiver, down: bool
) -> None:
    receiver.applies(5, 1)
    receiver.take(pure.Invalidate())
    if down:
        receiver.take(pure.LinkDown(1))
    receiver.take(pure.HelloArrived(2, 5))

    assert receiver.take(pure.UpdateArrived(2, 5, 1)).input is ReceiverInput.UPDATE


@pytest.mark.parametrize("event", [pure.LinkDown(1), pure.HelloArrived(2, 5)])
def test_g2_a_version_overwritten_before_its_deferred_ack_was_sent_is_not_acked_over_a_new_link(
    receiver: Receiver, event: pure.Event
) -> None:
    deferring(receiver).take(pure.Invalidate())
    receiver.take(event)
    receiver.take(pure.HelloArrived(2, 5))

    assert receiver.take(pure.SendAck()).effects == ()
    assert receiver.take(pure.UpdateArrived(2, 5, 1)).input is ReceiverInput.UPDATE


def test_g2_a_deferred_ack_is_sent_over_the_same_link_although_its_version_was_overwritten(
    receiver: Receiver,
) -> None:
    deferring(receiver).take(pure.Invalidate())

    assert receiver.take(pure.SendAck()).effects == (pure.Reply(1, ack(5, 1)),)


def test_g6_a_refused_version_stays_refused_over_a_new_link_although_the_model_was_overwritten(
    receiver: Receiver,
) -> None:
    receiver.applies(5, 1)
    receiver.take(pure.UpdateArrived(1, 5, 2))
    receiver.take(pure.Refused(refusal(5, 2)))
    receiver.take(pure.Answered())
    receiver.take(pure.Invalidate())
    receiver.take(pure.HelloArrived(2, 5))

    step = receiver.take(pure.UpdateArrived(2, 5, 2))

    assert (step.input, step.effects) == (ReceiverInput.DUPLICATE, (pure.Reply(2, refusal(5, 2)),))
