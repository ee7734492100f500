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


def test_the_error_for_an_unknown_target_lists_the_known_workers() -> None:
    with pytest.raises(ConfigurationError) as caught:
        sender.step(State.READY, replace(DATA, workers={2: UP[1], 0: UP[0]}), sender.Send((5,)))

    assert str(caught.value) == (
        "worker 5 is not among the workers [0, 2]. Nothing was sent or changed; add_worker() adds it."
    )


def test_the_error_for_an_empty_list_of_targets() -> None:
    with pytest.raises(ConfigurationError) as caught:
        sender.step(State.READY, DATA, sender.Send(()))

    assert str(caught.value) == "worker_ids is empty: name at least one worker. Nothing was sent or changed."


@pytest.mark.parametrize(("fences", "fence"), [((0, 0), None), ((0, 9), 9), ((11, 9), 11)])
def test_the_error_if_every_target_is_lost_tells_how_to_get_workers_back(
    fences: tuple[int, int], fence: int | None
) -> None:
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


def test_the_error_if_every_target_refused_the_handshake() -> None:
    refused = replace(lost("no"), link_state=sender.LinkState.REFUSED)
    with pytest.raises(RefusedError) as caught:
        sender.step(State.READY, replace(DATA, workers={0: refused}), sender.Send(None))

    assert str(caught.value) == (
        "every target has refused the handshake: worker 0: no. Nothing was sent and no version was used. Correct the "
        "workers' model or the trainer's, then add the workers again with add_worker()."
    )
    assert (caught.value.report, caught.value.refused) == (None, {0: "no"})


def test_a_reason_that_ends_with_a_question_mark_gets_no_full_stop() -> None:
    with pytest.raises(WorkerLostError, match=r"worker 0: crash\?; worker 1: why\? Nothing was sent"):
        sender.step(State.READY, replace(DATA, workers={0: lost("crash?"), 1: lost("why?")}), sender.Send(None))


def test_the_error_for_a_send_without_workers_names_those_that_left_and_why() -> None:
    with pytest.raises(ConfigurationError) as caught:
        sender.step(State.READY, replace(DATA, workers={}, left={4: "done", 2: "enough"}), sender.Send(None))

    assert str(caught.value) == (
        "there are no workers to send to. Worker 4 left: done. Worker 2 left: enough. Nothing was sent and no version "
        "was used. add_worker() adds a worker; WeightSender.send(allow_empty=True) accepts that there are none."
    )


def test_a_worker_that_says_goodbye_while_it_owes_an_answer_is_lost() -> None:
    bye = Bye(model_id="policy", incarnation=7, reason="done")
    step = sender.step(State.AWAITING_ACK, SENT, sender.Answer(0, 1, bye))

    outcomes = {0: Outcome(kind=OutcomeKind.LOST, reason="said goodbye: done")}
    assert step.data.outstanding == sender.Outstanding(1, {1: 2}, outcomes)


def test_a_deferred_ack_cannot_be_reported_as_sent() -> None:
    data = receiver.ReceiverData(link=1, fence=7, answer=receiver.Deferred(Ack(model_id="m", incarnation=7, version=1)))
    with pytest.raises(StateError) as caught:
        receiver.name(State.AWAITING_ACK, data, receiver.Answered())

    assert (caught.value.machine, caught.value.allowed) == ("receiver", RECEIVER_ALLOWS[State.AWAITING_ACK])


def test_a_senders_goodbye_closes_its_link_and_drops_its_pending_update() -> None:
    data = receiver.ReceiverData(link=1, fence=7, pending=(7, 1))
    step = receiver.step(State.PENDING_ASYNC, data, receiver.Goodbye(1, 7))

    assert (step.data.link, step.data.pending, step.effects) == (None, None, (receiver.CloseLink(1),))


def test_a_target_that_was_already_lost_gets_a_lost_outcome_and_the_others_an_update() -> None:
    workers = {0: lost("died", 9), 1: UP[1]}
    after = sender.step(State.READY, replace(DATA, workers=workers), sender.Send(None))

    outcome = Outcome(kind=OutcomeKind.LOST, reason="died", fence=9)
    assert after.data.outstanding == sender.Outstanding(1, {1: 2}, {0: outcome})
    assert after.effects == (sender.Dispatch(1, 2, 1),)
    assert {worker: entry.due for worker, entry in after.data.workers.items()} == {0: 1, 1: 1}
    assert (after.data.due_all, after.data.version) == (1, 1)


def test_a_version_sent_to_some_workers_is_due_only_to_them() -> None:
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
def test_an_abandoned_update_has_its_reason_in_the_report(event: sender.Event, reason: str) -> None:
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


