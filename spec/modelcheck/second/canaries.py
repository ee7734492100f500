"""A second reading of the canaries: each claims that a situation never arises, and must be false."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from modelcheck.second.bounds import Bounds
from modelcheck.second.invariants import Invariant
from modelcheck.second.naming import answer_is
from modelcheck.second.steps import Step, StepProperty, _counted
from modelcheck.second.words import NO_LINK, NO_PAYLOAD, Node
from weightsync.protocol._tables import SenderInput, State

_READY, _PENDING, _AWAITING = State.READY.value, State.PENDING_ASYNC.value, State.AWAITING_ACK.value


def _pairs(bounds: Bounds) -> product[tuple[int, int]]:
    return product(bounds.all_senders, bounds.all_workers)


def _serves(node: Node, w: int, s: int, version: int) -> bool:
    incarnation = node.sender(s).incarnation
    return incarnation != 0 and node.receiver(w).served[:2] == (incarnation, version)


def _no_stale_ack(bounds: Bounds, step: Step) -> bool:
    stale = (m for m in step.old.answers if m.kind == "ACK" and answer_is(step.old, m) is SenderInput.STALE)
    return not any(("AnswerAck", m.s, m.w, m.k, m.v) in step.labels for m in stale)


def _no_ack_after_deadline(bounds: Bounds, step: Step) -> bool:
    waiting = (s for s in bounds.all_senders if step.old.sstate[s - 1] == _PENDING)
    return not any(_counted(step, s, w) == "APPLIED" for s in waiting for w in bounds.all_workers)


def _none_is_fenced(bounds: Bounds, node: Node) -> bool:
    return not any(node.entry(s, w).fence for s, w in _pairs(bounds))


def _no_takeover(bounds: Bounds, step: Step) -> bool:
    links = zip(step.old.rdata, step.new.rdata, strict=True)
    return not any(0 != old.link[0] != new.link[0] != 0 for old, new in links)


def _no_crash_then_recovery(bounds: Bounds, node: Node) -> bool:
    back = ((s, w) for s, w in _pairs(bounds) if node.entry(s, w)[:2] == (2, "UP") and node.outcome(s, w) == "LOST")
    return not any(node.entry(s, w).served == node.sender(s).out.version for s, w in back)


def _no_success_after_refusal(bounds: Bounds, step: Step) -> bool:
    answers = ((old.answer, new.answer) for old, new in zip(step.old.rdata, step.new.rdata, strict=True))
    return ("REFUSED", "ACK") not in answers


def _nothing_superseded(bounds: Bounds, node: Node) -> bool:
    return all(m.kind != "SUPERSEDED" for m in node.answers)


def _nobody_catches_up(bounds: Bounds, step: Step) -> bool:
    due = ((s, w, step.old.entry(s, w).catching) for s, w in _pairs(bounds))
    return not any(version and step.new.entry(s, w).served == version for s, w, version in due)


def _no_pending_dropped(bounds: Bounds, step: Step) -> bool:
    return (_PENDING, _READY) not in zip(step.old.rstate, step.new.rstate, strict=True)


def _no_return_after_wrong_loss(bounds: Bounds, node: Node) -> bool:
    return not any(node.entry(s, w).link == 2 and node.outcome(s, w) == "APPLIED" for s, w in _pairs(bounds))


def _nobody_closed_upon(bounds: Bounds, step: Step) -> bool:
    return (True, State.CLOSED.value) not in zip(step.old.blocked, step.new.sstate, strict=True)


def _no_second_answer(bounds: Bounds, step: Step) -> bool:
    acked = any(m.kind == "ACK" for m in step.new.answers - step.old.answers)
    return not acked or not any(a == b for a, b in zip(step.old.rstate, step.new.rstate, strict=True))


def _somebody_is_left(bounds: Bounds, node: Node) -> bool:
    members = ([entry.link_state for entry in sender.members] for sender in node.sdata if sender.version)
    return all({"EXPECTED", "UP"} & set(members) for members in members)


def _no_partial_dispatch(bounds: Bounds, node: Node) -> bool:
    return not any({"LOST", "APPLIED"} <= set(sender.out.outcomes) for sender in node.sdata)


def _no_success_after_interrupt(bounds: Bounds, step: Step) -> bool:
    for s in bounds.all_senders:
        if (step.old.sstate[s - 1], step.new.sstate[s - 1]) == (_PENDING, _READY):
            members = [w for w in bounds.all_workers if step.old.entry(s, w).link_state != "NONE"]
            if all(step.old.outcome(s, w) == "APPLIED" for w in members):
                return False
    return True


def _nothing_deferred_elsewhere(bounds: Bounds, step: Step) -> bool:
    """A deferred answer is sent only over the link of its update."""
    acked = any(m.kind == "ACK" for m in step.new.answers - step.old.answers)
    lives = zip(step.old.rdata, step.old.rstate, strict=True)
    waits = (r.answer == "DEFERRED" and r.link != NO_LINK and state != _AWAITING for r, state in lives)
    return not (acked and any(waits))


def _nobody_serves_again(bounds: Bounds, step: Step) -> bool:
    """A model whose weights were written by hand never serves another version."""
    lives = zip(step.old.rdata, step.new.rdata, strict=True)
    again = any(NO_PAYLOAD not in (old.decided, new.served) and old.served == NO_PAYLOAD for old, new in lives)
    return not again or "invalidate" not in bounds.features


def _nothing_breaks(bounds: Bounds, step: Step) -> bool:
    served = ((old.served, new.served) for old, new in zip(step.old.rdata, step.new.rdata, strict=True))
    return not any(old != NO_PAYLOAD == new for old, new in served)


def _no_misfit(bounds: Bounds, node: Node) -> bool:
    return not any(m.kind == "REFUSED" and m.v == 0 for m in node.answers)


def _every_answer_leaves(bounds: Bounds, step: Step) -> bool:
    return (_AWAITING, State.UNINITIALIZED.value) not in zip(step.old.rstate, step.new.rstate, strict=True)


def _serves_the_last(node: Node, s: int, w: int) -> bool:
    return _serves(node, w, s, node.sender(s).out.version)


def _abandoned_means_not(bounds: Bounds, node: Node) -> bool:
    return not any(node.outcome(s, w) == "ABANDONED" and _serves_the_last(node, s, w) for s, w in _pairs(bounds))


def _lost_means_not(bounds: Bounds, node: Node) -> bool:
    return not any(node.outcome(s, w) == "LOST" and _serves_the_last(node, s, w) for s, w in _pairs(bounds))


def _only_the_latest_send_changes(bounds: Bounds, step: Step) -> bool:
    for s, w in _pairs(bounds):
        unnamed = step.old.sender(s).out.version == 2 and step.old.outcome(s, w) == "NONE"
        changed = step.old.receiver(w).served != step.new.receiver(w).served
        if unnamed and changed and _serves(step.new, w, s, 1):
            return False
    return True


def _nobody_wins_back(bounds: Bounds, node: Node) -> bool:
    if bounds.senders < 3 or node.sstate[1] != State.CLOSED.value:
        return True
    return not (node.entry(2, 1).fence and _serves(node, 1, 3, 1))


def _no_bye(bounds: Bounds, step: Step) -> bool:
    return not any(step.old.owed(s, w) and step.new.entry(s, w).link_state == "NONE" for s, w in _pairs(bounds))


def _nothing_fails(bounds: Bounds, node: Node) -> bool:
    return all(m.kind != "FAILED" for m in node.answers)


def _nobody_is_back_after_failure(bounds: Bounds, step: Step) -> bool:
    if bounds.features & {"break", "wrong", "crash"}:
        return True
    return not any(
        step.old.outcome(s, w) == "LOST"
        and step.old.entry(s, w)[:2] == (2, "EXPECTED")
        and step.new.entry(s, w).link_state == "UP"
        for s, w in _pairs(bounds)
    )


def _no_unclaimed_answer(bounds: Bounds, node: Node) -> bool:
    return all(m.inc == node.sender(m.s).incarnation for m in node.answers)


def _nothing_late(bounds: Bounds, node: Node) -> bool:
    return all(m.kind != "STALE" for m in node.answers)


def _no_successor(bounds: Bounds, node: Node) -> bool:
    dead = node.slife[0] == "dead" and node.sender(1).version > 0
    return not (dead and any(_serves(node, w, s, 1) for s, w in _pairs(bounds) if s > 1))


def _no_loss(bounds: Bounds, node: Node) -> bool:
    if node.messages or node.answers:
        return True
    return not any(
        node.sstate[s - 1] == _PENDING
        and node.rstate[w - 1] == _READY
        and node.owed(s, w)
        and node.receiver(w).link == (s, node.owed(s, w))
        for s, w in _pairs(bounds)
    )


def _impossible(bounds: Bounds, node: Node) -> bool:
    return node.sstate != node.sstate


#: The canaries over states and over steps, by their names in the configurations.
STATE_CANARIES: Mapping[str, Invariant] = {
    "NoneIsFenced": _none_is_fenced,
    "NoCrashThenRecovery": _no_crash_then_recovery,
    "NothingSuperseded": _nothing_superseded,
    "NoReturnAfterWrongLoss": _no_return_after_wrong_loss,
    "SomebodyIsLeft": _somebody_is_left,
    "NoPartialDispatch": _no_partial_dispatch,
    "NoMisfit": _no_misfit,
    "NothingFails": _nothing_fails,
    "AbandonedMeansNot": _abandoned_means_not,
    "LostMeansNot": _lost_means_not,
    "NobodyWinsBack": _nobody_wins_back,
    "NoStrayAnswer": _no_unclaimed_answer,
    "NothingLate": _nothing_late,
    "NoSuccessor": _no_successor,
    "NoLoss": _no_loss,
    "Impossible": _impossible,
}
STEP_CANARIES: Mapping[str, StepProperty] = {
    "NoStaleAck": _no_stale_ack,
    "NoAckAfterDeadline": _no_ack_after_deadline,
    "NoTakeover": _no_takeover,
    "NoSuccessAfterRefusal": _no_success_after_refusal,
    "NobodyCatchesUp": _nobody_catches_up,
    "NoPendingDropped": _no_pending_dropped,
    "NobodyClosedUpon": _nobody_closed_upon,
    "NoSecondAnswer": _no_second_answer,
    "NoSuccessAfterInterrupt": _no_success_after_interrupt,
    "NothingBreaks": _nothing_breaks,
    "NobodyServesAgain": _nobody_serves_again,
    "NothingDeferredElsewhere": _nothing_deferred_elsewhere,
    "EveryAnswerLeaves": _every_answer_leaves,
    "OnlyTheLatestSendChanges": _only_the_latest_send_changes,
    "NoBye": _no_bye,
    "NobodyIsBackAfterFailure": _nobody_is_back_after_failure,
}
