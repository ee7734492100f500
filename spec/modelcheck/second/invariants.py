"""A second reading of the invariants, from the words of the specification."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product

from modelcheck.second.bounds import Bounds
from modelcheck.second.naming import (
    OUTSTANDING,
    answer_is,
    hello_is,
    receiver_has_row,
    sender_has_row,
    update_is,
)
from modelcheck.second.words import NO_LINK, NO_PAYLOAD, Node, Payload, new_sender
from weightsync.protocol._tables import RefusalKind, State

Invariant = Callable[[Bounds, Node], bool]

_STATES = {state.value for state in State}
_KINDS = {"HELLO", "ACK", "BYE"} | {kind.name for kind in RefusalKind}
_LINK_STATES = {"NONE", "EXPECTED", "UP", "LOST", "REFUSED"}
_OUTCOMES = {"NONE", "PENDING", "APPLIED", "REFUSED", "LOST", "ABANDONED"}
_AWAITING = State.AWAITING_ACK.value


def type_ok(bounds: Bounds, node: Node) -> bool:
    """Each variable has a value of its type."""
    senders, workers = bounds.senders, bounds.workers
    shape = [len(part) for part in (node.sstate, node.sdata, node.slife, node.blocked, node.gone)] == [senders] * 5
    return (
        shape
        and len(node.rstate) == len(node.rdata) == workers
        and _STATES.issuperset(node.sstate)
        and _STATES.issuperset(node.rstate)
        and {"unborn", "alive", "dead"}.issuperset(node.slife)
        and all(isinstance(flag, bool) for flag in (*node.blocked, *(end for ends in node.gone for end in ends)))
        and all(len(ends) == workers for ends in node.gone)
        and all(_sender_ok(bounds, node, s) for s in bounds.all_senders)
        and all(_receiver_ok(bounds, node, w) for w in bounds.all_workers)
        and all(_on_a_link(bounds, m.s, m.w, m.k, m.v) and 0 <= m.p <= bounds.max_version for m in node.messages)
        and all(
            _on_a_link(bounds, m.s, m.w, m.k, m.v)
            and 0 <= m.p <= bounds.max_version + 1
            and m.kind in _KINDS
            and _incarnation(bounds, m.inc)
            and _incarnation(bounds, m.fence)
            for m in node.answers
        )
    )


def _incarnation(bounds: Bounds, number: int) -> bool:
    return 0 <= number <= bounds.max_clock + bounds.senders


def _on_a_link(bounds: Bounds, s: int, w: int, k: int, v: int) -> bool:
    return s in bounds.all_senders and w in bounds.all_workers and 1 <= k <= bounds.max_link and _version(bounds, v)


def _version(bounds: Bounds, number: int) -> bool:
    return 0 <= number <= bounds.max_version


def _sender_ok(bounds: Bounds, node: Node, s: int) -> bool:
    sender = node.sender(s)
    out = sender.out
    return (
        _incarnation(bounds, sender.incarnation)
        and all(_version(bounds, number) for number in (sender.version, sender.serial, out.version))
        and 0 <= sender.dueAll <= sender.version
        and out.did <= set(bounds.all_workers)
        and len(sender.members) == len(out.owed) == len(out.outcomes) == bounds.workers
        and all(0 <= link <= bounds.max_link for link in out.owed)
        and _OUTCOMES.issuperset(out.outcomes)
        and all(
            0 <= entry.link <= bounds.max_link
            and entry.link_state in _LINK_STATES
            and all(_version(bounds, number) for number in (entry.served, entry.due, entry.catching))
            and _incarnation(bounds, entry.fence)
            for entry in sender.members
        )
    )


def _receiver_ok(bounds: Bounds, node: Node, w: int) -> bool:
    receiver = node.receiver(w)
    s, k = receiver.link
    return (
        (receiver.link == NO_LINK or (s in bounds.all_senders and 1 <= k <= bounds.max_link))
        and _incarnation(bounds, receiver.fence)
        and _incarnation(bounds, receiver.met)
        and all(
            _payload(bounds, each) for each in (receiver.decided, receiver.pending, receiver.served, *receiver.live)
        )
        and receiver.answer in {"NONE", "ACK", "DEFERRED", "REFUSED"}
    )


def _payload(bounds: Bounds, payload: Payload) -> bool:
    incarnation, version, serial = payload
    return _incarnation(bounds, incarnation) and _version(bounds, version) and _version(bounds, serial)


def consistent(bounds: Bounds, node: Node) -> bool:
    """A machine's data fits its state."""
    return all(_sender_consistent(bounds, node, s) for s in bounds.all_senders) and all(
        _receiver_consistent(node, w) for w in bounds.all_workers
    )


