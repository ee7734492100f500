"""The exact results of the pure halves: texts of errors, reasons, and every field of an outcome."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from weightsync.errors import ConfigurationError, ProtocolError, RefusedError, StateError, WorkerLostError
from weightsync.protocol import receiver, sender
from weightsync.protocol._tables import ReceiverInput, RefusalKind, SenderInput, State
from weightsync.protocol.machine import RECEIVER_ALLOWS
from weightsync.protocol.messages import Ack, Bye, Hello, Refusal
from weightsync.protocol.report import Evidence, Outcome, OutcomeKind, SyncReport

UP = {
    0: sender.Entry(1, link_state=sender.LinkState.UP),
    1: sender.Entry(2, link_state=sender.LinkState.UP),
}
DATA = sender.SenderData(incarnation=7, workers=UP)
SENT = sender.step(State.READY, DATA, sender.Send(None)).data


def lost(reason: str, fence: int = 0) -> sender.Entry:
    return sender.Entry(1, link_state=sender.LinkState.LOST, reason=reason, fence=fence)


# ---------------------------------------------------------------------------------------------- the sender's


def test_an_unknown_worker() -> None:
    with pytest.raises(ConfigurationError) as caught:
        sender.step(State.READY, replace(DATA, workers={2: UP[1], 0: UP[0]}), sender.Send((5,)))

    assert str(caught.value) == (
        "worker 5 is not among the workers [0, 2]. Nothing was sent or changed; add_worker() adds it."
    )


def test_no_worker_at_all() -> None:
    with pytest.raises(ConfigurationError) as caught:
        sender.step(State.READY, DATA, sender.Send(()))

    assert str(caught.value) == "worker_ids is empty: name at least one worker. Nothing was sent or changed."


@pytest.mark.parametrize(("fences", "fence"), [((0, 0), None), ((0, 9), 9), ((11, 9), 11)])
def test_every_target_is_lost(fences: tuple[int, int], fence: int | None) -> None:
    workers = {0: lost("died in X.", fences[0]), 1: lost("left", fences[1])}
    with pytest.raises(WorkerLostError) as caught:
        sender.step(State.READY, replace(DATA, workers=workers), sender.Send(None))

    usual = "add_worker() reconnects a worker on a new link, remove_worker() removes it."
    fenced = (
        "A newer trainer has taken over the workers that are FENCED, or an earlier trainer's clock was ahead of this "
        "one's. To take them back, close this scheme, and pass fence=error.fence to init_on_sender() of a new one."
    )
    steps = [*([usual] if 0 in fences else []), *([fenced] if fence else [])]
    said = (
        "every target is lost already: worker 0: died in X; worker 1: left. Nothing was sent and no version was used. "
    )
    assert str(caught.value) == said + "\n".join(steps)
    assert (caught.value.report, caught.value.lost, caught.value.fence) == (None, {0: "died in X.", 1: "left"}, fence)


def test_every_target_has_refused() -> None:
    refused = replace(lost("no"), link_state=sender.LinkState.REFUSED)
    with pytest.raises(RefusedError) as caught:
        sender.step(State.READY, replace(DATA, workers={0: refused}), sender.Send(None))

    assert str(caught.value) == (
        "every target has refused the handshake: worker 0: no. Nothing was sent and no version was used. Correct the "
        "workers' model or the trainer's, then add the workers again with add_worker()."
    )
    assert (caught.value.report, caught.value.refused) == (None, {0: "no"})


def test_the_reason_of_the_last_may_ask() -> None:
    with pytest.raises(WorkerLostError, match=r"worker 0: crash\?; worker 1: why\? Nothing was sent"):
        sender.step(State.READY, replace(DATA, workers={0: lost("crash?"), 1: lost("why?")}), sender.Send(None))


def test_nobody_is_left() -> None:
    with pytest.raises(ConfigurationError) as caught:
        sender.step(State.READY, replace(DATA, workers={}, left={4: "done", 2: "enough"}), sender.Send(None))

    assert str(caught.value) == (
        "there are no workers to send to. Worker 4 left: done. Worker 2 left: enough. Nothing was sent and no version "
        "was used. add_worker() adds a worker; WeightSender.send(allow_empty=True) accepts that there are none."
    )


def test_one_that_says_goodbye_while_it_owes_an_answer() -> None:
    bye = Bye(model_id="policy", incarnation=7, reason="done")
    step = sender.step(State.AWAITING_ACK, SENT, sender.Answer(0, 1, bye))

    outcomes = {0: Outcome(kind=OutcomeKind.LOST, reason="said goodbye: done")}
    assert step.data.outstanding == sender.Outstanding(1, {1: 2}, outcomes)


def test_a_deferred_answer_has_not_left() -> None:
    data = receiver.ReceiverData(link=1, fence=7, answer=receiver.Deferred(Ack(model_id="m", incarnation=7, version=1)))
    with pytest.raises(StateError) as caught:
        receiver.name(State.AWAITING_ACK, data, receiver.Answered())

    assert (caught.value.machine, caught.value.allowed) == ("receiver", RECEIVER_ALLOWS[State.AWAITING_ACK])


def test_a_senders_goodbye_takes_its_link_and_what_it_sent() -> None:
    data = receiver.ReceiverData(link=1, fence=7, pending=(7, 1))
    step = receiver.step(State.PENDING_ASYNC, data, receiver.Goodbye(1, 7))

    assert (step.data.link, step.data.pending, step.effects) == (None, None, (receiver.CloseLink(1),))


def test_one_target_that_is_lost_already_is_reported_beside_the_others() -> None:
    workers = {0: lost("died", 9), 1: UP[1]}
    after = sender.step(State.READY, replace(DATA, workers=workers), sender.Send(None))

    outcome = Outcome(kind=OutcomeKind.LOST, reason="died", fence=9)
    assert after.data.outstanding == sender.Outstanding(1, {1: 2}, {0: outcome})
    assert after.effects == (sender.Dispatch(1, 2, 1),)
    assert {worker: entry.due for worker, entry in after.data.workers.items()} == {0: 1, 1: 1}
    assert (after.data.due_all, after.data.version) == (1, 1)


def test_a_send_to_some_is_due_to_those() -> None:
    after = sender.step(State.READY, DATA, sender.SendAsync((1, 1))).data

    assert after.outstanding == sender.Outstanding(1, {1: 2}, {})
    assert ({w: e.due for w, e in after.workers.items()}, after.due_all) == ({0: 0, 1: 1}, 0)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (sender.Close(), "the sender was closed"),
        (sender.Abandon(), "given up by the caller"),
        (sender.Abandon("superseded by version 2"), "superseded by version 2"),
    ],
)
def test_what_is_given_up_says_why(event: sender.Event, reason: str) -> None:
    applied = Outcome(kind=OutcomeKind.APPLIED)
    data = replace(SENT, outstanding=sender.Outstanding(1, {1: 2}, {0: applied}), not_caught_up={0: applied})
    data = replace(data, left={7: "done"})
    step = sender.step(State.PENDING_ASYNC, data, event)

    given_up = Outcome(kind=OutcomeKind.ABANDONED, reason=reason)
    concluded = sender.Conclude(sender.Outstanding(1, {}, {0: applied, 1: given_up}), {0: applied}, {7: "done"})
    assert step.effects[-1] == concluded
    assert (step.data.outstanding, step.data.not_caught_up, step.data.left) == (None, {}, {})


def test_closing_closes_the_links_that_are_not_lost() -> None:
    workers = {0: lost("died"), 1: UP[1], 2: sender.Entry(3)}
    step = sender.step(State.READY, replace(DATA, workers=workers), sender.Close())

    assert step.effects == (sender.CloseLink(1, 2), sender.CloseLink(2, 3))


def test_a_lost_link() -> None:
    workers = {**UP, 0: replace(UP[0], catching=1)}
    step = sender.step(State.AWAITING_ACK, replace(SENT, workers=workers), sender.LinkLost(0, 1, "it broke"))

    entry = sender.Entry(1, link_state=sender.LinkState.LOST, reason="it broke", fence=0, catching=0)
    assert step.data.workers == {0: entry, 1: UP[1]}
    assert step.effects == (sender.CloseLink(0, 1),)
    outcomes = {0: Outcome(kind=OutcomeKind.LOST, reason="it broke", fence=0)}
    assert step.data.outstanding == sender.Outstanding(1, {1: 2}, outcomes)
    assert step.input is SenderInput.LOST


@pytest.mark.parametrize(
    ("fence", "version", "said", "reason", "newer"),
    [
        (9, 1, "gone over", "FENCED: gone over", 9),
        (9, 0, "", "FENCED: FENCED", 9),
        (7, 0, "another key", "FENCED: another key", 0),
        (0, 0, "another key", "FENCED: another key", 0),
    ],
)
def test_a_refusal_that_ends_a_link(fence: int, version: int, said: str, reason: str, newer: int) -> None:
    refusal = Refusal(
        model_id="policy", incarnation=7, version=version, kind=RefusalKind.FENCED, reason=said, fence=fence
    )
    step = sender.step(State.AWAITING_ACK, SENT, sender.Answer(0, 1, refusal))

    assert step.data.workers[0].link_state is sender.LinkState.LOST
    assert (step.data.workers[0].reason, step.data.workers[0].fence) == (reason, newer)


def test_an_ack_is_an_outcome_with_all_that_it_says() -> None:
    nested = SyncReport(model_id="inner", version=3, incarnation=4, outcomes={})
    ack = Ack(model_id="policy", incarnation=7, version=1, seconds=0.25, evidence=Evidence.CALL, nested=nested)
    step = sender.step(State.AWAITING_ACK, SENT, sender.Answer(0, 1, ack))

    outcome = Outcome(kind=OutcomeKind.APPLIED, evidence=Evidence.CALL, apply_s=0.25, nested=nested)
    assert step.data.outstanding == sender.Outstanding(1, {1: 2}, {0: outcome})
    assert step.data.workers[0].served == 1


@pytest.mark.parametrize(("said", "reason"), [("too small", "too small"), ("", "REFUSED")])
def test_a_refusal_is_an_outcome_with_all_that_it_says(said: str, reason: str) -> None:
    refusal = Refusal(
        model_id="policy",
        incarnation=7,
        version=1,
        kind=RefusalKind.REFUSED,
        reason=said,
        remote_traceback="Traceback",
        fence=5,
        evidence=Evidence.CALL,
    )
    step = sender.step(State.AWAITING_ACK, SENT, sender.Answer(0, 1, refusal))

    outcome = Outcome(
        kind=OutcomeKind.REFUSED, reason=reason, remote_traceback="Traceback", evidence=Evidence.CALL, fence=5
    )
    assert step.data.outstanding == sender.Outstanding(1, {1: 2}, {0: outcome})
    assert step.data.workers[0].served == UP[0].served


@pytest.mark.parametrize(("version", "left"), [(1, 3), (2, 3), (3, 0), (4, 0)])
def test_an_answer_to_a_version_not_below_the_one_due_ends_the_catching_up(version: int, left: int) -> None:
    data = replace(SENT, version=version, workers={**UP, 0: replace(UP[0], catching=3)})
    data = replace(data, outstanding=sender.Outstanding(version, {0: 1, 1: 2}, {}))
    ack = Ack(model_id="policy", incarnation=7, version=version)
    step = sender.step(State.PENDING_ASYNC, data, sender.Answer(0, 1, ack))

    assert (step.input, step.data.workers[0].catching) == (SenderInput.REPLY, left)


@pytest.mark.parametrize("kind", [RefusalKind.REFUSED, RefusalKind.SUPERSEDED, RefusalKind.STALE])
def test_only_a_joiner_that_refused_is_told_of_as_not_caught_up(kind: RefusalKind) -> None:
    before = Outcome(kind=OutcomeKind.REFUSED, reason="another")
    data = replace(DATA, workers={**UP, 0: replace(UP[0], catching=3)}, not_caught_up={1: before})
    refusal = Refusal(model_id="policy", incarnation=7, version=3, kind=kind, reason="why")
    step = sender.step(State.READY, data, sender.Answer(0, 1, refusal))

    refused = Outcome(kind=OutcomeKind.REFUSED, reason="why", evidence=Evidence.ANSWER)
    refused_ones = {0: refused} if kind is RefusalKind.REFUSED else {}
    assert step.input is SenderInput.CAUGHT_UP
    assert step.data.not_caught_up == {1: before, **refused_ones}


def test_what_nobody_is_owed_is_counted() -> None:
    data = replace(DATA, stale=3, late=5)
    ack = Ack(model_id="policy", incarnation=7, version=9)
    stale = sender.step(State.READY, data, sender.Answer(0, 1, ack))
    late = sender.step(State.READY, data, sender.Deadline(1))

    assert (stale.input, stale.to, stale.data) == (SenderInput.STALE, State.READY, replace(data, stale=4))
    assert (late.input, late.to, late.data) == (None, State.READY, replace(data, late=6))


@pytest.mark.parametrize(
    ("event", "named"),
    [(sender.Deadline(1), SenderInput.DEADLINE), (sender.Interrupted(1), SenderInput.INTERRUPTED)],
)
def test_the_end_of_a_wait_has_its_own_name_and_comes_while_somebody_waits(
    event: sender.Event, named: SenderInput
) -> None:
    waiting = sender.step(State.AWAITING_ACK, SENT, event)
    gone = sender.step(State.PENDING_ASYNC, SENT, event)

    assert (waiting.input, waiting.to, waiting.data) == (named, State.PENDING_ASYNC, SENT)
    assert (gone.input, gone.to, gone.data.late) == (None, State.PENDING_ASYNC, 1)


def test_an_answer_over_a_closed_sender_is_late() -> None:
    step = sender.step(State.CLOSED, DATA, sender.Answer(0, 1, Hello(model_id="policy", incarnation=7)))

    assert (step.input, step.to, step.data.late) == (None, State.CLOSED, 1)


@pytest.mark.parametrize("state", [State.READY, State.PENDING_ASYNC, State.AWAITING_ACK])
def test_who_joins_again_or_leaves_is_lost_first(state: State) -> None:
    replaced = sender.LinkLost(0, 1, "replaced by a new link")
    assert sender.joining(state, DATA, 0, 9) == (replaced, sender.Join(0, 9))
    assert sender.removal(state, DATA, 1, "it left") == (sender.LinkLost(1, 2, "it left"), sender.Remove(1))


def test_before_connect_nobody_is_lost() -> None:
    assert sender.joining(State.UNINITIALIZED, DATA, 0, 9) == (sender.Join(0, 9),)
    assert sender.removal(State.UNINITIALIZED, DATA, 1, "it left") == (sender.Remove(1),)


def test_after_close_nobody_is_lost_and_nobody_leaves() -> None:
    assert sender.joining(State.CLOSED, DATA, 0, 9) == (sender.Join(0, 9),)
    with pytest.raises(StateError):
        sender.removal(State.CLOSED, DATA, 1, "it left")


def test_who_is_unknown_joins_and_does_not_leave() -> None:
    assert sender.joining(State.READY, DATA, 5, 9) == (sender.Join(5, 9),)
    with pytest.raises(ConfigurationError, match="worker 5 is not among the workers"):
        sender.removal(State.READY, DATA, 5, "it left")


def test_who_is_lost_already_is_not_lost_again() -> None:
    data = replace(DATA, workers={0: lost("died")})
    assert sender.joining(State.READY, data, 0, 9) == (sender.Join(0, 9),)
    assert sender.removal(State.READY, data, 0, "it left") == (sender.Remove(0),)


@pytest.mark.parametrize(("due_all", "due", "sent"), [(0, 0, 0), (4, 2, 4), (2, 4, 4)])
def test_a_joiner_is_due_the_newest(due_all: int, due: int, sent: int) -> None:
    data = replace(DATA, due_all=due_all, workers={0: replace(lost("died"), due=due), 1: UP[1]})
    step = sender.step(State.READY, data, sender.Join(0, 9))

    assert step.data.workers == {0: sender.Entry(9, due=sent, catching=sent), 1: UP[1]}
    assert step.effects == (sender.Greet(0, 9, sent),)


def test_before_connect_a_link_that_is_replaced_or_given_up_is_closed() -> None:
    data = sender.SenderData(workers=UP)
    assert sender.step(State.UNINITIALIZED, data, sender.Join(0, 9)).effects == (sender.CloseLink(0, 1),)
    removed = sender.step(State.UNINITIALIZED, data, sender.Remove(1))
    assert (removed.effects, removed.data.workers) == ((sender.CloseLink(1, 2),), {0: UP[0]})
    gone = sender.SenderData(workers={0: lost("died")})
    assert sender.step(State.UNINITIALIZED, gone, sender.Remove(0)).effects == ()


# --------------------------------------------------------------------------------------------- the receiver's

SERVING = receiver.ReceiverData(
    link=1, fence=7, decided=(7, 2), answer=Ack(model_id="policy", incarnation=7, version=2), served=(7, 2)
)


@pytest.mark.parametrize(("incarnation", "link"), [(7, 5), (8, 1)])
def test_an_update_without_a_handshake(incarnation: int, link: int) -> None:
    with pytest.raises(ProtocolError) as caught:
        receiver.step(State.READY, SERVING, receiver.UpdateArrived(link, incarnation, 3))

    assert str(caught.value) == (
        f"version 3 of incarnation {incarnation} arrived over a link without a handshake for that incarnation. "
        "The link is closed; nothing was applied."
    )


@pytest.mark.parametrize(
    ("incarnation", "misfit", "kind", "reason"),
    [
        (6, "", RefusalKind.FENCED, "this worker has seen a newer sender"),
        (6, "no such layer", RefusalKind.FENCED, "this worker has seen a newer sender"),
        (7, "no such layer", RefusalKind.REFUSED, "no such layer"),
    ],
)
@pytest.mark.parametrize("link", [1, 5])
def test_a_handshake_that_is_rejected(incarnation: int, misfit: str, kind: RefusalKind, reason: str, link: int) -> None:
    step = receiver.step(State.READY, SERVING, receiver.HelloArrived(link, incarnation, misfit))

    rejection = receiver.Reject(link, incarnation, kind, reason)
    assert step.effects == ((rejection,) if link == 1 else (rejection, receiver.CloseLink(link)))
    assert (step.input, step.to, step.data) == (ReceiverInput.REJECTED, State.READY, SERVING)


TAKEN_OVER = receiver.Disown(1, 7, RefusalKind.FENCED, "this worker has seen a newer sender")
OUTDATED = receiver.Tell(1, (7, 3), RefusalKind.STALE)


@pytest.mark.parametrize(("link", "old"), [(1, (OUTDATED,)), (5, (TAKEN_OVER, receiver.CloseLink(1)))])
def test_a_newer_sender_may_speak_over_the_link_of_the_one_before(link: int, old: tuple[receiver.Effect, ...]) -> None:
    step = receiver.step(State.READY, replace(SERVING, pending=(7, 3)), receiver.HelloArrived(link, 8))

    assert (step.input, step.effects) == (ReceiverInput.TAKEOVER, (*old, receiver.Greet(link)))
    assert step.data == replace(SERVING, link=link, fence=8)


def test_the_decided_version_once_more_gets_its_very_answer() -> None:
    step = receiver.step(State.READY, SERVING, receiver.UpdateArrived(1, 7, 2))

    assert (step.input, step.data) == (ReceiverInput.DUPLICATE, SERVING)
    assert step.effects == (receiver.Reply(1, SERVING.answer),)  # type: ignore[arg-type]


def test_the_pending_version_once_more_gets_none() -> None:
    data = replace(SERVING, pending=(7, 3))
    step = receiver.step(State.PENDING_ASYNC, data, receiver.UpdateArrived(1, 7, 3))

    assert (step.input, step.data, step.effects) == (ReceiverInput.DUPLICATE, data, ())


def test_a_loss_that_is_late_changes_nothing() -> None:
    for state, link in ((State.READY, 5), (State.CLOSED, 1)):
        step = receiver.step(state, SERVING, receiver.LinkDown(link))
        assert (step.input, step.to, step.data) == (None, state, SERVING)


def test_what_was_written_by_hand_is_served_by_no_version() -> None:
    assert receiver.step(State.READY, SERVING, receiver.Invalidate()).data == replace(SERVING, served=None)
