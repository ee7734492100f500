"""A second reading of CallsArePossible: whatever may be done in a state is an edge that leaves it.

TLC evaluates whether an action is enabled. Edges exist only for actions that the configuration's features allow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import TypeVar

from modelcheck.second.bounds import Bounds
from modelcheck.second.graph import Label
from modelcheck.second.words import NO_LINK, Message, Node, Word
from weightsync.protocol._actions import Action
from weightsync.protocol._tables import State

_CLOSED, _READY = State.CLOSED.value, State.READY.value
_PENDING, _AWAITING = State.PENDING_ASYNC.value, State.AWAITING_ACK.value
_FEATURES: Mapping[str, str] = {
    Action.SEND_ASYNC_ALL: "async",
    Action.DEADLINE: "deadline",
    Action.INTERRUPTED: "interrupt",
    Action.ABANDON: "abandon",
    Action.CLOSE_SENDER: "close",
    Action.REMOVE: "remove",
    Action.GIVE_UP: "wrong",
    Action.REFUSED: "refuse",
    Action.BROKEN: "broken",
    Action.CLOSE_RECEIVER: "bye",
    Action.FAIL_RECEIVER: "fail",
    Action.INVALIDATE: "invalidate",
    Action.DEFER: "defer",
    Action.SEND_ACK: "defer",
    Action.LINK_FAILED: "fail",
}
_Message = TypeVar("_Message", Message, Word)


def calls_are_possible(bounds: Bounds, node: Node, leaving: frozenset[Label]) -> bool:
    """Whether each action that may be taken in this state has an edge, if the configuration has its feature."""
    due = (*_of_senders(bounds, node), *_of_receivers(bounds, node), *_of_messages(node))
    return all(label in leaving or _FEATURES.get(str(label[0])) not in {None, *bounds.features} for label in due)


def _of_senders(bounds: Bounds, node: Node) -> Iterator[Label]:
    for s in bounds.all_senders:
        if node.slife[s - 1] != "alive":
            continue
        state, sender = node.sstate[s - 1], node.sender(s)
        live = any(entry.link_state in ("EXPECTED", "UP") for entry in sender.members)
        if state == _READY and sender.serial < bounds.max_version and live:
            yield from ((Action.SEND_ALL, s), (Action.SEND_ASYNC_ALL, s))
        if state == _PENDING:
            yield from ((Action.WAIT, s), (Action.ABANDON, s))
        if state == _AWAITING:
            yield from ((Action.DEADLINE, s), (Action.INTERRUPTED, s))
        if state != _CLOSED:
            yield (Action.CLOSE_SENDER, s)
    for s, w in product(bounds.all_senders, bounds.all_workers):
        if node.slife[s - 1] == "alive":
            yield from _of_entry(bounds, node, s, w)


def _of_entry(bounds: Bounds, node: Node, s: int, w: int) -> Iterator[Label]:
    entry, gone = node.entry(s, w), node.is_gone(s, w)
    if node.sstate[s - 1] != _CLOSED:
        if entry.link_state in ("NONE", "LOST", "REFUSED") and entry.link < bounds.max_link:
            yield (Action.JOIN, s, w)
        if entry.link_state in ("LOST", "REFUSED"):
            yield (Action.REMOVE, s, w)
    if node.is_open(s, w, entry.link) and not gone:
        yield (Action.GIVE_UP, s, w)
    if gone and not any((m.s, m.w, m.k) == (s, w, entry.link) for m in node.answers):
        yield (Action.NOTICE, s, w)


def _of_receivers(bounds: Bounds, node: Node) -> Iterator[Label]:
    for w in bounds.all_workers:
        state, link = node.rstate[w - 1], node.receiver(w).link
        if state == _PENDING:
            yield from ((Action.APPLIED, w), (Action.DEFER, w), (Action.REFUSED, w), (Action.BROKEN, w))
        yield (Action.INVALIDATE, w)
        deferred = node.receiver(w).answer == "DEFERRED"
        if deferred and state != _CLOSED:
            yield (Action.SEND_ACK, w)
        if state == _AWAITING and not deferred:
            yield (Action.ANSWERED, w)
        if state != _CLOSED:
            yield from ((Action.CLOSE_RECEIVER, w), (Action.FAIL_RECEIVER, w))
            if link != NO_LINK:
                yield (Action.LINK_FAILED if node.is_open(link[0], w, link[1]) else Action.LINK_DOWN, w, *link)


def _of_messages(node: Node) -> Iterator[Label]:
    for message in _first(node.messages):
        place, state = (message.w, message.s, message.k), node.rstate[message.w - 1]
        if message.v == 0 and state not in (_CLOSED, _AWAITING):
            yield (Action.HELLO_ARRIVED, *place)
        if message.v and state in (_READY, _PENDING) and node.receiver(message.w).link == (message.s, message.k):
            yield (Action.UPDATE_ARRIVED, *place, message.v)
    for word in _first(node.answers):
        yield from _of_answer(node, word)


def _of_answer(node: Node, m: Word) -> Iterator[Label]:
    place = (m.s, m.w, m.k)
    match m.kind:
        case "HELLO":
            yield (Action.ANSWER_HELLO, *place)
        case "ACK":
            yield (Action.ANSWER_ACK, *place, m.v)
        case "BYE":
            if node.is_open(*place):
                yield (Action.ANSWER_BYE, *place)
        case kind:
            yield (Action.ANSWER_REFUSAL, *place, m.v, kind) if m.v else (Action.ANSWER_REJECTED, *place, kind)


def _first(messages: frozenset[_Message]) -> Iterator[_Message]:
    """The oldest messages in flight on each link."""
    for m in messages:
        if all(m.p <= n.p for n in messages if (n.s, n.w, n.k) == (m.s, m.w, m.k)):
            yield m
