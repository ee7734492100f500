"""Workers that lack our receiver: the answers that their call client gives on their behalf."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from weightsync.errors import TransportError, with_type
from weightsync.protocol._tables import RefusalKind
from weightsync.protocol.messages import Ack, Bye, Hello, Message, Refusal, Update
from weightsync.protocol.report import Evidence
from weightsync.transports.buffers import Buffer
from weightsync.transports.calls.client import Answers


def start_call(message: Message, peer: str, call: Callable[[Update], Answers]) -> Answers:
    """Begin the call that carries an update. A handshake and a goodbye are answered here: the worker knows neither.

    Raises TransportError: as ``call`` does, or since a sender sends no such message.
    """
    match message:
        case Update():
            return call(message)
        case Hello():
            return answered(Hello(model_id=message.model_id, incarnation=message.incarnation))
        case Bye():
            return answered()
    raise TransportError(f"A sender sends no {type(message).__name__} to {peer}.")


def another_model(model_id: str, known: Iterable[str]) -> str:
    """Why a worker refuses a handshake: it has receivers of these models only."""
    names = ", ".join(map(repr, sorted(known)))
    return f"the worker has a receiver of {names}, and none of {model_id!r} so far: give both sides the same model_id"


def rejection(message: Message, reason: str) -> Refusal:
    """The Refusal of the handshake that belongs to a message."""
    incarnation = message.incarnation
    return Refusal(
        model_id=message.model_id, incarnation=incarnation, version=0, kind=RefusalKind.REFUSED, reason=reason
    )


class RefusingClient:
    """Refuses the handshake: the worker has receivers of other models only, and nothing of this one is sent there."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def start(self, message: Message, payload: Buffer | None) -> Answers:  # noqa: ARG002 - it sends nothing
        """Answer at once: see `CallClient.start`."""
        return answered() if isinstance(message, Bye) else answered(rejection(message, self._reason))

    def close(self) -> None:
        """Nothing to close."""


def answered(*messages: Message) -> Answers:
    """A call that has ended with these answers."""
    answers: Answers = Future()
    answers.set_result(messages)
    return answers


def ack(update: Update, *, seconds: float = 0.0, evidence: Evidence = Evidence.CALL) -> Ack:
    """The Ack of an update whose call returned."""
    return Ack(
        model_id=update.model_id,
        incarnation=update.incarnation,
        version=update.version,
        digest=update.digest,
        seconds=seconds,
        evidence=evidence,
    )


def refusal(
    update: Update,
    reason: str,
    remote_traceback: str = "",
    *,
    kind: RefusalKind = RefusalKind.REFUSED,
    evidence: Evidence = Evidence.CALL,
) -> Refusal:
    """The Refusal of an update: its call failed at the worker, or never reached it (evidence NONE)."""
    return Refusal(
        model_id=update.model_id,
        incarnation=update.incarnation,
        version=update.version,
        kind=kind,
        reason=reason,
        remote_traceback=remote_traceback,
        evidence=evidence,
    )


def raised(update: Update, error: BaseException, prefix: str = "") -> Refusal:
    """The Refusal of an update whose call raised an error, with the error's traceback."""
    return refusal(update, f"{prefix}{with_type(error)}", "".join(traceback.format_exception(error)))
