"""What a worker answers to a handshake for a model that it has no receiver of, and how its trainer reads the answer.

It is a Refusal under incarnation 0, which is no sender's: it settles nothing. The handshake stays where it is, and is
taken if the worker registers the model later.
"""

from __future__ import annotations

from collections.abc import Iterable

from weightsync.protocol._tables import RefusalKind
from weightsync.protocol.messages import Hello, Message, Refusal


def is_from_sender(message: Message) -> bool:
    """Whether a message is a handshake that a sender has begun: a receiver's answer names its fence."""
    return isinstance(message, Hello) and not message.fence


def answer(model_id: str, registered: Iterable[str]) -> Refusal:
    """What is answered to a handshake for a model that is none of those registered."""
    known = ", ".join(map(repr, sorted(registered)))
    reason = (
        f"the worker has a receiver of {known} over this connection, and none of {model_id!r} so far: give both sides "
        "the same model_id"
    )
    return Refusal(model_id=model_id, incarnation=0, version=0, kind=RefusalKind.REFUSED, reason=reason)


def told_by(message: Message) -> str:
    """What such an answer says; empty: the message is another."""
    if not isinstance(message, Refusal) or message.kind is not RefusalKind.REFUSED:
        return ""
    return message.reason if message.incarnation == message.version == 0 else ""
