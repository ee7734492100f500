"""A second reading of the guards: the input that a message becomes, in terms of the model's values.

The rows are those of `weightsync.protocol._tables`. The guards are independent of the shipped code's and the model's.
"""

from __future__ import annotations

from modelcheck.second.words import Node, Word
from weightsync.protocol._tables import RECEIVER_ROWS, SENDER_ROWS, ReceiverInput, RefusalKind, SenderInput, State

_SENDER_ROWS = {(state.value, taken.value): to.value for (state, taken), to in SENDER_ROWS.items()}
_RECEIVER_ROWS = {(state.value, taken.value): to.value for (state, taken), to in RECEIVER_ROWS.items()}
_REFUSALS = {kind.name for kind in RefusalKind}
#: (state before, state after) of every row.
SENDER_MOVES = {(state, to) for (state, _), to in _SENDER_ROWS.items()}
RECEIVER_MOVES = {(state, to) for (state, _), to in _RECEIVER_ROWS.items()}
OUTSTANDING = (State.PENDING_ASYNC.value, State.AWAITING_ACK.value)


def sender_has_row(state: str, taken: SenderInput) -> bool:
    """Whether the table has a row for a sender in this state and this input."""
    return (state, taken.value) in _SENDER_ROWS


def receiver_has_row(state: str, taken: ReceiverInput) -> bool:
    """Whether the table has a row for a receiver in this state and this input."""
    return (state, taken.value) in _RECEIVER_ROWS


def hello_is(node: Node, w: int, s: int, k: int) -> ReceiverInput:
    """The input of a handshake whose layout fits: REJECTED below the fence, TAKEOVER over a new link."""
    incarnation, receiver = node.sender(s).incarnation, node.receiver(w)
    if receiver.fence > incarnation:
        return ReceiverInput.REJECTED
    if node.rstate[w - 1] == State.UNINITIALIZED.value:
        return ReceiverInput.CONNECT
    again = (receiver.link, receiver.fence) == ((s, k), incarnation)
    return ReceiverInput.DUPLICATE if again else ReceiverInput.TAKEOVER


def update_is(node: Node, w: int, incarnation: int, version: int) -> ReceiverInput:
    """The input of an update over the current link, by comparing it with the decided and the pending version."""
    receiver = node.receiver(w)
    key = (incarnation, version)
    if incarnation < receiver.fence:
        return ReceiverInput.STALE
    seen = (receiver.decided[:2], receiver.pending[:2])
    if key in seen:
        return ReceiverInput.DUPLICATE
    if key < max(seen):
        return ReceiverInput.STALE
    pending = node.rstate[w - 1] == State.PENDING_ASYNC.value
    return ReceiverInput.NEWER if pending else ReceiverInput.UPDATE


def answer_is(node: Node, m: Word) -> SenderInput:
    """The input of an answer: STALE unless it names the sender's incarnation, on an open link, and is owed."""
    s, sender, entry = m.s, node.sender(m.s), node.entry(m.s, m.w)
    if m.inc != sender.incarnation or not node.is_open(s, m.w, m.k):
        return SenderInput.STALE
    owes = node.owed(s, m.w) == m.k
    last = owes and node.owing(s) == 1 and node.sstate[s - 1] == State.AWAITING_ACK.value
    if m.kind == "HELLO":
        return SenderInput.ARRIVED if entry.link_state == "EXPECTED" else SenderInput.STALE
    if m.kind == "BYE":
        return SenderInput.SETTLED if last else SenderInput.LEFT
    if m.kind in _REFUSALS and m.v == 0:
        return SenderInput.SETTLED if last else SenderInput.LOST
    if owes and m.v == sender.version:
        return SenderInput.SETTLED if last else SenderInput.REPLY
    if m.v and m.v == entry.catching:
        return SenderInput.CAUGHT_UP
    return SenderInput.STALE
