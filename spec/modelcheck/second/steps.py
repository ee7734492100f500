"""A second reading of the action properties, from the words of the specification.

A step is a pair of different states, with the actions that lead from the first to the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import NamedTuple

from modelcheck.second.bounds import Bounds
from modelcheck.second.graph import Label
from modelcheck.second.naming import OUTSTANDING, RECEIVER_MOVES, SENDER_MOVES
from modelcheck.second.words import NEW_RECEIVER, NO_PAYLOAD, Message, Node, Word, new_sender
from weightsync.protocol._actions import Action
from weightsync.protocol._tables import State

_CLOSED, _INITIAL = State.CLOSED.value, State.UNINITIALIZED.value
_PENDING, _AWAITING = State.PENDING_ASYNC.value, State.AWAITING_ACK.value


class Step(NamedTuple):
    """A step: the two states, and the labels of the actions."""

    old: Node
    new: Node
    labels: tuple[Label, ...]


StepProperty = Callable[[Bounds, Step], bool]


def only_rows(bounds: Bounds, step: Step) -> bool:
    """A machine's state changes by a row of the table, or ends with its process."""
    old, new, _ = step
    return all(
        before == after or life == "dead" or (before, after) in SENDER_MOVES
        for before, after, life in zip(old.sstate, new.sstate, new.slife, strict=True)
    ) and all(
        before == after or receiver == NEW_RECEIVER or (before, after) in RECEIVER_MOVES
        for before, after, receiver in zip(old.rstate, new.rstate, new.rdata, strict=True)
    )


def nothing_overtakes(bounds: Bounds, step: Step) -> bool:
    """On an ordered link, a new message has a higher serial than all messages in flight."""
    if "Reorders" in bounds.links:
        return True
    return _rising(step.old.messages, step.new.messages) and _rising(step.old.answers, step.new.answers)


def _rising(old: Iterable[Message | Word], new: Iterable[Message | Word]) -> bool:
    sent = set(new) - set(old)
    return all(n.p < m.p for m, n in product(sent, old) if (n.s, n.w, n.k) == (m.s, m.w, m.k))


def _pairs(bounds: Bounds, step: Step) -> Iterator[tuple[int, int]]:
    """The senders whose data changed, each with all workers."""
    for s in bounds.all_senders:
        if step.old.sender(s) is not step.new.sender(s):
            yield from ((s, w) for w in bounds.all_workers)


def _counted(step: Step, s: int, w: int) -> str:
    """The outcome of ``w`` that an answer decides in this step, or an empty text."""
    said = step.new.outcome(s, w)
    return said if step.old.outcome(s, w) == "PENDING" and said in ("APPLIED", "REFUSED") else ""


def _recorded(step: Step, s: int, w: int) -> int:
    """The version that this step records as served over the link of ``w``, or 0."""
    before, after = step.old.entry(s, w).served, step.new.entry(s, w).served
    return after if after != before else 0


def ack_names_its_version(bounds: Bounds, step: Step) -> bool:
    """G1. Only an answer that was in flight and names this incarnation, version and weights decides an outcome."""
    for s, w in _pairs(bounds, step):
        sender = step.old.sender(s)
        there = [m for m in step.old.answers if (m.s, m.w, m.inc) == (s, w, sender.incarnation)]
        weights = (sender.out.version, sender.serial)
        counts = any((m.v, m.p) == weights for m in there) or _rejected(step, s, w, there)
        if _counted(step, s, w) and not counts:
            return False
        recorded = _recorded(step, s, w)
        if recorded and not any(m.v == recorded for m in there):
            return False
    return True


def _rejected(step: Step, s: int, w: int, there: list[Word]) -> bool:
    """Whether this step makes the worker's link REFUSED, because the worker refused the handshake."""
    before, after = step.old.entry(s, w), step.new.entry(s, w)
    said = any((m.k, m.v, m.kind) == (before.link, 0, "REFUSED") for m in there)
    return said and before.link_state != after.link_state == "REFUSED" == step.new.outcome(s, w)


def acked_means_served(bounds: Bounds, step: Step) -> bool:
    """G2. A worker is APPLIED only if it served the version and acked it over the same link; it acks what it served."""
    for s, w in _pairs(bounds, step):
        if _counted(step, s, w) == "APPLIED" and w not in step.old.sender(s).out.did:
            return False
        recorded, link = _recorded(step, s, w), step.old.entry(s, w).link
        acks = ((m.s, m.w, m.k, m.v) for m in step.old.answers if m.kind == "ACK")
        if recorded and (s, w, link, recorded) not in acks:
            return False
    return all(_is_true(bounds, step, m) for m in step.new.answers - step.old.answers if m.kind == "ACK")


def _is_true(bounds: Bounds, step: Step, ack: Word) -> bool:
    """An ack names what is served now, repeats one in flight, or names what was applied and is now invalidated."""
    if step.new.receiver(ack.w).served == (ack.inc, ack.v, ack.p):
        return True
    before = step.old.receiver(ack.w)
    since = "invalidate" in bounds.features and step.new.receiver(ack.w).served == NO_PAYLOAD
    if since and (step.new.receiver(ack.w).answer, before.decided) == ("ACK", (ack.inc, ack.v, ack.p)):
        return True
    return any((n.kind, n.w, n.inc, n.p) == ("ACK", ack.w, ack.inc, ack.p) for n in step.old.answers)


def serving_is_monotone(bounds: Bounds, step: Step) -> bool:
    """G4. In one life a worker serves only newer versions, and never one of an incarnation below one it met."""
    for before, after in zip(step.old.rdata, step.new.rdata, strict=True):
        if after.served not in (before.served, NO_PAYLOAD):
            newer = after.served[:2] > before.served[:2]
            if not newer or after.served[0] < before.met:
                return False
    return True