def _sender_consistent(bounds: Bounds, node: Node, s: int) -> bool:
    state, owing, blocked = node.sstate[s - 1], node.owing(s), node.blocked[s - 1]
    fresh = new_sender(bounds.workers).out
    return (
        (owing == 0 or state in OUTSTANDING)
        and (state != State.UNINITIALIZED.value or node.sender(s).out == fresh)
        and (state != _AWAITING or (owing > 0 and blocked))
        and (not blocked or state == _AWAITING)
        and all(_worker_consistent(node, s, w) for w in bounds.all_workers)
    )


def _worker_consistent(node: Node, s: int, w: int) -> bool:
    link = node.owed(s, w)
    return (
        (link != 0) is (node.outcome(s, w) == "PENDING")
        and (link == 0 or node.is_open(s, w, link))
        and (not node.is_gone(s, w) or node.is_open(s, w, node.entry(s, w).link))
    )


def _receiver_consistent(node: Node, w: int) -> bool:
    receiver, state = node.receiver(w), node.rstate[w - 1]
    unlinked = receiver.link == NO_LINK
    if (state in (State.UNINITIALIZED.value, State.CLOSED.value)) is not unlinked:
        return False
    if (state == State.PENDING_ASYNC.value) is (receiver.pending == NO_PAYLOAD):
        return False
    if unlinked:
        return True
    s, k = receiver.link
    own = receiver.fence == node.sender(s).incarnation
    return own and not (node.is_open(s, w, k) and node.is_gone(s, w))


def every_message_has_a_row(bounds: Bounds, node: Node) -> bool:
    """The table has a row for every message that may be read now."""
    ordered = "Reorders" not in bounds.links
    for message in node.messages:
        s, w, k = message.s, message.w, message.k
        waits = ordered and any((n.s, n.w, n.k) == (s, w, k) and n.p < message.p for n in node.messages)
        state = node.rstate[w - 1]
        if waits or state == _AWAITING:
            continue
        if message.v == 0:
            taken = hello_is(node, w, s, k)
        elif node.receiver(w).link == (s, k):
            taken = update_is(node, w, node.sender(s).incarnation, message.v)
        else:
            continue
        if not receiver_has_row(state, taken):
            return False
    return all(m.kind == "BYE" or sender_has_row(node.sstate[m.s - 1], answer_is(node, m)) for m in node.answers)


def no_torn_read(bounds: Bounds, node: Node) -> bool:
    """G3. A worker's model has tensors of one version only."""
    return all(len(set(receiver.live)) == 1 for receiver in node.rdata)


def refusal_keeps_serving(bounds: Bounds, node: Node) -> bool:
    """G6. A worker does not serve a version that was refused or superseded over the current link."""
    refused = (m for m in node.answers if m.v and m.kind in ("REFUSED", "SUPERSEDED"))
    return not any(
        node.receiver(m.w).link == (m.s, m.k) and node.receiver(m.w).served == (m.inc, m.v, m.p) for m in refused
    )


def late_joiner_catches_up(bounds: Bounds, node: Node) -> bool:
    """G12. A ready worker on an open, quiet link has decided the newest version due to it, or a newer one."""
    if bounds.links & {"Duplicates", "Loses"}:
        return True
    for s, w in product(bounds.all_senders, bounds.all_workers):
        entry, receiver = node.entry(s, w), node.receiver(w)
        due = max(entry.due, node.sender(s).dueAll)
        if due == 0 or node.rstate[w - 1] != State.READY.value or receiver.link != (s, entry.link):
            continue
        stands = node.is_open(s, w, entry.link) and not node.is_gone(s, w)
        quiet = not any((m.s, m.w, m.k) == (s, w, entry.link) for m in node.messages)
        if stands and quiet and receiver.decided[:2] < (node.sender(s).incarnation, due):
            return False
    return True


#: The invariants, by their names in the configurations.
INVARIANTS: Mapping[str, Invariant] = {
    "TypeOK": type_ok,
    "Consistent": consistent,
    "EveryMessageHasARow": every_message_has_a_row,
    "NoTornRead": no_torn_read,
    "RefusalKeepsServing": refusal_keeps_serving,
    "LateJoinerCatchesUp": late_joiner_catches_up,
}