def test_a_lost_link_is_closed_and_its_worker_gets_a_lost_outcome() -> None:
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
def test_a_fenced_refusal_ends_the_link_and_records_only_a_higher_fence(
    fence: int, version: int, said: str, reason: str, newer: int
) -> None:
    refusal = Refusal(
        model_id="policy", incarnation=7, version=version, kind=RefusalKind.FENCED, reason=said, fence=fence
    )
    step = sender.step(State.AWAITING_ACK, SENT, sender.Answer(0, 1, refusal))

    assert step.data.workers[0].link_state is sender.LinkState.LOST
    assert (step.data.workers[0].reason, step.data.workers[0].fence) == (reason, newer)


def test_every_field_of_an_ack_is_kept_in_its_outcome() -> None:
    nested = SyncReport(model_id="inner", version=3, incarnation=4, outcomes={})
    ack = Ack(model_id="policy", incarnation=7, version=1, seconds=0.25, evidence=Evidence.CALL, nested=nested)
    step = sender.step(State.AWAITING_ACK, SENT, sender.Answer(0, 1, ack))

    outcome = Outcome(kind=OutcomeKind.APPLIED, evidence=Evidence.CALL, apply_s=0.25, nested=nested)
    assert step.data.outstanding == sender.Outstanding(1, {1: 2}, {0: outcome})
    assert step.data.workers[0].served == 1


@pytest.mark.parametrize(("said", "reason"), [("too small", "too small"), ("", "REFUSED")])
def test_every_field_of_a_refusal_is_kept_in_its_outcome(said: str, reason: str) -> None:
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
def test_a_joiner_has_caught_up_once_it_answers_the_version_due_to_it_or_a_newer_one(version: int, left: int) -> None:
    data = replace(SENT, version=version, workers={**UP, 0: replace(UP[0], catching=3)})
    data = replace(data, outstanding=sender.Outstanding(version, {0: 1, 1: 2}, {}))
    ack = Ack(model_id="policy", incarnation=7, version=version)
    step = sender.step(State.PENDING_ASYNC, data, sender.Answer(0, 1, ack))

    assert (step.input, step.data.workers[0].catching) == (SenderInput.REPLY, left)


@pytest.mark.parametrize("kind", [RefusalKind.REFUSED, RefusalKind.SUPERSEDED, RefusalKind.STALE])
def test_only_a_refused_catch_up_is_reported_as_not_caught_up(kind: RefusalKind) -> None:
    before = Outcome(kind=OutcomeKind.REFUSED, reason="another")
    data = replace(DATA, workers={**UP, 0: replace(UP[0], catching=3)}, not_caught_up={1: before})
    refusal = Refusal(model_id="policy", incarnation=7, version=3, kind=kind, reason="why")
    step = sender.step(State.READY, data, sender.Answer(0, 1, refusal))

    refused = Outcome(kind=OutcomeKind.REFUSED, reason="why", evidence=Evidence.ANSWER)
    refused_ones = {0: refused} if kind is RefusalKind.REFUSED else {}
    assert step.input is SenderInput.CAUGHT_UP
    assert step.data.not_caught_up == {1: before, **refused_ones}


def test_stale_answers_and_late_events_are_counted() -> None:
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
def test_a_deadline_or_an_interrupt_ends_a_wait_and_is_late_without_one(
    event: sender.Event, named: SenderInput
) -> None:
    waiting = sender.step(State.AWAITING_ACK, SENT, event)
    gone = sender.step(State.PENDING_ASYNC, SENT, event)

    assert (waiting.input, waiting.to, waiting.data) == (named, State.PENDING_ASYNC, SENT)
    assert (gone.input, gone.to, gone.data.late) == (None, State.PENDING_ASYNC, 1)


def test_an_answer_to_a_closed_sender_is_late() -> None:
    step = sender.step(State.CLOSED, DATA, sender.Answer(0, 1, Hello(model_id="policy", incarnation=7)))

    assert (step.input, step.to, step.data.late) == (None, State.CLOSED, 1)


@pytest.mark.parametrize("state", [State.READY, State.PENDING_ASYNC, State.AWAITING_ACK])
def test_a_worker_that_rejoins_or_is_removed_loses_its_link_first(state: State) -> None:
    replaced = sender.LinkLost(0, 1, "replaced by a new link")
    assert sender.joining(state, DATA, 0, 9) == (replaced, sender.Join(0, 9))
    assert sender.removal(state, DATA, 1, "it left") == (sender.LinkLost(1, 2, "it left"), sender.Remove(1))


