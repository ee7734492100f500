"""A second reading of properties on which the guarantees rest: consistent records, and true, complete messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from modelcheck.second.bounds import Bounds
from modelcheck.second.invariants import Invariant
from modelcheck.second.naming import OUTSTANDING
from modelcheck.second.steps import Step, StepProperty, by_hand
from modelcheck.second.words import NEW_RECEIVER, NO_LINK, NO_PAYLOAD, Message, Node, Payload, Receiver, Word
from weightsync.protocol._actions import Action
from weightsync.protocol._tables import RefusalKind, State

_CLOSED, _READY, _AWAITING = State.CLOSED.value, State.READY.value, State.AWAITING_ACK.value
_REFUSALS = {kind.name for kind in RefusalKind}


def _pairs(bounds: Bounds) -> Iterator[tuple[int, int]]:
    return product(bounds.all_senders, bounds.all_workers)


def _link(m: Message | Word) -> tuple[int, int, int]:
    return (m.s, m.w, m.k)


def sender_books(bounds: Bounds, node: Node) -> bool:
    """A sender's records of itself and of each worker are consistent."""
    for s in bounds.all_senders:
        sender, state = node.sender(s), node.sstate[s - 1]
        reported = node.slife[s - 1] == "dead" or sender.out.version == sender.version
        connected = sender.incarnation or state in (State.UNINITIALIZED.value, _CLOSED)
        noted = not sender.out.did or state in OUTSTANDING
        if sender.version != sender.serial or not (reported and connected and noted):
            return False
        if not all(_entry_fits(node, s, w) for w in bounds.all_workers):
            return False
    return True


def _entry_fits(node: Node, s: int, w: int) -> bool:
    sender, entry, owed = node.sender(s), node.entry(s, w), node.owed(s, w)
    if entry.link_state == "NONE":
        return (entry.served, entry.due, entry.catching, entry.fence, owed) == (0, 0, 0, 0, 0)
    return (
        entry.link != 0
        and sender.dueAll <= entry.due <= sender.version
        and (entry.link_state == "LOST" or entry.fence == 0)
        and (entry.link_state != "EXPECTED" or entry.served == 0)
        and (entry.link_state not in ("LOST", "REFUSED") or entry.catching == 0)
        and (entry.fence == 0 or entry.fence > sender.incarnation)
        and max(entry.served, entry.catching) <= entry.due
        and (entry.catching == 0 or entry.served < entry.catching)
        and (owed == 0 or (owed == entry.link and entry.due == sender.version))
    )


def receiver_books(bounds: Bounds, node: Node) -> bool:
    """A receiver's records are consistent: its fence is the highest incarnation met, and it serves what it acked."""
    overwritten = {NO_PAYLOAD} if "invalidate" in bounds.features else set()
    return all(_receiver_fits(r, state, overwritten) for r, state in zip(node.rdata, node.rstate, strict=True))


def _receiver_fits(receiver: Receiver, state: str, overwritten: set[Payload]) -> bool:
    decided, pending, served = receiver.decided, receiver.pending, receiver.served
    return (
        receiver.fence == receiver.met >= decided[0]
        and receiver.live == (served, served)
        and (receiver.answer == "NONE") is (decided == NO_PAYLOAD)
        and (receiver.answer not in ("ACK", "DEFERRED") or state == _CLOSED or served in {decided} | overwritten)
        and (served == decided or served[:2] < decided[:2])
        and (pending == NO_PAYLOAD or (pending[0] == receiver.fence and decided[:2] < pending[:2]))
        and (state != _AWAITING or decided[0] == receiver.fence)
    )


def open_links_lead_somewhere(bounds: Bounds, node: Node) -> bool:
    """An open link whose far end is open is its worker's link, or its Hello is in flight."""
    hellos = {_link(m) for m in node.messages if m.v == 0}
    return "Loses" in bounds.links or all(
        not node.is_open(s, w, node.entry(s, w).link)
        or node.is_gone(s, w)
        or node.receiver(w).link == (s, node.entry(s, w).link)
        or (s, w, node.entry(s, w).link) in hellos
        for s, w in _pairs(bounds)
    )


def answers_say_what_happened(bounds: Bounds, step: Step) -> bool:
    """An answer agrees with what its worker did in the step that sent it, and is sent over an open link."""
    sent = (m for m in step.new.answers - step.old.answers if m.inc == step.old.sender(m.s).incarnation)
    return all(step.old.is_open(*_link(m)) and _true_fence(step, m) and _true_word(step, m) for m in sent)


#: The worker's answer before and after an ack is sent: decided already, or deferred until now.
_ACKED = {("ACK", "ACK"), ("DEFERRED", "ACK")}


def _true_fence(step: Step, m: Word) -> bool:
    return m.fence == (step.new.receiver(m.w).fence if m.kind in _REFUSALS else 0)


def _true_word(step: Step, m: Word) -> bool:
    old, new = step.old.receiver(m.w), step.new.receiver(m.w)
    key, ours = (m.inc, m.v, m.p), old.link == (m.s, m.k)
    decided = key == old.decided == new.decided and m.kind == old.answer and ours
    match m.kind:
        case "HELLO":
            return (m.v, m.p) == (0, 0) and new.link == (m.s, m.k) != old.link
        case "ACK":
            said = key == old.decided == new.decided and (old.answer, new.answer) in _ACKED
            return ours and said
        case "BYE":
            return m.v == 0 and ours and (Action.CLOSE_RECEIVER, m.w) in step.labels
        case "FAILED":
            return m.v == 0 and ours and new.link == NO_LINK and m.inc == m.fence
        case "FENCED":
            rejected = m.p == 0 and old == new
            return m.v == 0 and m.inc < m.fence and (rejected or (ours and new.link not in (old.link, NO_LINK)))
        case "SUPERSEDED":
            return key == old.pending and old.pending[:2] < new.pending[:2]
        case "STALE":
            return m.v != 0 and key[:2] < max(old.decided[:2], old.pending[:2])
        case _:
            return decided if m.v else m.p == 0 and m.inc >= m.fence


