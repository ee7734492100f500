"""The receiver's pure half: its data, its events, its guards and its effects.

`step` does three things in order: *name* the input (all guards are in `name`), *look up* its row in the table,
*return* the next data and the effects. Versions are compared as keys ``(incarnation, version)``, so the first version
of a restarted trainer is newer than every version it sent before the restart.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from weightsync.errors import ProtocolError
from weightsync.protocol import machine
from weightsync.protocol._tables import RECEIVER_ROWS, ReceiverInput, RefusalKind, State
from weightsync.protocol.machine import method_of, next_state, refusal
from weightsync.protocol.messages import Ack, Refusal
from weightsync.protocol.report import SyncReport

#: (incarnation, version)
Key = tuple[int, int]


class Deferred(Struct, frozen=True):
    """An answer that waits until its version has been forwarded."""

    ack: Ack


class ReceiverData(Struct, frozen=True):
    """Everything a receiver stores besides its state."""

    #: The current link, over which the last handshake was completed; None without one.
    link: int | None = None
    #: The number that its sender gave it; 0: unknown, or there is no current link.
    senders_number: int = 0
    #: The highest incarnation a handshake was completed with; kept across links.
    fence: int = 0
    #: The newest key applied or refused, and the answer to it; kept across links.
    decided: Key | None = None
    answer: Ack | Refusal | Deferred | None = None
    #: The key that has arrived and is neither applied nor refused.
    pending: Key | None = None
    #: The key that the model serves; None if there is none yet, or if the user wrote other weights into the model.
    served: Key | None = None


class HelloArrived(Struct, frozen=True):
    """A handshake. ``misfit`` says why it must be refused (layout, protocol); empty if it is acceptable."""

    link: int
    incarnation: int
    misfit: str = ""
    #: The number that the sender has given the link: each of its links has a higher one. 0: not sent.
    senders_number: int = 0


class UpdateArrived(Struct, frozen=True):
    """A version has arrived completely."""

    link: int
    incarnation: int
    version: int


class Applied(Struct, frozen=True):
    """The pending version is live; ``answer`` goes to the sender."""

    answer: Ack


class Defer(Struct, frozen=True):
    """The pending version is live, and is forwarded before ``answer`` goes to the sender."""

    answer: Ack


class SendAck(Struct, frozen=True):
    """The deferred answer may be sent; ``nested`` is the report of the workers that the version was forwarded to."""

    nested: SyncReport | None = None


class Refused(Struct, frozen=True):
    """The pending version did not fit, and nothing was changed; ``answer`` goes to the sender."""

    answer: Refusal


class Broken(Struct, frozen=True):
    """The swap failed half way and could not be undone; ``reason`` goes to the sender."""

    reason: str = ""
    remote_traceback: str = ""


class Invalidate(Struct, frozen=True):
    """The user wrote other weights into the model: it no longer serves a version."""


class Answered(Struct, frozen=True):
    """The answer to the version decided last was sent."""


class LinkDown(Struct, frozen=True):
    """A link is down. ``failure`` says what failed at our end; empty if the other end closed it or died."""

    link: int
    failure: str = ""


class Goodbye(Struct, frozen=True):
    """A sender's goodbye over a link, and the incarnation in it."""

    link: int
    incarnation: int


class Close(Struct, frozen=True):
    """The user closes the receiver."""


class Fail(Struct, frozen=True):
    """The receiver is closed because something failed, such as the ``with`` block that used it."""

    reason: str
    remote_traceback: str = ""


Event = (
    HelloArrived
    | UpdateArrived
    | Applied
    | Defer
    | SendAck
    | Refused
    | Broken
    | Invalidate
    | Answered
    | LinkDown
    | Goodbye
    | Close
    | Fail
)


class Greet(Struct, frozen=True):
    """Answer the handshake with our own Hello."""

    link: int


class Reject(Struct, frozen=True):
    """Refuse the handshake, with the reason and the fence."""

    link: int
    incarnation: int
    kind: RefusalKind
    reason: str


class Disown(Struct, frozen=True):
    """Refuse everything that follows over a link: FENCED or FAILED, with the reason."""

    link: int
    incarnation: int
    kind: RefusalKind
    reason: str
    remote_traceback: str = ""


class Tell(Struct, frozen=True):
    """Refuse a version that was never applied."""

    link: int
    key: Key
    kind: RefusalKind


class Reply(Struct, frozen=True):
    """Send the answer to a decided version. In awaiting_ack, `Answered` or `LinkDown` follows."""

    link: int
    answer: Ack | Refusal


class CloseLink(Struct, frozen=True):
    """Close the link without a message."""

    link: int


class Leave(Struct, frozen=True):
    """Say goodbye over the link, and close it."""

    link: int


Effect = Greet | Reject | Disown | Tell | Reply | CloseLink | Leave


class Step(machine.Step[ReceiverInput, ReceiverData, Effect], frozen=True):
    """The result of an event of the receiver."""