def test_a_worker_that_is_replaced_or_removed_before_connect_is_not_lost() -> None:
    assert sender.joining(State.UNINITIALIZED, DATA, 0, 9) == (sender.Join(0, 9),)
    assert sender.removal(State.UNINITIALIZED, DATA, 1, "it left") == (sender.Remove(1),)


def test_after_close_a_rejoining_worker_is_not_lost_and_a_removal_is_refused() -> None:
    assert sender.joining(State.CLOSED, DATA, 0, 9) == (sender.Join(0, 9),)
    with pytest.raises(StateError):
        sender.removal(State.CLOSED, DATA, 1, "it left")


def test_an_unknown_worker_may_join_and_its_removal_is_refused() -> None:
    assert sender.joining(State.READY, DATA, 5, 9) == (sender.Join(5, 9),)
    with pytest.raises(ConfigurationError, match="worker 5 is not among the workers"):
        sender.removal(State.READY, DATA, 5, "it left")


def test_a_lost_worker_that_rejoins_or_is_removed_is_not_lost_again() -> None:
    data = replace(DATA, workers={0: lost("died")})
    assert sender.joining(State.READY, data, 0, 9) == (sender.Join(0, 9),)
    assert sender.removal(State.READY, data, 0, "it left") == (sender.Remove(0),)


@pytest.mark.parametrize(("due_all", "due", "sent"), [(0, 0, 0), (4, 2, 4), (2, 4, 4)])
def test_a_joiner_gets_the_newest_version_sent_to_it_or_to_all(due_all: int, due: int, sent: int) -> None:
    data = replace(DATA, due_all=due_all, workers={0: replace(lost("died"), due=due), 1: UP[1]})
    step = sender.step(State.READY, data, sender.Join(0, 9))

    assert step.data.workers == {0: sender.Entry(9, due=sent, catching=sent), 1: UP[1]}
    assert step.effects == (sender.Greet(0, 9, sent),)


def test_a_link_that_is_replaced_or_removed_before_connect_is_closed() -> None:
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
def test_the_error_for_an_update_without_a_handshake(incarnation: int, link: int) -> None:
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
def test_a_rejected_handshake_gets_the_kind_and_the_reason_and_changes_nothing(
    incarnation: int, misfit: str, kind: RefusalKind, reason: str, link: int
) -> None:
    step = receiver.step(State.READY, SERVING, receiver.HelloArrived(link, incarnation, misfit))

    rejection = receiver.Reject(link, incarnation, kind, reason)
    assert step.effects == ((rejection,) if link == 1 else (rejection, receiver.CloseLink(link)))
    assert (step.input, step.to, step.data) == (ReceiverInput.REJECTED, State.READY, SERVING)


TAKEN_OVER = receiver.Disown(1, 7, RefusalKind.FENCED, "this worker has seen a newer sender")
OUTDATED = receiver.Tell(1, (7, 3), RefusalKind.STALE)


@pytest.mark.parametrize(("link", "old"), [(1, (OUTDATED,)), (5, (TAKEN_OVER, receiver.CloseLink(1)))])
def test_a_newer_sender_takes_over_on_the_same_link_or_on_another(link: int, old: tuple[receiver.Effect, ...]) -> None:
    step = receiver.step(State.READY, replace(SERVING, pending=(7, 3)), receiver.HelloArrived(link, 8))

    assert (step.input, step.effects) == (ReceiverInput.TAKEOVER, (*old, receiver.Greet(link)))
    assert step.data == replace(SERVING, link=link, fence=8)


def test_a_duplicate_of_the_decided_version_gets_the_same_answer_and_changes_no_data() -> None:
    step = receiver.step(State.READY, SERVING, receiver.UpdateArrived(1, 7, 2))

    assert (step.input, step.data) == (ReceiverInput.DUPLICATE, SERVING)
    assert step.effects == (receiver.Reply(1, SERVING.answer),)  # type: ignore[arg-type]


def test_a_duplicate_of_the_pending_version_gets_no_answer() -> None:
    data = replace(SERVING, pending=(7, 3))
    step = receiver.step(State.PENDING_ASYNC, data, receiver.UpdateArrived(1, 7, 3))

    assert (step.input, step.data, step.effects) == (ReceiverInput.DUPLICATE, data, ())


def test_a_late_loss_of_a_link_changes_no_data() -> None:
    for state, link in ((State.READY, 5), (State.CLOSED, 1)):
        step = receiver.step(state, SERVING, receiver.LinkDown(link))
        assert (step.input, step.to, step.data) == (None, state, SERVING)


def test_after_invalidate_no_version_is_served() -> None:
    assert receiver.step(State.READY, SERVING, receiver.Invalidate()).data == replace(SERVING, served=None)