def nothing_is_left_unsaid(bounds: Bounds, step: Step) -> bool:
    """A worker reports each event over the link that it concerns, if that is open. A link closes at both ends."""
    return all(_said(step, w) for w in bounds.all_workers)


def _said(step: Step, w: int) -> bool:
    old, new = step.old.receiver(w), step.new.receiver(w)
    moved = (step.old.rstate[w - 1], step.new.rstate[w - 1])
    s, k = old.link
    heard = old.link != NO_LINK and step.old.is_open(s, w, k)
    words = {(m.kind, (m.inc, m.v, m.p)) for m in step.new.answers if _link(m) == (s, w, k)}
    due: list[bool] = []
    if heard and moved == (_AWAITING, _READY) and new.link == old.link:
        due.append((old.answer, old.decided) in words)
    sent = (old.answer, new.answer, new.decided) == ("DEFERRED", "ACK", old.decided)
    if heard and sent and moved[0] != _AWAITING and old.decided[0] == old.fence:
        due.append(("ACK", old.decided) in words)
    if heard and NO_PAYLOAD not in (old.pending, new.pending) and old.pending != new.pending:
        due.append(("SUPERSEDED", old.pending) in words)
    due += _parted(step, w, {kind for kind, _ in words}) if heard else []
    if heard and new.link != old.link:
        due.append(step.new.is_gone(s, w))
    if new.link not in (old.link, NO_LINK):
        due.append(_accepted(step, w))
        if heard and old.fence < new.fence:
            due.append(("FENCED", old.fence) in {(kind, key[0]) for kind, key in words})
    return all(due) and (new.fence >= old.fence or new == NEW_RECEIVER)


def _parted(step: Step, w: int, words: set[str]) -> list[bool]:
    """The messages owed when the current link ends, unless the worker's process died or the link broke."""
    old, new = step.old.receiver(w), step.new.receiver(w)
    if new == NEW_RECEIVER:
        return []
    due = []
    closed = step.old.rstate[w - 1] != _CLOSED and step.new.rstate[w - 1] == _CLOSED
    broke = {label[0] for label in step.labels} <= {Action.LINK_DOWN}
    if closed or (new.link == NO_LINK and not broke):
        due.append(bool(words & {"BYE", "FAILED"}))
    if old.served != NO_PAYLOAD == new.served and not by_hand(step, w):
        due.append("FAILED" in words)
    return due


def _accepted(step: Step, w: int) -> bool:
    """A handshake was accepted: the fence is that sender's incarnation, nothing is pending, and a Hello answers it.

    A version that was applied but is no longer served is forgotten, so it is not acked over this link.
    """
    old, new = step.old.receiver(w), step.new.receiver(w)
    s, k = new.link
    greeted = any(_link(m) == (s, w, k) and m.kind == "HELLO" for m in step.new.answers)
    whole = new.fence == step.old.sender(s).incarnation >= old.fence and new.pending == NO_PAYLOAD
    forgotten = new.served != NO_PAYLOAD or new.answer not in ("ACK", "DEFERRED")
    return whole and forgotten and (greeted or not step.old.is_open(s, w, k))


def fences_are_heeded(bounds: Bounds, step: Step) -> bool:
    """A sender that connects has an incarnation above every fence that a closed sender was told."""
    reported = [step.old.entry(t, w).fence for t, w in _pairs(bounds) if step.old.sstate[t - 1] == _CLOSED]
    taken = [
        step.new.sender(s).incarnation
        for s in bounds.all_senders
        if not step.old.sender(s).incarnation and step.new.sender(s).incarnation
    ]
    return all(fence < incarnation for fence, incarnation in product(reported, taken))


def only_the_living_act(bounds: Bounds, step: Step) -> bool:
    """A sender that is unborn or dead does nothing, sends nothing, and has no answers to it in flight."""
    old, new, _ = step
    for s in bounds.all_senders:
        before, after = old.slife[s - 1], new.slife[s - 1]
        if before == "alive":
            continue
        if before != after and (before, after) != ("unborn", "alive"):
            return False
        place = s - 1
        kept = (old.sstate[place], old.sdata[place], old.blocked[place], old.gone[place])
        if before == after and kept != (new.sstate[place], new.sdata[place], new.blocked[place], new.gone[place]):
            return False
        if s in {m.s for m in new.messages - old.messages} | {m.s for m in new.answers}:
            return False
    return True


BOOKS: Mapping[str, Invariant] = {
    "SenderBooks": sender_books,
    "ReceiverBooks": receiver_books,
    "OpenLinksLeadSomewhere": open_links_lead_somewhere,
}
BOOK_STEPS: Mapping[str, StepProperty] = {
    "AnswersSayWhatHappened": answers_say_what_happened,
    "NothingIsLeftUnsaid": nothing_is_left_unsaid,
    "FencesAreHeeded": fences_are_heeded,
    "OnlyTheLivingAct": only_the_living_act,
}