def name(state: State, data: ReceiverData, event: Event) -> ReceiverInput | None:
    """Name the event's input in this state.

    Returns None for the end of a link that is not the current one, for a handshake over a link that its sender has
    replaced by the current one, for the goodbye of a sender that is not the current one, and for `SendAck` if no answer
    is deferred.

    Raises ProtocolError: an update over a link without a handshake.
    """
    match event:
        case HelloArrived():
            return None if _was_replaced(data, event) else _name_hello(state, data, event)
        case UpdateArrived():
            return _name_update(state, data, event)
        case LinkDown(link=link):
            ours = data.link in (link, None) and state is not State.CLOSED
            return ReceiverInput.LINK_DOWN if ours else None
        case Goodbye():
            ends = data.link is None or _is_current(data, event)
            return ReceiverInput.LINK_DOWN if ends and state is not State.CLOSED else None
        case SendAck():
            deferred = isinstance(data.answer, Deferred) and state is not State.CLOSED
            return ReceiverInput.SEND_ACK if deferred else None
        case Answered() if isinstance(data.answer, Deferred):
            raise refusal(RECEIVER_ROWS, state, ReceiverInput, method_of(ReceiverInput.ANSWERED))
        case _:
            return _INPUT_OF_EVENT[type(event)]


_INPUT_OF_EVENT = {
    Applied: ReceiverInput.APPLIED,
    Defer: ReceiverInput.DEFERRED,
    Refused: ReceiverInput.REFUSED,
    Broken: ReceiverInput.BROKEN,
    Invalidate: ReceiverInput.INVALIDATED,
    Answered: ReceiverInput.ANSWERED,
    Close: ReceiverInput.CLOSE,
    Fail: ReceiverInput.CLOSE,
}


def _is_current(data: ReceiverData, event: Goodbye) -> bool:
    return (event.link, event.incarnation) == (data.link, data.fence)


def _was_replaced(data: ReceiverData, event: HelloArrived) -> bool:
    """Whether the sender has made the current link after that of the handshake. It closed the older one before.

    Messages over two links arrive in any order.
    """
    beside = data.link not in {None, event.link} and event.incarnation == data.fence
    return beside and 0 < event.senders_number < data.senders_number


def _name_hello(state: State, data: ReceiverData, event: HelloArrived) -> ReceiverInput:
    if event.incarnation < data.fence or event.misfit:
        return ReceiverInput.REJECTED
    if state is State.UNINITIALIZED:
        return ReceiverInput.CONNECT
    if event.link == data.link and event.incarnation == data.fence:
        return ReceiverInput.DUPLICATE
    return ReceiverInput.TAKEOVER


def _name_update(state: State, data: ReceiverData, event: UpdateArrived) -> ReceiverInput:
    if state in (State.UNINITIALIZED, State.CLOSED):
        return ReceiverInput.UPDATE
    if event.incarnation < data.fence:
        return ReceiverInput.STALE
    if event.link != data.link or event.incarnation > data.fence:
        raise ProtocolError(
            f"version {event.version} of incarnation {event.incarnation} arrived over a link without a handshake for "
            "that incarnation. The link is closed; nothing was applied."
        )
    key = (event.incarnation, event.version)
    if key in (data.decided, data.pending):
        return ReceiverInput.DUPLICATE
    if key < max(data.decided or (0, 0), data.pending or (0, 0)):
        return ReceiverInput.STALE
    return ReceiverInput.NEWER if state is State.PENDING_ASYNC else ReceiverInput.UPDATE


def step(state: State, data: ReceiverData, event: Event) -> Step:
    """Name the event's input, look up its row, return the next data and the effects.

    Raises:
        StateError: the table has no row for it; nothing has changed.
        ProtocolError: an update over a link without a handshake; nothing has changed.
    """
    named = name(state, data, event)
    if named is None:
        return Step(None, state, data, _close_other_link(data, event))
    to = RECEIVER_ROWS.get((state, named)) or next_state(RECEIVER_ROWS, state, named)
    after, effects = _advance(named, data, event)
    return Step(named, to, after, effects)


def _advance(named: ReceiverInput, data: ReceiverData, event: Event) -> tuple[ReceiverData, tuple[Effect, ...]]:
    match event:
        case HelloArrived():
            return _greet(named, data, event)
        case UpdateArrived():
            return _receive_update(named, data, event)
        case Applied() | Defer() | SendAck() | Refused():
            return _decide(data, event)
        case Broken(reason, trace):
            return _unlinked(replace(data, served=None)), _fail(data, data.link, reason, trace)
        case LinkDown(link, failure):
            ended = _fail(data, link, failure, "") if failure else (CloseLink(link),)
            return _unlinked(data), ended
        case Goodbye(link):
            return _unlinked(data), (CloseLink(link),)
        case Close():
            return _unlinked(data), () if data.link is None else (Leave(data.link),)
        case Fail(reason, trace):
            return _unlinked(data), _fail(data, data.link, reason, trace)
        case Invalidate():
            return replace(data, served=None), ()
        case Answered():
            return data, ()


def _unlinked(data: ReceiverData) -> ReceiverData:
    return replace(data, link=None, senders_number=0, pending=None)