def one_outstanding(bounds: Bounds, step: Step) -> bool:
    """G5. A dispatch begins when nothing is outstanding."""
    return all(
        step.old.sender(s).serial == step.new.sender(s).serial
        or (step.old.sstate[s - 1] == State.READY.value and step.old.owing(s) == 0)
        for s in bounds.all_senders
    )


def served_changes_by_applied(bounds: Bounds, step: Step) -> bool:
    """G6. Only applying the pending version changes the version served. A broken model or a new process serves none."""
    for w in bounds.all_workers:
        before, after = step.old.receiver(w), step.new.receiver(w)
        if before.served == after.served:
            continue
        moved = (step.old.rstate[w - 1], step.new.rstate[w - 1])
        applied = moved == (_PENDING, _AWAITING) and after.served == before.pending
        given_up = after.served == NO_PAYLOAD and (moved[1] == _CLOSED or after == NEW_RECEIVER)
        if not applied and not given_up and not by_hand(step, w):
            return False
    return True


def by_hand(step: Step, w: int) -> bool:
    """Whether this worker's weights were written by hand, and nothing else changed in it."""
    over = step.old.receiver(w)._replace(served=NO_PAYLOAD, live=(NO_PAYLOAD, NO_PAYLOAD))
    called = (Action.INVALIDATE, w) in step.labels
    return called and step.new.receiver(w) == over and step.old.rstate[w - 1] == step.new.rstate[w - 1]


def only_targets_change(bounds: Bounds, step: Step) -> bool:
    """G7. A version goes only to its targets and to joiners that are due it, and only a sent version is pending."""
    if not all(_was_due(step, m) for m in step.new.messages - step.old.messages if m.v):
        return False
    for w in bounds.all_workers:
        pending = step.new.receiver(w).pending
        if pending in (NO_PAYLOAD, step.old.receiver(w).pending):
            continue
        sent = ((step.old.sender(m.s).incarnation, m.v, m.p) for m in step.old.messages if m.w == w)
        if pending not in sent:
            return False
    return True


def _was_due(step: Step, m: Message) -> bool:
    old, new = step.old.entry(m.s, m.w), step.new.entry(m.s, m.w)
    target = step.new.sender(m.s).out.version == m.v and step.new.owed(m.s, m.w) == m.k
    if target and step.new.outcome(m.s, m.w) == "PENDING":
        return True
    return old.link != m.k == new.link and m.v == max(old.due, step.old.sender(m.s).dueAll)


def copy_owes_nothing(bounds: Bounds, step: Step) -> bool:
    """G8. A new sender has the initial state, and no other sender or receiver changes."""
    old, new, _ = step
    born = {t for t in range(bounds.senders) if old.slife[t] == "unborn" != new.slife[t]}
    fresh = (_INITIAL, new_sender(bounds.workers), False)
    for t in range(bounds.senders) if born else ():
        after = (new.sstate[t], new.sdata[t], new.blocked[t])
        if after != (fresh if t in born else (old.sstate[t], old.sdata[t], old.blocked[t])):
            return False
    return not born or old[4:] == new[4:]


def closed_is_final(bounds: Bounds, step: Step) -> bool:
    """G9. A closed sender or receiver stays closed; its report does not change, and nothing is applied."""
    old, new, _ = step
    for s in range(bounds.senders):
        was = old.sstate[s] == _CLOSED and new.slife[s] == "alive"
        if was and (new.sstate[s], new.sdata[s]) != (_CLOSED, old.sdata[s]):
            return False
    for w in range(bounds.workers):
        was = old.rstate[w] == _CLOSED and new.rdata[w] != NEW_RECEIVER
        kept = new.rdata[w].served == old.rdata[w].served or by_hand(step, w + 1)
        if was and (new.rstate[w] != _CLOSED or not kept):
            return False
    return True


def outcomes_are_true(bounds: Bounds, step: Step) -> bool:
    """G11. An update ends with a report to a caller; a wait that ends early changes no outcome."""
    return all(_reported_truly(step, s) for s in bounds.all_senders)


def _reported_truly(step: Step, s: int) -> bool:
    old, new, labels = step
    before, after = old.sstate[s - 1], new.sstate[s - 1]
    was, became = old.sender(s).out.outcomes, new.sender(s).out.outcomes
    given_up = (Action.ABANDON, s) in labels or (Action.CLOSE_SENDER, s) in labels
    if before in OUTSTANDING and after not in OUTSTANDING and new.slife[s - 1] != "dead":
        released = old.blocked[s - 1] and not new.blocked[s - 1]
        if not (released or given_up or (Action.WAIT, s) in labels):
            return False
        if "PENDING" in became or [each == "NONE" for each in became] != [each == "NONE" for each in was]:
            return False
    if not given_up and ("PENDING", "ABANDONED") in zip(was, became, strict=True):
        return False
    return (before, after) != (_AWAITING, _PENDING) or new.sender(s) == old.sender(s)


#: The action properties, by their names in the configurations.
STEPS: Mapping[str, StepProperty] = {
    "OnlyRows": only_rows,
    "NothingOvertakes": nothing_overtakes,
    "AckNamesItsVersion": ack_names_its_version,
    "AckedMeansServed": acked_means_served,
    "ServingIsMonotone": serving_is_monotone,
    "OneOutstanding": one_outstanding,
    "ServedChangesByApplied": served_changes_by_applied,
    "OnlyTargetsChange": only_targets_change,
    "CopyOwesNothing": copy_owes_nothing,
    "ClosedIsFinal": closed_is_final,
    "OutcomesAreTrue": outcomes_are_true,
}
