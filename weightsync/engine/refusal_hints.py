"""Why a call is refused, and what its caller can do about it."""

from __future__ import annotations

from collections.abc import Collection

from weightsync.protocol._tables import State
from weightsync.protocol.messages import Hello, Message, Part, Update
from weightsync.protocol.receiver import ReceiverData
from weightsync.protocol.sender import SenderData

_SEND_METHODS = ("send", "send_async")


def sender_hint(state: State, data: SenderData, method: str) -> str:
    """Why a sender refuses a method, as far as its data shows."""
    if state is State.CLOSED:
        return "this sender is closed for good. Make a new scheme and call its init_on_sender()."
    if method == "connect":
        return "this sender already has its links. add_worker() adds another worker."
    if state is State.UNINITIALIZED:
        return (
            "this sender has no links: it is new, or a copy (pickled, copied or inherited by a forked process), which "
            "has none. init_on_sender() of its scheme, or add_worker(), gives it workers."
        )
    if state is State.READY:
        return "no update is outstanding. send_async() dispatches one that can be waited for or abandoned."
    if state is State.AWAITING_ACK:
        return (
            f"another call waits for version {data.version}, which {_owing(data)}. Let it return first. It is in "
            "another thread, or is the call that a signal handler has interrupted to make this one."
        )
    advice = "Call wait_async() or abandon()"
    if method in _SEND_METHODS:
        advice += ", or pass on_pending='supersede' (or 'wait')"
    return f"version {data.version} {_owing(data)}. {advice}."


def receiver_hint(state: State, data: ReceiverData) -> str:
    """Why a receiver refuses a method, as far as its data shows."""
    if state is State.CLOSED:
        kept = f"keeps version {data.served[1]}" if data.served else "serves no version"
        return f"this receiver is closed for good; its model {kept}. Make a new scheme and call its init_on_worker()."
    if state is State.UNINITIALIZED:
        return (
            "this receiver has no link. init_on_worker() of its scheme, or register_worker_transport(), gives it one."
        )
    return ""


def workers_text(workers: Collection[int]) -> str:
    """Workers by their ids, for messages to people."""
    numbers = ", ".join(map(str, workers))
    return f"worker {numbers}" if len(workers) == 1 else f"workers {numbers}"


def _owing(data: SenderData) -> str:
    owed = data.outstanding.owed if data.outstanding is not None else {}
    return f"still awaits {workers_text(owed)}" if owed else "has been answered, but not reported yet"


def sender_message_error(worker: int, message: Message) -> str:
    """What is wrong with a message to a sender that only senders send; empty: it is another message."""
    match message:
        case Hello() if message.link and not message.fence:
            kind = "a sender's handshake"
        case Update():
            kind = "an Update"
        case Part():
            kind = "a Part"
        case _:
            return ""
    return (
        f"worker {worker} sent {kind}; only senders send them. Its link is taken down. At its other end is a sender, "
        "perhaps this one: give init_on_sender() one end of each pipe, and the worker's init_on_worker() the other."
    )