def _close_other_link(data: ReceiverData, event: Event) -> tuple[Effect, ...]:
    """Close a link other than the current one, and report to its sender what failed, if anything."""
    match event:
        case LinkDown(link, failure) if failure:
            return _fail(data, link, failure, "")
        case LinkDown(link) | HelloArrived(link):
            return (CloseLink(link),)
        case Goodbye(link) if link != data.link:
            return (CloseLink(link),)
        case _:
            return ()


def _greet(named: ReceiverInput, data: ReceiverData, event: HelloArrived) -> tuple[ReceiverData, tuple[Effect, ...]]:
    match named:
        case ReceiverInput.REJECTED:
            return data, _reject(data, event)
        case ReceiverInput.DUPLICATE:
            return data, ()
        case _:
            now = {"link": event.link, "senders_number": event.senders_number, "fence": event.incarnation}
            after = replace(_forget_overwritten(data), **now, pending=None)
            return after, (*_end_former_link(data, event), Greet(event.link))


def _forget_overwritten(data: ReceiverData) -> ReceiverData:
    """Forget the version that was applied last if the model no longer holds it: over a new link it is applied again."""
    overwritten = data.served is None and isinstance(data.answer, Ack | Deferred)
    return replace(data, decided=None, answer=None) if overwritten else data


def _reject(data: ReceiverData, event: HelloArrived) -> tuple[Effect, ...]:
    fenced = event.incarnation < data.fence
    kind = RefusalKind.FENCED if fenced else RefusalKind.REFUSED
    reason = _NEWER_SENDER if fenced else event.misfit
    rejection = Reject(event.link, event.incarnation, kind, reason)
    return (rejection,) if event.link == data.link else (rejection, CloseLink(event.link))


def _receive_update(
    named: ReceiverInput, data: ReceiverData, event: UpdateArrived
) -> tuple[ReceiverData, tuple[Effect, ...]]:
    key = (event.incarnation, event.version)
    match named:
        case ReceiverInput.STALE:
            return data, (Tell(event.link, key, RefusalKind.STALE),)
        case ReceiverInput.DUPLICATE:
            if key == data.decided and isinstance(data.answer, Ack | Refusal):
                return data, (Reply(event.link, data.answer),)
            return data, ()
        case ReceiverInput.NEWER if data.pending is not None:
            return replace(data, pending=key), (Tell(event.link, data.pending, RefusalKind.SUPERSEDED),)
        case _ if isinstance(data.answer, Deferred) and data.answer.ack.incarnation == event.incarnation:
            # The sender may be waiting for this answer to a late joiner's version; a newer version would replace it.
            ack = data.answer.ack
            return replace(data, pending=key, answer=ack), (Reply(event.link, ack),)
        case _:
            return replace(data, pending=key), ()


def _decide(data: ReceiverData, event: Applied | Defer | SendAck | Refused) -> tuple[ReceiverData, tuple[Effect, ...]]:
    match event:
        case Applied(answer):
            return _serve_pending(data, answer), _reply(data, answer)
        case Defer(answer):
            return _serve_pending(data, Deferred(answer)), ()
        case SendAck(nested):
            return _send_ack(data, nested)
        case Refused(answer):
            return replace(data, pending=None, decided=data.pending, answer=answer), _reply(data, answer)


def _serve_pending(data: ReceiverData, answer: Ack | Deferred) -> ReceiverData:
    return replace(data, decided=data.pending, answer=answer, pending=None, served=data.pending)


def _send_ack(data: ReceiverData, nested: SyncReport | None) -> tuple[ReceiverData, tuple[Effect, ...]]:
    """Send the deferred answer over the current link, even if that is a newer one of the same sender."""
    assert isinstance(data.answer, Deferred)
    ack = replace(data.answer.ack, nested=nested)
    return replace(data, answer=ack), _reply(data, ack) if ack.incarnation == data.fence else ()


def _reply(data: ReceiverData, answer: Ack | Refusal) -> tuple[Effect, ...]:
    return () if data.link is None else (Reply(data.link, answer),)


def _end_former_link(data: ReceiverData, event: HelloArrived) -> tuple[Effect, ...]:
    """Close the old link. An older sender is sent FENCED; the same sender has replaced the link itself.

    If both senders use one link, it stays open: the older sender gets the new fence with the answer to its pending
    version, and a deferred answer is sent at once.
    """
    if data.link is None:
        return ()
    if data.link == event.link:
        deferred = _reply(data, data.answer.ack) if isinstance(data.answer, Deferred) else ()
        return (*deferred, Tell(data.link, data.pending, RefusalKind.STALE)) if data.pending else deferred
    disowned = (
        (Disown(data.link, data.fence, RefusalKind.FENCED, _NEWER_SENDER),) if data.fence < event.incarnation else ()
    )
    return (*disowned, CloseLink(data.link))


_NEWER_SENDER = "this worker has seen a newer sender"


def _fail(data: ReceiverData, link: int | None, reason: str, trace: str) -> tuple[Effect, ...]:
    """Close a link because something failed, and report the failure to its sender."""
    if link is None:
        return ()
    return Disown(link, data.fence, RefusalKind.FAILED, reason, trace), CloseLink(link)
